"""Find classes that are mirror images of each other, such as left and right shoes.

Training mirrors half of the images (`augment.hflip`), so that a network cannot learn such classes, and its predictions
for them are those of chance. A classifier that is fitted to held-out images as they are, by the features of the network
or by small versions of the images, assigns their mirror images to the other class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from weft.inference.scores import confused_pairs
from weft.text import first_few

FOLDS = 5
SMALL = 8  # pixels of a side of the small versions
MIN_SHARE = 0.5  # of the images of a class, that change to the other one
MAX_P = 1e-3  # of the sign test


class MirroredPair(NamedTuple):
    """Two classes whose mirror images are taken for each other: changed images, and all images of both."""

    first: int
    second: int
    changed: int
    images: int


def small_versions(images: Tensor) -> np.ndarray:
    """Return small versions of images (b c h w) as features (b features)."""
    return adaptive_avg_pool2d(images, SMALL).flatten(1).numpy()


def find_mirrored(views: Sequence[np.ndarray], labels: np.ndarray) -> list[MirroredPair]:
    """Return the pairs of classes that are mirror images of each other.

    Args:
        views: several kinds of features, each (2 images features): of each image, and of its mirror image.
        labels: (images) class indices.
    """
    pairs = dict[tuple[int, int], MirroredPair]()
    for points in views:
        is_used = np.isfinite(points).all(axis=(0, 2))
        for pair in mirrored_pairs(points[:, is_used], labels[is_used]):
            pairs[pair[:2]] = max(pair, pairs.get(pair[:2], pair), key=lambda one: one.changed)
    return [pairs[key] for key in sorted(pairs)]


def mirrored_pairs(views: np.ndarray, labels: np.ndarray) -> list[MirroredPair]:
    """Return the pairs of classes whose mirror images are taken for each other, by features.

    For two classes, images that only their mirror image moves to the other class are compared with those that only
    their mirror image moves back: by chance, there are as many.

    Args:
        views: (2 images features): of each image, and of its mirror image.
        labels: (images) class indices.
    """
    if len(labels) < FOLDS:
        return []
    plain, mirrored = _predicted(views, labels)
    num_classes = int(labels.max()) + 1
    images = np.bincount(labels, minlength=num_classes)
    away, back = (
        {(true, other): number for true, other, number in confused_pairs(labels[own], seen[own], num_classes).tolist()}
        for own, seen in ((plain == labels, mirrored), (mirrored == labels, plain))
    )
    is_most = {pair for pair, number in away.items() if number >= MIN_SHARE * images[pair[0]]}
    pairs = []
    for first, second in sorted(pair for pair in is_most if pair[0] < pair[1] and pair[::-1] in is_most):
        changed, returned = (
            sum(numbers.get(pair, 0) for pair in ((first, second), (second, first))) for numbers in (away, back)
        )
        if binomtest(changed, changed + returned, alternative="greater").pvalue <= MAX_P:
            pairs.append(MirroredPair(first, second, changed, int(images[[first, second]].sum())))
    return pairs


def _predicted(views: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each image and of its mirror image, by ridge regression on the other folds."""
    # each view by its own mean and deviation: mirroring shifts the features of all classes
    points = views - views.mean(axis=1, keepdims=True, dtype=np.float64)
    deviation = points.std(axis=1, keepdims=True)
    points /= np.where(deviation > 1e-6 * max(deviation.max(), 1e-12), deviation, np.inf)
    classes, own = np.unique(labels, return_inverse=True)
    fold_of = np.empty(len(labels), int)
    for number in range(len(classes)):
        places = np.flatnonzero(own == number)
        fold_of[places] = np.arange(len(places)) % FOLDS
    targets = np.eye(len(classes))[own]
    result = np.empty((2, len(labels)), int)
    for fold in range(FOLDS):
        train, held_out = fold_of != fold, fold_of == fold
        centre = targets[train].mean(axis=0)
        gram = points[0, train] @ points[0, train].T  # of images: their number is bounded, that of features is not
        weights = points[0, train].T @ np.linalg.solve(gram + len(gram) * np.eye(len(gram)), targets[train] - centre)
        result[:, held_out] = classes[(points[:, held_out] @ weights + centre).argmax(axis=2)]
    return result[0], result[1]


def mirrored_text(pairs: Sequence[MirroredPair], classes: Sequence[str]) -> str:
    """Return the sentence that names the pairs and the setting; an empty text without pairs."""
    if not pairs:
        return ""
    named = first_few(f"{classes[pair.first]} and {classes[pair.second]}" for pair in pairs)
    changed, images = sum(pair.changed for pair in pairs), sum(pair.images for pair in pairs)
    return (
        f"Classes look like mirror images of each other: {named} ({changed:,} of {images:,} held-out images change"
        " class when mirrored). Training mirrors half of the images; switch this off: --set augment.hflip=false."
    )
