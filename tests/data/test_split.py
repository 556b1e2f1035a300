"""Folds and groups: every image is held out once, no group is on both sides, every class is trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pictures import jpeg
from weft.data import SplitPlan, open_data
from weft.data.split import (
    grouped_fold,
    grouped_share,
    grouped_split,
    proportional_subset,
    stratified_fold,
    stratified_split,
    stratified_subset,
)
from weft.errors import DataError, UsageError

labels_of_classes = st.lists(st.integers(1, 12), min_size=2, max_size=6).map(
    lambda sizes: [label for label, size in enumerate(sizes) for _ in range(size)]
)


def keys_of(labels: list[int]) -> list[str]:
    return [f"{label}/{i}.jpg" for i, label in enumerate(labels)]


@given(labels_of_classes, st.integers(2, 7), st.integers(0, 9))
def test_folds_hold_every_image_out_once(labels: list[int], folds: int, seed: int) -> None:
    sizes = Counter(labels)
    held_out: Counter[int] = Counter()
    for fold in range(1, folds + 1):
        train, val = stratified_fold(keys_of(labels), labels, folds, fold, seed)
        assert sorted(train + val) == list(range(len(labels)))
        assert {labels[i] for i in train} == set(labels)
        per_class = Counter(labels[i] for i in val)
        assert all(count <= -(-sizes[label] // folds) for label, count in per_class.items())
        held_out.update(val)
    assert held_out == Counter(i for i, label in enumerate(labels) if sizes[label] > 1)


@given(labels_of_classes, st.integers(2, 5), st.integers(1, 9), st.integers(0, 9))
def test_no_group_is_on_both_sides(labels: list[int], folds: int, per_group: int, seed: int) -> None:
    groups = [str(hash((seed, i // per_group)) % 7) for i in range(len(labels))]
    parts = [grouped_fold(labels, groups, folds, fold, seed) for fold in range(1, folds + 1)]
    assert sorted(i for part in parts for i in part) == list(range(len(labels)))
    for part in parts:
        train, val = grouped_split(labels, groups, part)
        assert sorted(train + val) == list(range(len(labels)))
        assert not {groups[i] for i in train} & {groups[i] for i in val}
        assert set(val) <= set(part)
        assert {labels[i] for i in train} == set(labels)


def test_groups_keep_the_share_of_every_class() -> None:
    labels = [number % 3 for number in range(300)]
    groups = [str(number // 3 // 2) for number in range(300)]  # 50 groups of two images per class
    val = grouped_share(labels, groups, 0.2, 0)
    assert Counter(labels[i] for i in val) == {0: 20, 1: 20, 2: 20}


@given(
    st.lists(st.integers(1, 30), min_size=4, max_size=30),
    *(st.integers(0, 29), st.sampled_from([0.1, 0.2, 0.5]), st.integers(2, 6), st.integers(0, 9)),
)
def test_an_added_file_moves_at_most_groups_at_a_border(sizes, grown, share, folds, seed):
    """Groups in one class: one file more in a group moves no others but those at the ends of the share or of a fold."""
    grown %= len(sizes)

    def sides(sizes: list[int]) -> tuple[set[str], list[set[str]]]:
        groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
        labels = [0] * len(groups)
        held_out = {groups[i] for i in grouped_share(labels, groups, share, seed)}
        parts = [grouped_fold(labels, groups, folds, fold, seed) for fold in range(1, folds + 1)]
        assert len(sizes) < folds or all(parts), "every fold has a group if there are enough"
        return held_out, [{groups[i] for i in part} for part in parts]

    before, folds_before = sides(sizes)
    after, folds_after = sides([size + (number == grown) for number, size in enumerate(sizes)])
    assert len(before ^ after) <= 4
    moved = set().union(*(one ^ other for one, other in zip(folds_before, folds_after, strict=True)))
    assert len(moved) < folds


def test_an_added_file_leaves_equal_groups_where_they_are() -> None:
    groups = [f"g{number // 4}" for number in range(40)]
    labels = [number % 2 for number in range(40)]
    for seed in range(10):
        held_out = {groups[i] for i in grouped_share(labels, groups, 0.2, seed)}
        assert len(held_out) == 2
        for grown in set(groups):
            assert held_out == {[*groups, grown][i] for i in grouped_share([*labels, 0], [*groups, grown], 0.2, seed)}


def test_a_group_larger_than_the_share_is_trained_on() -> None:
    groups = ["large"] * 50 + [f"g{number}" for number in range(50)]
    for seed in range(20):
        held_out = grouped_share([0] * 100, groups, 0.2, seed)
        assert len(held_out) == 20
        assert min(held_out) >= 50


def test_a_subset_below_the_number_of_classes_does_not_prefer_the_first() -> None:
    labels = [number // 3 for number in range(300)]
    chosen = Counter(labels[i] for i in stratified_subset(keys_of(labels), labels, 40, 0))
    assert set(chosen.values()) == {1}
    assert len([label for label in chosen if label >= 50]) > 10
    assert len({labels[i] for i in stratified_subset(keys_of(labels), labels, 100, 0)}) == 100
    others = [f"other {key}" for key in keys_of(labels)]
    assert set(chosen) == {labels[i] for i in stratified_subset(others, labels, 40, 0)}, "as for validation images"


def test_a_proportional_subset_keeps_the_shares_of_held_out_images() -> None:
    """Also those of small classes, of which the split holds out a larger share."""
    labels = [0] * 2500 + [1 + number // 2 for number in range(1000)]
    keys = keys_of(labels)
    _, val = stratified_split(keys, labels, 0.2, 0)
    assert sum(labels[i] == 0 for i in val) == len(val) // 2 == 500
    kept = [keys[i] for i in val]
    chosen = proportional_subset(kept, 200, 0)
    assert chosen == sorted(set(chosen))
    assert 75 < sum(labels[val[i]] == 0 for i in chosen) < 125
    smaller = proportional_subset([kept[i] for i in chosen], 100, 0)
    assert [chosen[i] for i in smaller] == proportional_subset(kept, 100, 0)
    assert proportional_subset(kept, 2000, 0) == list(range(1000))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes; the images of a patient are in both."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number in range(24):
        path = folder / ("ill", "well")[number % 2] / f"patient{number // 4}-{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    return folder


def patients(keys: list[str]) -> set[str]:
    return {key.split("/")[1].split("-")[0] for key in keys}


@pytest.mark.parametrize("folds", [None, 3])
def test_a_pattern_groups_a_folder(photos, folds):
    held_out = []
    for fold in range(1, (folds or 1) + 1):
        splits = open_data(photos, SplitPlan(group=r"patient\d+", folds=folds, fold=fold))
        assert not patients(splits.train.keys) & patients(splits.val.keys)
        assert set(splits.groups) == patients(splits.train.keys)
        assert any("groups of images for training" in note for note in splits.notes)
        held_out += splits.val.keys
    if folds:
        assert sorted(held_out) == sorted(open_data(photos).train.keys + open_data(photos).val.keys)


@pytest.mark.parametrize("folds", [None, 3])
def test_the_only_readable_group_of_a_class_is_trained_on(folds, tmp_path):
    names = [f"{label}/g{number % 4}{label}-{number}.jpg" for label in "ab" for number in range(8)]
    for seed, name in enumerate([*names, "c/g0c-0.jpg", "c/g1c-1.jpg"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(seed)[: 500 if name == "c/g1c-1.jpg" else None])
    held_out = []
    for part in range(1, 4):  # folds, or seeds
        choice = {"seed": part} if folds is None else {"folds": folds, "fold": part}
        splits = open_data(tmp_path, SplitPlan(group=r"g\d\w", **choice))
        assert set(splits.train.labels) == {0, 1, 2}
        assert not set(splits.groups or ()) & set(splits.val_groups or ())
        held_out += splits.val.keys
    assert folds is None or sorted(held_out) == sorted(names)


@pytest.mark.parametrize("fold", [1, 2, 3])
def test_a_class_in_one_group_is_never_held_out(photos, fold):
    """Its only group would leave nothing to train on."""
    splits = open_data(photos, SplitPlan(group=r"^(ill)/|patient\d+", folds=3, fold=fold))
    assert set(splits.train.labels) == {0, 1}
    assert "ill" not in {key.split("/")[0] for key in splits.val.keys}


def test_a_column_groups_a_table(photos):
    rows = [(path.relative_to(photos.parent), path.parent.name) for path in sorted(photos.rglob("*.jpg"))]
    table = photos.parent / "table.csv"
    lines = [f"{path},{label},{number % 6 or ''}" for number, (path, label) in enumerate(rows)]
    table.write_text("\n".join(["image, label, patient", *lines]) + "\n")
    splits = open_data(table, SplitPlan(group="patient"))
    group_of = {str(path): number % 6 or str(path) for number, (path, _) in enumerate(rows)}
    held_out = {group_of[key] for key in splits.val.keys}
    assert not {group_of[key] for key in splits.train.keys} & held_out
    assert len(set(splits.val_groups or ())) == len(held_out)
    with pytest.raises(DataError, match=r"'doctor' matches none of 24, such as 'photos/ill/"):
        open_data(table, SplitPlan(group="doctor"))


def test_a_given_split_tells_of_groups_on_both_sides(photos, tmp_path):
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        copy = tmp_path / ("train", "val")[number % 3 == 0] / path.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    notes = open_data(tmp_path, SplitPlan(group=r"patient\d+")).notes
    assert any("groups are on both sides of the dataset's own split" in note for note in notes)
    with pytest.raises(DataError, match="Folds need a dataset without a split of its own"):
        open_data(tmp_path, SplitPlan(folds=3))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"group": "("},
            UsageError,
            "--group must be a column .*, a regular expression, or one of similar, .*'\\(' is none",
        ),
        ({"group": "kennel"}, DataError, "matches none of 24"),
        ({"group": "patient"}, DataError, "all 24 images are in one"),
        ({"group": "^(ill|well)/"}, DataError, "two groups or more: choose another --group"),
        ({"group": "^(ill|well)/", "folds": 2}, DataError, "too few groups per class"),
        ({"folds": 50, "fold": 49}, DataError, "Every fold must hold out an image; "),
        ({"folds": 50, "fold": 1}, DataError, r"\d+ folds of 50 of .* Pass fewer --folds, or add images"),
        ({"folds": 1}, UsageError, "folds must be at least 2; got 1"),
        ({"folds": 3, "fold": 4}, UsageError, r"fold must be from 1 to folds \(3\); got 4"),
        ({"val_fraction": 0.0}, UsageError, r"val_fraction .* exclusive; got 0\.0"),
        ({"val_fraction": 1.0}, UsageError, r"val_fraction .* exclusive; got 1\.0"),
        ({"train_fraction": 0.0}, UsageError, r"train_fraction .* at most 1; got 0\.0"),
        ({"train_fraction": 1.1}, UsageError, r"train_fraction .* at most 1; got 1\.1"),
        ({"limit": 0}, UsageError, "limit must be at least 1 image; got 0"),
        ({"max_bad": -0.1}, UsageError, r"max_bad must be between 0 and 1; got -0\.1"),
        ({"max_bad": 1.5}, UsageError, r"max_bad must be between 0 and 1; got 1\.5"),
    ],
)
def test_impossible_splits_are_refused(photos, arguments, error, words):
    with pytest.raises(error, match=words):
        open_data(photos, **arguments) if "max_bad" in arguments else open_data(photos, SplitPlan(**arguments))
