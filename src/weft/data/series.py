"""Series of similar images: shots of one thing, frames of a video, crops of an image; found by features.

A class is clustered by the cosine distance of its images (average linkage), and cut at several fractions of the mean
distance in a class, since no fixed distance suits all datasets. From the coarsest cut on, a cluster is a series if it
is separate from the others of its class, by its mean silhouette (Rousseeuw, J. Comput. Appl. Math. 20, 1987), which is
near 0 where a cluster is a piece of a continuum. Photos are in series at all if the silhouettes of the result are high.
benchmarks/few-images/series.py has the numbers for images with and without series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

CUTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the mean distance in a class
MIN_APART = 0.15  # mean silhouette of a series
MIN_SILHOUETTE = 0.1  # of all images, by features: measured 0.13 to 0.38 with series, up to 0.06 without
MIN_SILHOUETTE_PIXELS = 0.3  # by pixels: measured 0.5 on frames, up to 0.16 on photos series
MAX_DISTANCES = 20_000_000  # in memory


def find_series(rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the series of every image (n), numbered from 0, and the mean silhouette, by which images are in series.

    An image without others of its series is a series of its own. A class with several images has at least two series.

    Args:
        rows: (n d) features in float32, by `standardised` or `whitened`.
        labels: (n) class indices.
    """
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    distances = [_mean_distance(rows[images]) for images in classes if len(images) > 1]
    cuts = [float(np.median(distances or [0.0])) * cut for cut in CUTS]
    series, silhouettes, number = np.zeros(len(rows), np.int64), np.zeros(len(rows)), 0
    for images in classes:
        own = _series_of(rows[images], cuts)
        series[images], silhouettes[images] = own + number, _silhouettes(rows[images], own)
        number += own.max() + 1
    return series, float(silhouettes.mean())


def standardised(features: np.ndarray) -> np.ndarray:
    """Return features (n d) of a network with zero mean and unit variance each; constant ones become 0."""
    rows = features.astype(np.float32) - features.mean(0, dtype=np.float64).astype(np.float32)
    deviation = rows.std(0, dtype=np.float64)
    deviation[deviation <= 1e-6 * max(deviation.max(), 1e-12)] = np.inf
    return rows / deviation.astype(np.float32)


def whitened(pixels: np.ndarray) -> np.ndarray:
    """Return the pixels (n d) of small images without their mean, in directions of about equal variance.

    Without this, brightness and colour of the whole would outweigh all else.
    """
    rows = pixels.astype(np.float64) - pixels.mean(0, dtype=np.float64)
    directions, deviations, _ = np.linalg.svd(rows, full_matrices=False)
    floor = max(np.mean(deviations**2), 1e-12)  # of equal images
    return (directions * (deviations / np.sqrt(deviations**2 + floor))).astype(np.float32)


def _mean_distance(rows: np.ndarray) -> float:
    """Return the mean cosine distance of two images; rows (n d) have unit length."""
    count, total = len(rows), np.square(rows.sum(0, dtype=np.float64)).sum()
    return 1 - (total - count) / (count * (count - 1))


def _series_of(rows: np.ndarray, cuts: Sequence[float]) -> np.ndarray:
    """Return the series of every image of a class (n), from 0."""
    series = np.arange(len(rows), 2 * len(rows))  # each image is alone
    for clusters in reversed(list(_clusterings(rows, cuts))):
        sizes = np.bincount(clusters)
        is_apart = np.bincount(clusters, _silhouettes(rows, clusters)) / sizes >= MIN_APART
        is_free = series >= len(rows)  # clusters of a finer cut are within those of a coarser one
        series = np.where(is_free & (is_apart & (sizes > 1))[clusters], _first(clusters), series)
    return np.unique(series, return_inverse=True)[1]


def _first(clusters: np.ndarray) -> np.ndarray:
    """Return the first image of the cluster of every image."""
    _, first, inverse = np.unique(clusters, return_index=True, return_inverse=True)
    return first[inverse]


def _clusterings(rows: np.ndarray, cuts: Sequence[float]) -> Iterator[np.ndarray]:
    """Yield the cluster of every image (n), from 0, by average linkage up to each of some ascending distances.

    Two clusters that are each other's nearest are joined. Their distance is 1 - the product of their mean rows. A
    joined cluster is not nearer to a third one than its parts were, so joining all such pairs in one step gives the
    same tree as one after the other.
    """
    means, sizes, owner = rows.copy(), np.ones(len(rows), np.int64), np.arange(len(rows))
    nearest, distance = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32)
    is_known = np.zeros(len(rows), bool)  # of a cluster: whether its nearest is
    for cut in cuts:
        active = np.unique(owner)
        while len(active) > 1:
            stale = active[~is_known[active]]
            nearest[stale], distance[stale] = _nearest(means, stale, np.unique(owner))
            is_known[stale] = True
            active = active[distance[active] < cut]
            ones = active[(nearest[nearest[active]] == active) & (active < nearest[active])]
            if not len(ones):
                break
            others = nearest[ones]
            weights = (sizes[others] / (sizes[ones] + sizes[others])).astype(np.float32)
            means[ones] += weights[:, None] * (means[others] - means[ones])
            sizes[ones] += sizes[others]
            joined = np.arange(len(rows))
            joined[others] = ones
            owner = joined[owner]
            active = active[joined[active] == active]
            is_known &= ~np.isin(nearest, [*ones, *others])
            is_known[ones] = False
        yield np.unique(owner, return_inverse=True)[1]


def _nearest(means: np.ndarray, clusters: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest of some other clusters, and its distance, for each of some clusters."""
    places, similarities = [], []
    for block in np.array_split(clusters, 1 + len(clusters) * len(others) // MAX_DISTANCES):
        products = means[block] @ means[others].T
        products[block[:, None] == others] = -np.inf
        places.append(others[products.argmax(1)])
        similarities.append(products.max(1))
    return np.concatenate(places), 1 - np.concatenate(similarities)


def _silhouettes(rows: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the silhouette of every image of a class: near 1 far from other clusters, 0 of a cluster of one image."""
    sizes = np.bincount(clusters)
    if len(sizes) < 2:
        return np.zeros(len(rows))
    sums = np.zeros((len(sizes), rows.shape[1]), np.float32)
    np.add.at(sums, clusters, rows)
    similarities, images = rows @ sums.T, np.arange(len(rows))
    inside = 1 - (similarities[images, clusters] - 1) / np.maximum(sizes[clusters] - 1, 1)
    similarities /= sizes
    similarities[images, clusters] = -np.inf
    outside = 1 - similarities.max(1)
    values = (outside - inside) / np.maximum(np.maximum(inside, outside), 1e-6)
    return np.where(sizes[clusters] > 1, values, 0)
