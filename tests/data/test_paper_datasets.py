"""Data sets of the papers in their own layouts: ImageNet-V2, ReaL labels, iNaturalist's JSON, the Stanford Cars
devkit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

import weft
from tests.data.pictures import jpeg
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import open_data
from weft.data.sources.catalog import CATALOG
from weft.data.sources.inaturalist import convert_inaturalist
from weft.errors import DataError, UsageError
from weft.inference.real_labels import read_real_labels, real_score
from weft.train import evaluate

CLASSES = 12


@pytest.fixture
def nameless(tmp_path: Path) -> Path:
    """A model directory without class names, as public weights are."""
    torch.manual_seed(0)
    model = weft.create_model("levit_nano_32", num_classes=CLASSES)
    return save_model_dir(model, tmp_path / "nameless")


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    """The tree of ImageNet-V2: folders 0, 1, 2 ... without leading zeros."""
    for number in range(CLASSES):
        for index in range(2):
            path = tmp_path / "v2" / str(number) / f"{index}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(10 * number + index))
    return tmp_path / "v2"


def test_numbered_folders_are_the_outputs_of_nameless_weights(
    nameless: Path, v2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folder 10 is output 10, not output 2: a model that answers with the folder's number is right everywhere."""
    numbers = {jpeg(10 * number + index): number for number in range(CLASSES) for index in range(2)}
    splits = open_data(v2, evaluate_only=True)
    assert splits.classes == [str(number) for number in range(CLASSES)]
    for source in (splits.train, splits.val):
        for i in range(len(source)):
            sample = source.read(i)
            assert sample.label == numbers[sample.data]
    assert open_data(v2).classes == splits.classes, "also in training, e.g. with such weights as a teacher"
    seen: list[list[str]] = []
    real = open_data

    def watched(*args, **kwargs):
        found = real(*args, **kwargs)
        seen.append(found.classes)
        return found

    monkeypatch.setattr("weft.inference.inputs.open_data", watched)
    assert evaluate(nameless, v2, device="cpu").count == 2 * CLASSES
    assert seen == [[str(number) for number in range(CLASSES)]]
    output = capsys.readouterr().err
    assert "The weights have no class names" in output
    assert "first '0', last '11'" in output


def test_named_weights_go_by_name(tmp_path: Path, v2: Path) -> None:
    """A model that names its classes decides their order, also of numbered folders."""
    names = sorted(map(str, range(CLASSES)))
    model = weft.create_model("levit_nano_32", num_classes=CLASSES)
    folder = save_model_dir(model, tmp_path / "named", label_names=names)
    assert evaluate(folder, v2, device="cpu", quiet=True).classes == names


REAL = [[3], [], [1, 2], [0], [4, 0]]


