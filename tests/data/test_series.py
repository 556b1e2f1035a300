"""Series of photos are found by their features, whatever the order, size and number of the classes; others are not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from weft.data import series
from weft.data.series import find_series, standardised, whitened

WIDTH = 256


def photos(
    classes: int, per_class: int, shots: int, spread: float = 0.4, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, labels and series of photos: each series has a place in its class, each photo one near it."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class * shots)
    of_series = np.repeat(np.arange(classes * per_class), shots)
    places = random.normal(size=(classes, WIDTH))[np.arange(classes * per_class) // per_class]
    places = places + random.normal(size=places.shape)
    features = places[of_series] + spread * random.normal(size=(len(labels), WIDTH))
    return features.astype(np.float32), labels, of_series


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two partitions are equal."""
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


@pytest.mark.parametrize(("classes", "per_class", "shots"), [(2, 10, 3), (5, 4, 6), (1, 12, 5), (30, 2, 3)])
def test_each_series_is_found(classes: int, per_class: int, shots: int) -> None:
    features, labels, expected = photos(classes, per_class, shots)
    found, silhouette = find_series(standardised(features), labels)
    assert silhouette >= series.MIN_SILHOUETTE
    assert same(found, expected)


def test_photos_without_series_have_none() -> None:
    random = np.random.default_rng(1)
    labels = np.arange(600) % 6
    features = random.normal(size=(6, WIDTH))[labels] + random.normal(size=(600, WIDTH))
    for rows in (features, features[:60], features * np.geomspace(1, 100, WIDTH)):
        assert find_series(standardised(rows), labels[: len(rows)])[1] < series.MIN_SILHOUETTE


def test_the_order_of_the_photos_and_the_scale_of_the_features_do_not_matter() -> None:
    features, labels, _ = photos(4, 5, 4)
    order = np.random.default_rng(2).permutation(len(labels))
    one, _ = find_series(standardised(features), labels)
    other, _ = find_series(standardised((1000 * features + 3)[order]), labels[order])
    assert same(one[order], other)


def test_series_have_photos_of_one_class() -> None:
    features, labels, of_series = photos(3, 4, 4)
    labels = np.where(of_series == 0, np.arange(len(labels)) % 3, labels)  # one thing in three classes
    found, _ = find_series(standardised(features), labels)
    assert all(len(set(labels[found == one])) == 1 for one in set(found.tolist()))


def test_a_class_that_is_one_series_is_cut() -> None:
    features, labels, of_series = photos(4, 5, 4)
    kept = (labels > 0) | (of_series == 0)
    found, _ = find_series(standardised(features[kept]), labels[kept])
    assert [len(set(found[labels[kept] == label])) for label in range(4)] == [4, 5, 5, 5]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_photos_and_constant_features_have_no_series(count: int) -> None:
    labels = np.arange(count)
    for repeats in (1, 3):
        features = np.ones((repeats * count, WIDTH), np.float32)
        found, silhouette = find_series(standardised(features), np.repeat(labels, repeats))
        assert len(set(found.tolist())) == len(features)
        assert silhouette == 0


def test_clusters_are_those_of_average_linkage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_DISTANCES", 5_000)  # several blocks
    rows = photos(3, 10, 4, spread=1.5)[0] - 0.5
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    tree = linkage(rows, "average", metric="cosine")
    cuts = [float(height) + 1e-5 for height in tree[[10, 40, 80, 110], 2]]  # of 119 joins
    for cut, clusters in zip(cuts, series._clusterings(rows, cuts), strict=True):
        assert same(clusters, fcluster(tree, cut, "distance"))


def test_frames_are_found_by_their_pixels_whatever_their_brightness() -> None:
    random = np.random.default_rng(3)
    pictures = random.uniform(0, 255, (40, 192))
    frames = np.repeat(pictures, 5, axis=0) + random.normal(0, 20, (200, 192))
    frames = frames * random.uniform(0.6, 1, (200, 1))
    found, silhouette = find_series(whitened(frames), np.repeat(np.arange(4), 50))
    assert silhouette >= series.MIN_SILHOUETTE_PIXELS
    assert same(found, np.repeat(np.arange(40), 5))


def test_equal_images_are_in_no_series() -> None:
    """Without a warning of a division by zero."""
    found, silhouette = find_series(whitened(np.full((8, 12), 7, np.uint8)), np.repeat([0, 1], 4))
    assert (found.tolist(), silhouette) == (list(range(8)), 0.0)
