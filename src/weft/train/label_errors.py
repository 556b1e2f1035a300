"""Likely label errors, ambiguous classes, outliers and near-duplicates among labelled images, from their features.

The class probabilities of every image come from a classifier that was fitted without it. The classifiers are fitted
twice, the second time without the likely errors of the first, which are found as in confident learning (Northcutt et
al., arXiv 1911.00068): each class has a threshold of its own. How often each class is confused with each other one is
estimated from the labels and these probabilities (Dawid and Skene 1979), and gives the probability that a label is
right: errors between similar classes are found at lower certainty than others.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from threadpoolctl import threadpool_limits

from weft.checkpoints.unknown import unit_length
from weft.inference.scores import confused_pairs
from weft.train.linear_probe import FOLDS, held_out_probabilities

MAX_SHARE = 0.1  # of the mean probability of a label, below which the first classifier finds the label wrong
MIN_QUALITY = 0.7  # probability that a label is right, below which it is listed: a person checks the list
MIN_KEPT = 0.5  # the same, below which another label is proposed
EXPECTED_ERRORS = 0.1  # share of wrong labels of a class that is assumed before its labels are seen
EXPECTED_IMAGES = 10  # number of images as which this assumption counts
ITERATIONS = 30  # of the estimate of the confusions, which then changes little
LEAST = 1e-6  # probability of every class
MAX_PROBABILITIES = 100_000_000  # images x classes; of more, no label is judged: 800 MB for each such matrix
NEIGHBOURS = 10  # of the outlier score
OUTLIER_DEVIATIONS = 4.0  # robust standard deviations above the median distance
MIN_SIMILARITY = 0.7  # cosine of the centred features of near-duplicates; of other images of few9 at most 0.57
MIN_CENTRED = 20  # images; of fewer, the mean of the features says little, and every pair is compared
MAX_BITS = 10  # of 64, in which the hashes of near-duplicates differ
MAX_DISTANCE = 0.3  # of the distance to the tenth nearest image, up to which hashes may differ (duplicates.csv)
ROWS = 1_024  # of the similarity matrix at a time


@dataclass(frozen=True)
class LabelErrors:
    """Result of `find_label_errors`.

    Attributes:
        probabilities: (images classes), each row by a classifier that was fitted without the image and its group.
        is_judged: (images) whether the class of the label had an image in the other folds; others have no result.
        proposed: (images) index of the most probable class, given the image and its label; of the most probable other
            class for listed images; the label itself for images that are not judged.
        quality: (images) probability that the label is right, from 0 to 1; 1 for images that are not judged.
        is_error: (images) whether the label is listed as a likely error: its quality is less than 0.7.
        confusions: (pairs 3) label, other class and number of images with this label that confident learning counts as
            the other class, as `weft.inference.scores.confused_pairs`.
    """

    probabilities: np.ndarray
    is_judged: np.ndarray
    proposed: np.ndarray
    quality: np.ndarray
    is_error: np.ndarray
    confusions: np.ndarray

    def order(self) -> np.ndarray:
        """Return the indices of the likely label errors, most likely first."""
        places = np.flatnonzero(self.is_error)
        return places[np.argsort(self.quality[places], kind="stable")]


def find_label_errors(
    features: np.ndarray, labels: np.ndarray, num_classes: int, groups: np.ndarray | None = None
) -> LabelErrors:
    """Find likely label errors.

    Args:
        features: (images features).
        labels: (images) class indices.
        num_classes: number of classes.
        groups: (images) group of every image, such as its copies; a group is in one fold. None without groups.
    """
    fold_of = folds_of(labels, groups)

    def others_of(is_used: np.ndarray) -> np.ndarray:
        """Return whether a class has a used image in the other folds (folds classes)."""
        used = (labels[is_used & (fold_of != fold)] for fold in range(FOLDS))
        return np.stack([np.bincount(own, minlength=num_classes) > 0 for own in used])

    others = others_of(np.ones(len(labels), bool))
    is_judged = others[fold_of, labels] & can_judge(len(labels), num_classes)
    if not is_judged.any():
        return label_errors_of(np.broadcast_to(1 / num_classes, (len(labels), num_classes)), labels, is_judged)
    with threadpool_limits(1):
        probabilities = held_out_probabilities(features[:, None], labels, num_classes, fold_of)
        is_used = ~is_improbable(probabilities, labels, is_judged)
        is_lost = ~others_of(is_used) & others
        is_used |= np.asarray(is_lost.any(axis=0))[labels]  # no class loses all its images
        probabilities = held_out_probabilities(features[:, None], labels, num_classes, fold_of, is_used)
    return label_errors_of(probabilities, labels, is_judged)


def label_errors_of(probabilities: np.ndarray, labels: np.ndarray, is_judged: np.ndarray) -> LabelErrors:
    """Find likely label errors from held-out probabilities (images classes); arguments as in `LabelErrors`.

    `confusions` are those of confident learning: an image is confidently of class j if its probability of j is at least
    the mean probability of j among the images with label j.
    """
    thresholds = _mean_of_own(probabilities, labels, is_judged)
    judged, own = probabilities[is_judged], labels[is_judged]
    confident = np.where(judged >= thresholds, judged, -1.0)
    is_confident = confident.max(axis=1) >= 0
    likely = confident.argmax(axis=1)
    confusions = confused_pairs(own[is_confident], likely[is_confident], probabilities.shape[1])
    quality, proposed = np.ones(len(labels)), labels.copy()
    if len(own):
        true, rows = true_classes(judged, own), np.arange(len(own))
        quality[is_judged] = true[rows, own]
        true[rows, own] = np.where(true[rows, own] < MIN_QUALITY, 0, true[rows, own])
        proposed[is_judged] = true.argmax(axis=1)
    return LabelErrors(probabilities, is_judged, proposed, quality, quality < MIN_QUALITY, confusions)


def can_judge(num_images: int, num_classes: int) -> bool:
    """Return whether matrices of probabilities (images classes) and of confusions (classes classes) fit into memory."""
    return max(num_images, num_classes) * num_classes <= MAX_PROBABILITIES


def true_classes(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probabilities of the true class (images classes), given the image and its label.

    The label of an image of class j is i with a probability that is estimated from all images, alternating with the
    result (expectation maximisation).

    Args:
        probabilities: (images classes), given the image alone.
        labels: (images) class indices.
    """
    num_classes = probabilities.shape[1]
    if num_classes == 1:
        return np.ones_like(probabilities)
    given_image = np.maximum(probabilities, LEAST)
    expected = np.full((num_classes, num_classes), EXPECTED_ERRORS / (num_classes - 1))
    np.fill_diagonal(expected, 1 - EXPECTED_ERRORS)
    of_labels, confused = np.eye(num_classes)[labels], expected  # confused: probability of a label (column), given j
    true = given_image
    for _ in range(ITERATIONS):
        true = given_image * confused[:, labels].T
        true /= true.sum(axis=1, keepdims=True)
        counts = true.T @ of_labels + EXPECTED_IMAGES * expected
        confused = counts / counts.sum(axis=1, keepdims=True)
    return true