def test_real_labels(tmp_path: Path) -> None:
    """Several labels per image, and images without one, which do not count."""
    (tmp_path / "real.json").write_text(json.dumps(REAL))
    labels = read_real_labels(tmp_path / "real.json", 5)
    keys = [f"val/n0{i}/ILSVRC2012_val_{i + 1:08}.JPEG" for i in range(5)]
    score = real_score(labels, keys, np.array([3, 1, 2, 1, 0]))
    assert score == (75.0, 4, 1)  # right: 3 of 3; 2 of 1 or 2; 0 of 4 or 0; wrong: 1 of 0
    (tmp_path / "own.json").write_text(json.dumps({"a.png": [1], "b": [0, 2]}))
    labels = read_real_labels(tmp_path / "own.json", 3)
    assert real_score(labels, ["x/a.png", "b.jpg"], np.array([1, 1])) == (50.0, 2, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON file"),
        ("3", r"must contain a list or an object of lists of classes; got 3"),
        ("[[1], [5]]", r"0 to 4, as the model has 5 outputs; image 'ILSVRC2012_val_00000002' has \[5\]"),
        ('[["cat"]]', "must be whole numbers from 0 to 4"),
        ("[[true]]", "must be whole numbers from 0 to 4"),
        ("[1]", "must be whole numbers from 0 to 4"),
    ],
)
def test_no_real_labels(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_real_labels(tmp_path / "real.json", 5)


def test_real_labels_of_other_images() -> None:
    with pytest.raises(DataError, match=r"1 are missing, e\.g\. 'cat\.jpg'"):
        real_score({"dog": frozenset([0])}, ["cat.jpg"], np.array([0]))
    with pytest.raises(DataError, match="At least one image must have a ReaL label"):
        real_score({"cat": frozenset()}, ["cat.jpg"], np.array([0]))


def test_evaluate_scores_real_labels(nameless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every class allowed ReaL is 100 %, with those alone that were not predicted 0 %."""
    for number in range(CLASSES):
        (tmp_path / "val" / f"n{number:08}").mkdir(parents=True)
        file = tmp_path / "val" / f"n{number:08}" / f"ILSVRC2012_val_{number + 1:08}.JPEG"
        file.write_bytes(jpeg(number))
    every = [list(range(CLASSES))] * (CLASSES - 1) + [[]]
    (tmp_path / "real.json").write_text(json.dumps(every))
    arguments = ["evaluate", str(nameless), str(tmp_path / "val"), "--real-labels", str(tmp_path / "real.json")]
    assert main([*arguments, "--split", "all", "--device", "cpu", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["real"] == {"top1": 100.0, "images": CLASSES - 1, "unlabelled": 1}
    result = evaluate(nameless, tmp_path / "val", split="all", device="cpu", quiet=True)
    others = [[c for c in range(CLASSES) if c != taken] for taken in result.predicted]
    (tmp_path / "real.json").write_text(json.dumps(others))
    result = evaluate(
        nameless, tmp_path / "val", split="all", device="cpu", real_labels=tmp_path / "real.json", quiet=True,
        out=tmp_path / "out",
    )  # fmt: skip
    assert result.real == (0.0, CLASSES, 0)
    assert "ReaL top-1" in (tmp_path / "out" / "report.md").read_text()


def inaturalist(folder: Path, year: int = 2018) -> tuple[Path, Path]:
    """JSON files and images in iNaturalist's layout."""
    written = []
    for split, count in (("train", 3), ("val", 1)):
        images, annotations = [], []
        for category in (2, 10, 1):
            for index in range(count):
                number = 100 * category + index + (50 if split == "val" else 0)
                name = f"{split}_val{year}/Plantae/{category}/{number}.jpg"
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(jpeg(number))
                images.append({"id": number, "file_name": name, "width": 32, "height": 24, "license": 1})
                annotations.append({"id": number, "image_id": number, "category_id": category})
        content = {"images": images, "annotations": annotations[::-1], "categories": [{"id": 2, "name": "x"}]}
        written.append(folder / f"{split}{year}.json")
        written[-1].write_text(json.dumps(content))
    return written[0], written[1]


def test_inaturalist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, val = inaturalist(tmp_path)
    assert main(["data", "inaturalist", str(train), str(val), str(tmp_path / "inat18.csv"), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"out": str(tmp_path / "inat18.csv"), "classes": 3, "train": 9, "val": 3}
    splits = open_data(tmp_path / "inat18.csv")
    assert splits.classes == ["1", "2", "10"]
    assert (len(splits.train), len(splits.val), splits.is_given) == (9, 3, True)
    for source in (splits.train, splits.val):
        for i in range(len(source)):
            sample = source.read(i)
            assert splits.classes[sample.label] == Path(sample.key).parent.name
    with pytest.raises(UsageError, match=r"inat18\.csv exists already\. Pass --force"):
        convert_inaturalist([train], tmp_path / "inat18.csv")
    elsewhere = convert_inaturalist([train, val], tmp_path / "else" / "t.csv", images=tmp_path)
    assert len(open_data(elsewhere.out).train) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("annotations"), r"must have images \(id, file_name\) and annotations .*KeyError"),
        (lambda c: c["annotations"].pop(), r"9 .*|1 have none, such as"),
        (lambda c: c["images"].append({**c["images"][0], "id": 7}) or c["annotations"].append(
            {"image_id": 7, "category_id": 1}), "is listed more than once"),
        (lambda c: c["images"].append(3), "must have images"),
    ],
)  # fmt: skip
def test_damaged_annotations(change, message: str, tmp_path: Path) -> None:
    train, _ = inaturalist(tmp_path)
    content = json.loads(train.read_text())
    change(content)
    train.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        convert_inaturalist([train], tmp_path / "t.csv")
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["inaturalist", "a.json"],
            "must have the form: weft data inaturalist JSON [JSON ...] OUT.csv. Number of paths given: 1.",
        ),
        (["inaturalist", "a.json", "out.txt"], "OUT must be a table that ends in .csv; got out.txt."),
        (["list", "x"], "must have the form: weft data list. Number of paths given: 1."),
    ],
)
def test_words_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("[]", "must hold a JSON object"), ("{", "must be a JSON file")):
        (tmp_path / "a.json").write_text(text)
        assert main(["data", "inaturalist", str(tmp_path / "a.json"), str(tmp_path / "o.csv")]) == 3
        assert message in capsys.readouterr().err


def devkit(root: Path, classes: int = 3, train: int = 4, test: int = 2) -> Path:
    """The devkit of Stanford Cars as torchvision expects it: MATLAB files of annotations, folders of images."""
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    names = np.array([f"Make Model {number} 2012" for number in range(classes)], dtype=object)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names[None]})
    for part, each, file in (
        ("train", train, base / "devkit" / "cars_train_annos.mat"),
        ("test", test, base / "cars_test_annos_withlabels.mat"),
    ):
        (base / f"cars_{part}").mkdir()
        rows = []
        for number in range(each * classes):
            name = f"{number + 1:05}.jpg"
            (base / f"cars_{part}" / name).write_bytes(jpeg(number + (1000 if part == "test" else 0)))
            rows.append((1, 1, 10, 10, 1 + number % classes, name))
        kinds = [(key, "O") for key in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
        savemat(file, {"annotations": np.array(rows, dtype=kinds)[None]})
    return root


@pytest.mark.parametrize("name", ["torchvision:StanfordCars?root={root}", "cars"])
def test_stanford_cars(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(devkit(tmp_path)))
    splits = open_data(name.format(root=tmp_path))
    assert splits.classes == ["Make Model 0 2012", "Make Model 1 2012", "Make Model 2 2012"]
    assert (len(splits.train), len(splits.val), splits.is_given) == (12, 6, True)
    read = [splits.train.read(i) for i in range(12)]
    assert {sample.data: sample.label for sample in read} == {jpeg(number): number % 3 for number in range(12)}
    notes = " ".join(splits.notes)
    stated = CATALOG["cars"]
    expected = f"the papers have {stated.classes} / {stated.train:,} / {stated.val:,}"
    assert bool(re.search(expected, notes)) == (name == "cars")
