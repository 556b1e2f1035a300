"""Likely label errors, outliers and near-duplicates, from features and probabilities alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from weft.train import linear_probe
from weft.train.label_errors import (
    MIN_KEPT,
    find_label_errors,
    is_improbable,
    joined_groups,
    label_errors_of,
    near_duplicates,
    neighbour_distances,
    outliers,
)

CLASSES = 4


def clusters(seed: int = 0, per_class: int = 60, distance: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Features of overlapping classes, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), per_class)
    return rng.normal(size=(len(labels), 16)) + distance * np.eye(CLASSES, 16)[labels], labels


@pytest.mark.parametrize("seed", range(3))
def test_changed_labels_are_found(seed: int) -> None:
    features, labels = clusters(seed)
    wrong = np.random.default_rng(seed).choice(len(labels), 24, replace=False)
    given = labels.copy()
    given[wrong] = (labels[wrong] + 1) % CLASSES
    result = find_label_errors(features, given, CLASSES)
    found = result.order()[:24]
    assert np.isin(found, wrong).mean() >= 0.9
    assert (result.proposed[found] == labels[found]).mean() >= 0.9
    assert result.is_judged.all()
    assert ((result.quality >= 0) & (result.quality <= 1)).all()
    assert result.confusions[:, 2].sum() <= len(labels)


def test_labels_of_too_many_images_and_classes_are_not_judged() -> None:
    """Of 40,000 images of 20,000 classes, a matrix of probabilities would take 6 GB."""
    labels = np.repeat(np.arange(20_000), 2)
    tracemalloc.start()
    result = find_label_errors(np.zeros((40_000, 4)), labels, 20_000)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert not result.is_judged.any()
    assert not result.is_error.any()
    assert len(result.confusions) == 0
    np.testing.assert_array_equal(result.proposed, labels)
    assert result.probabilities.shape == (40_000, 20_000)


def test_correct_labels_have_few_findings() -> None:
    features, labels = clusters(distance=8.0)
    assert len(find_label_errors(features, labels, CLASSES).order()) <= 2


def test_a_label_counts_as_wrong_by_its_own_probability() -> None:
    """Below a tenth of the mean of its class (here 0.65), whether or not the classifier is sure of another class."""
    rows = [[0.9, 0.05, 0.05]] * 7 + [[0.25, 0.75, 0.0], [0.02, 0.49, 0.49], [0.0, 1.0, 0.0]]
    labels = np.array([0] * 10 + [1, 1, 2, 2])
    others = [[0.1, 0.8, 0.1]] * 2 + [[0.1, 0.1, 0.8]] * 2
    probabilities, is_judged = np.array(rows + others), np.ones(14, bool)
    assert np.flatnonzero(is_improbable(probabilities, labels, is_judged)).tolist() == [8, 9]
    result = label_errors_of(probabilities, labels, is_judged)
    assert result.order().tolist() == [9, 8, 7]
    assert result.quality[7] > MIN_KEPT > result.quality[8]  # listed, and not relabelled


def test_errors_between_confused_classes_are_found_at_lower_certainty() -> None:
    """A quarter of the labels 0 are of class 1, none of class 2: the same probabilities are then judged differently."""
    rng = np.random.default_rng(0)
    true = np.repeat([0, 1, 2], 400)
    probabilities = np.eye(3)[true] + rng.uniform(0, 0.2, (1200, 3))
    labels = np.where((true == 1) & (rng.random(1200) < 0.25), 0, true)
    probabilities = np.concatenate([probabilities, [[0.62, 0.38, 0.0], [0.62, 0.0, 0.38]]])
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    result = label_errors_of(probabilities, np.array([*labels, 0, 0]), np.ones(1202, bool))
    assert result.quality[-2] < result.quality[-1] - 0.05
    assert (result.proposed[:-2] == true).mean() > 0.99
    assert result.is_error[:-2].sum() == (labels != true).sum()


def test_copies_do_not_vouch_for_each_other() -> None:
    """A wrong label with nine copies is found only if the copies are in one fold."""
    features, labels = clusters(distance=8.0, per_class=20)
    features = np.concatenate([features, np.repeat(features[:1], 9, axis=0)])
    given = np.concatenate([labels, np.ones(9, int)])
    given[0] = 1
    copies = np.array([0, *range(80, 89)])
    groups = np.arange(len(given))
    groups[copies] = 0
    assert find_label_errors(features, given, CLASSES, groups).is_error[copies].all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_class_of_one_or_two_images_is_not_an_error(count: int) -> None:
    features, labels = clusters(per_class=10)
    features = np.concatenate([features, features[:count] - 20])
    result = find_label_errors(features, np.concatenate([labels, [CLASSES] * count]), CLASSES + 1)
    assert np.isfinite(result.probabilities).all()
    if count == 1:
        assert (result.is_judged[-1], result.is_error[-1], result.proposed[-1]) == (False, False, CLASSES)


@pytest.mark.parametrize("labels", [[0, 1], [0, 0, 1], [0, 1, 1, 0]])
def test_a_few_images_are_judged_as_far_as_possible(labels: list[int]) -> None:
    features = np.random.default_rng(0).normal(size=(len(labels), 6)) + 5 * np.array(labels)[:, None]
    for groups in (None, np.zeros(len(labels), int)):  # all copies of each other
        result = find_label_errors(features, np.array(labels), 2, groups)
        assert np.isfinite(result.probabilities).all()
        assert result.is_judged.any() == (groups is None and len(labels) > 2)


def test_classes_of_one_image_have_no_say_in_the_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    """No classifier that was fitted without the image could know its class."""
    labels, scored, validate = np.array([0, 1] * 10 + [2, 3]), [], linear_probe._cross_validated

    def validated(rows: np.ndarray, targets: np.ndarray, splits: list[linear_probe.Split], *more: object) -> object:
        scored.extend(set(targets[held_out]) <= set(targets[fitted]) for fitted, held_out in splits)
        return validate(rows, targets, splits, *more)

    monkeypatch.setattr(linear_probe, "_cross_validated", validated)
    linear_probe.held_out_probabilities(np.random.default_rng(0).normal(size=(22, 1, 4)), labels, 4, np.arange(22) % 3)
    assert scored == [True] * 3


def test_images_far_from_all_others_are_outliers() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, 32)) + np.repeat(np.eye(4, 32) * 20, 25, axis=0)
    features[7] = -features[7]
    assert outliers(neighbour_distances(features)).tolist() == [7]
    assert not len(outliers(neighbour_distances(features[:1])))


def picture(seed: int) -> Image.Image:
    """A smooth picture, unlike those of other seeds."""
    pixels = np.random.default_rng(seed).integers(0, 200, (5, 6, 3)).astype(np.uint8)
    return Image.fromarray(pixels).resize((96, 80), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("count", [3, 30])
def test_changed_copies_are_near_duplicates(count: int) -> None:
    images = [picture(number) for number in range(count)]
    images += [images[2].resize((48, 40)), ImageOps.mirror(images[2]), images[2].point(lambda value: int(1.1 * value))]
    features = np.stack([np.asarray(image.resize((12, 12)), float).mean(axis=1).ravel() for image in images])
    assert near_duplicates(features, lambda i: images[i]) == [[2, count, count + 1, count + 2]]
    assert near_duplicates(features[:count], lambda i: images[i]) == []


@pytest.mark.parametrize("distance", [0.0, 5.0, 30.0])
def test_copies_are_found_by_their_features_alone_and_dense_classes_are_no_copies(distance: float) -> None:
    """As of rotated and cropped images, whose hashes differ; with features of a network trained on the classes."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), 15)
    features = rng.normal(size=(60, 64)) + distance * np.eye(CLASSES, 64)[labels]
    copies = features[[7, 20, 41]] + 0.2 * rng.normal(size=(3, 64))
    assert near_duplicates(features, picture) == []
    found = near_duplicates(np.concatenate([features, copies]), picture)
    assert found == [[7, 60], [20, 61], [41, 62]]


def test_images_whose_features_differ_are_not_opened() -> None:
    def never(number: int) -> Image.Image:
        raise AssertionError(number)

    assert near_duplicates(np.random.default_rng(0).normal(size=(100, 256)), never) == []


def test_groups_are_joined_over_any_number_of_steps() -> None:
    own = ["a", "b", "b", "", "c", "", "", ""]
    assert joined_groups(own, [[0, 1], [2, 3], [5, 6]]) == ["a", "a", "a", "a", "c", "copies-1", "copies-1", ""]
    assert joined_groups(["", ""], []) == ["", ""]
    has_the_name = ["copies-1", "copies-1", "", "", "copies-2"]
    assert joined_groups(has_the_name, [[2, 3]]) == ["copies-1", "copies-1", "copies-3", "copies-3", "copies-2"]
