"""Data sets of the papers in their own layouts: ImageNet-V2, ReaL labels, the Stanford Cars devkit."""

from __future__ import annotations

import json
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
from weft.errors import DataError
from weft.inference.real_labels import RealLabels
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
    labels = RealLabels(tmp_path / "real.json")
    keys = [f"val/n0{i}/ILSVRC2012_val_{i + 1:08}.JPEG" for i in range(5)]
    labels.check(keys, 5)
    assert labels.score(keys, np.array([3, 1, 2, 1, 0])) == (
        75.0,
        4,
        1,
    )  # right: 3 of 3; 2 of 1 or 2; 0 of 4 or 0; wrong: 1 of 0
    (tmp_path / "own.json").write_text(json.dumps({"a.png": [1], "b": [0, 2]}))
    labels = RealLabels(tmp_path / "own.json")
    labels.check(["x/a.png", "b.jpg"], 3)
    assert labels.score(["x/a.png", "b.jpg"], np.array([1, 1])) == (50.0, 2, 0)


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
        RealLabels(tmp_path / "real.json").check([], 5)


def test_real_labels_of_other_images(tmp_path: Path) -> None:
    for content, message in (
        ({"dog": [0]}, r"1 are missing, e\.g\. 'cat\.jpg'"),
        ({"cat": []}, "At least one image must have a ReaL label"),
    ):
        (tmp_path / "real.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            RealLabels(tmp_path / "real.json").check(["cat.jpg"], 5)


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