def is_improbable(probabilities: np.ndarray, labels: np.ndarray, is_judged: np.ndarray) -> np.ndarray:
    """Return for each image whether its label is improbable, and another class is more probable.

    A probability is low if it is less than `MAX_SHARE` of the mean probability of this label among the images that have
    it.
    """
    own = probabilities[np.arange(len(labels)), labels]
    others = np.where(np.eye(probabilities.shape[1], dtype=bool)[labels], 0.0, probabilities).max(axis=1)
    return is_judged & (own < MAX_SHARE * _mean_of_own(probabilities, labels, is_judged)[labels]) & (own < others)


def _mean_of_own(probabilities: np.ndarray, labels: np.ndarray, is_judged: np.ndarray) -> np.ndarray:
    """Return the mean probability (classes) of each label among the images that have it; infinite without any."""
    num_classes = probabilities.shape[1]
    own = probabilities[np.arange(len(labels)), labels][is_judged]
    counts = np.bincount(labels[is_judged], minlength=num_classes)
    sums = np.bincount(labels[is_judged], weights=own, minlength=num_classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def folds_of(labels: np.ndarray, groups: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """Return the fold of every image, 0 to 4; each class is spread over the folds, and a group is in one fold."""
    names = np.arange(len(labels)) if groups is None else groups
    _, first, group_of = np.unique(names, return_index=True, return_inverse=True)
    shuffled = np.random.default_rng(seed).permutation(len(first))
    order = shuffled[np.argsort(labels[first[shuffled]], kind="stable")]  # groups by the class of their first image
    fold_of_group = np.empty(len(first), int)
    fold_of_group[order] = np.arange(len(first)) % FOLDS
    return fold_of_group[group_of]


def neighbour_distances(features: np.ndarray) -> np.ndarray:
    """Return the mean cosine distance (images), from 0 to 2, of each image to its nearest `NEIGHBOURS` other images."""
    k = min(NEIGHBOURS, len(features) - 1)
    if k < 1:
        return np.zeros(len(features))
    parts = [1 - np.partition(block, -k, axis=1)[:, -k:].mean(axis=1) for _, block in _similarities(features)]
    return np.concatenate(parts).clip(0)


def outliers(distances: np.ndarray) -> np.ndarray:
    """Return the indices of images far from all others, farthest first.

    Their distance is more than four robust standard deviations (of the median absolute deviation) above the median.
    """
    median = np.median(distances)
    deviation = 1.4826 * np.median(np.abs(distances - median))
    places = np.flatnonzero(distances > median + OUTLIER_DEVIATIONS * deviation + 1e-9)
    return places[np.argsort(-distances[places], kind="stable")]


def near_duplicates(features: np.ndarray, open_image: Callable[[int], Image.Image]) -> list[list[int]]:
    """Return groups of indices of near-duplicates.

    The features of two near-duplicates are similar, and either the brightness gradients are similar, also mirrored, or
    the features are much closer to each other than to those of other images. The latter finds rotated and cropped
    copies. It compares with other images, because the features of a network that was trained on these classes are all
    similar within a class.

    Args:
        features: (images features).
        open_image: function from the index of an image to the image; only of images with similar features.
    """
    is_few = len(features) < MIN_CENTRED
    hashes, hashes_of = np.zeros((len(features), 2), np.uint64), functools.cache(lambda i: _hashes(open_image(i)))
    close = np.zeros(len(features))  # largest distance of a near-duplicate whose hash may differ
    pairs, distances, has_hash = [], [], []
    for start, block in _similarities(features - features.mean(axis=0)):
        if not is_few:
            close[start : start + len(block)] = MAX_DISTANCE * (
                1 - np.partition(block, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS]
            )
        places, columns = np.nonzero(block >= (-np.inf if is_few else MIN_SIMILARITY))
        places, columns = places[places + start < columns], columns[places + start < columns]
        rows, distance = places + start, 1 - block[places, columns]
        for i in np.unique([rows, columns]).tolist():
            hashes[i] = hashes_of(i)
        bits = np.bitwise_count(hashes[rows, :1] ^ hashes[columns]).min(axis=1)  # of the closer orientation
        is_kept = (bits <= MAX_BITS) | (distance <= close[rows])
        pairs.append(np.stack([rows, columns])[:, is_kept])
        distances.append(distance[is_kept])
        has_hash.append(bits[is_kept] <= MAX_BITS)
    edges = np.concatenate(pairs, axis=1)
    edges = edges[:, np.concatenate(has_hash) | (np.concatenate(distances) <= close[edges].min(axis=0))]
    component, groups = _components(edges, len(features)), defaultdict[int, list[int]](list)
    for i in np.unique(edges).tolist():
        groups[component[i]].append(i)
    return list(groups.values())


def joined_groups(own: Sequence[str], duplicates: Sequence[Sequence[int]]) -> list[str]:
    """Return groups of images such that images of one own group, or of one group of near-duplicates, are together.

    Args:
        own: group of every image in the data; empty for an image without one.
        duplicates: indices of each group of near-duplicates.

    Returns:
        Group of every image: the first own name, alphabetically, of those that are joined, else `copies-N`; empty for
        an image in no group.
    """
    names = sorted(set(own) - {""})
    number = {name: len(own) + place for place, name in enumerate(names)}  # nodes after those of the images
    edges = [(i, number[name]) for i, name in enumerate(own) if name]
    edges += [(copies[0], i) for copies in duplicates for i in copies]
    component = _components(np.array(edges, int).reshape(-1, 2).T, len(own) + len(names))
    name_of = {component[number[name]]: name for name in reversed(names)}
    free = (name for n in itertools.count(1) if (name := f"copies-{n}") not in number)
    for copies in duplicates:
        if component[copies[0]] not in name_of:
            name_of[component[copies[0]]] = next(free)
    return [name_of.get(place, "") for place in component[: len(own)]]


def _components(edges: np.ndarray, num_nodes: int) -> list[int]:
    """Return the number of the connected component of every node of a graph with edges (2 edges)."""
    graph = coo_array((np.ones(edges.shape[1]), tuple(edges)), (num_nodes, num_nodes))
    return connected_components(graph, directed=False)[1].tolist()


def _similarities(features: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, cosine similarities) of blocks of rows; the similarity of an image to itself is -1."""
    unit = unit_length(features.astype(np.float32))
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS] @ unit.T
        rows = np.arange(len(block))
        block[rows, start + rows] = -1
        yield start, block


def _hashes(image: Image.Image) -> tuple[int, int]:
    """Return the difference hash of 64 bits of an image, and of its mirror image."""
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.LANCZOS), int)
    bits = [grey[:, 1:] > grey[:, :-1], grey[:, -2::-1] > grey[:, :0:-1]]
    return tuple(int.from_bytes(np.packbits(one).tobytes(), "big") for one in bits)  # type: ignore[return-value]
