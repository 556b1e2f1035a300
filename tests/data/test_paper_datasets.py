"""Data sets of ImageNet in their own forms: the numbered folders of ImageNet-V2, and ReaL labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from tests.data.pictures import jpeg
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import open_data
from weft.errors import DataError
from weft.inference.real_labels import RealLabels
from weft.train import evaluate

CLASSES = 12


def weights(folder: Path, **names: list[str]) -> Path:
    torch.manual_seed(0)
    return save_model_dir(weft.create_model("levit_nano_32", num_classes=CLASSES), folder, **names)


@pytest.fixture(scope="module")
def nameless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without class names, as public weights are."""
    return weights(tmp_path_factory.mktemp("nameless") / "weights")


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    """The tree of ImageNet-V2: folders 0, 1, 2 ... without leading zeros."""
    for number in range(CLASSES):
        (tmp_path / "v2" / str(number)).mkdir(parents=True)
        for index in range(2):
            (tmp_path / "v2" / str(number) / f"{index}.jpeg").write_bytes(jpeg(10 * number + index))
    return tmp_path / "v2"


def test_numbered_folders_are_the_outputs_of_nameless_weights(nameless, v2, monkeypatch, capsys):
    """Folder 10 is output 10, not output 2: a model that answers with the folder's number is right everywhere."""
    numbers = {jpeg(10 * number + index): number for number in range(CLASSES) for index in range(2)}
    splits = open_data(v2, evaluate_only=True)
    assert splits.classes == [str(number) for number in range(CLASSES)]
    for source in (splits.train, splits.val):
        for sample in map(source.read, range(len(source))):
            assert sample.label == numbers[sample.data]
    assert open_data(v2).classes == splits.classes, "also in training, e.g. with such weights as a teacher"
    seen: list[list[str]] = []

    def watched(*args, **kwargs):
        found = open_data(*args, **kwargs)
        seen.append(found.classes)
        return found

    monkeypatch.setattr("weft.inference.inputs.open_data", watched)
    assert evaluate(nameless, v2, device="cpu").count == 2 * CLASSES
    assert seen == [splits.classes]
    output = capsys.readouterr().err
    assert "The weights have no class names" in output
    assert "first '0', last '11'" in output


def test_named_weights_go_by_name(tmp_path, v2):
    """A model that names its classes decides their order, also of numbered folders."""
    names = sorted(map(str, range(CLASSES)))
    folder = weights(tmp_path / "named", label_names=names)
    assert evaluate(folder, v2, device="cpu", quiet=True).classes == names


def real_labels(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "real.json").write_text(text)
    return folder / "real.json"


def test_an_image_may_have_several_real_labels_or_none_and_then_does_not_count(tmp_path):
    labels = RealLabels(real_labels(tmp_path, [[3], [], [1, 2], [0], [4, 0]]))
    keys = [f"val/n0{i}/ILSVRC2012_val_{i + 1:08}.JPEG" for i in range(5)]
    labels.check(keys, 5)
    # right: 3 of 3; 2 of 1 or 2; 0 of 4 or 0; wrong: 1 of 0
    assert labels.score(keys, np.array([3, 1, 2, 1, 0])) == (75.0, 4, 1)
    labels = RealLabels(real_labels(tmp_path, {"a.png": [1], "b": [0, 2]}))
    labels.check(["x/a.png", "b.jpg"], 3)
    assert labels.score(["x/a.png", "b.jpg"], np.array([1, 1])) == (50.0, 2, 0)


@pytest.mark.parametrize(
    ("content", "keys", "words"),
    [
        ("{", [], "must be a JSON file"),
        ("3", [], r"must contain a list or an object of lists of classes; got 3"),
        ("[[1], [5]]", [], r"0 to 4, as the model has 5 outputs; image 'ILSVRC2012_val_00000002' has \[5\]"),
        ('[["cat"]]', [], "must be whole numbers from 0 to 4"),
        ("[[true]]", [], "must be whole numbers from 0 to 4"),
        ("[1]", [], "must be whole numbers from 0 to 4"),
        ({"dog": [0]}, ["cat.jpg"], r"1 are missing, e\.g\. 'cat\.jpg'"),
        ({"cat": []}, ["cat.jpg"], "At least one image must have a ReaL label"),
    ],
)
def test_other_files_are_no_real_labels(content, keys, words, tmp_path):
    with pytest.raises(DataError, match=words):
        RealLabels(real_labels(tmp_path, content)).check(keys, 5)


def test_evaluate_scores_real_labels(nameless, tmp_path, capsys):
    """With every class allowed ReaL is 100 %; an image without one does not count."""
    for number in range(CLASSES):
        folder = tmp_path / "val" / f"n{number:08}"
        folder.mkdir(parents=True)
        (folder / f"ILSVRC2012_val_{number + 1:08}.JPEG").write_bytes(jpeg(number))
    file = real_labels(tmp_path, [list(range(CLASSES))] * (CLASSES - 1) + [[]])
    arguments = ["evaluate", str(nameless), str(tmp_path / "val"), "--real-labels", str(file)]
    arguments += ["--split", "all", "--device", "cpu", "--quiet", "--json", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["real"] == {"top1": 100.0, "images": CLASSES - 1, "unlabelled": 1}
    assert "ReaL top-1" in (tmp_path / "out" / "report.html").read_text()
