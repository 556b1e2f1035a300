"""Accuracy floors, and class names from the data to every result: other tests pass if a network learns nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import NANO, ONE_OF_NANO, unpack
from tests.train.tiny import ARGUMENTS
from weft.errors import DataError
from weft.inference import evaluate, predict
from weft.train import train

FEW9 = Path(__file__).parents[2].parent / "shared" / "data" / "few9.tar"
# Names whose order differs when they are sorted as text, as numbers, without case, or by the date of the folder.
COLOURS = {"b": (220, 40, 40), "2": (40, 170, 60), "10": (40, 70, 215), "A": (225, 190, 30)}


def paint(folder: Path, per_class: int, start: int = 0) -> Path:
    """A square of the class's colour at a random place in gray noise."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(start, start + per_class):
            random = np.random.default_rng([number, *colour])
            pixels = random.integers(90, 160, (32, 32, 3), dtype=np.uint8)
            y, x = random.integers(0, 16, 2)
            pixels[y : y + 16, x : x + 16] = colour
            Image.fromarray(pixels).save(folder / name / f"{number:03}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders for training and for evaluation."""
    root = tmp_path_factory.mktemp("colours")
    return paint(root / "data", 40), paint(root / "later", 6, 100)


@pytest.mark.slow_except("levit_nano_32")
@pytest.mark.parametrize("model", NANO)
def test_colours_are_learned_and_classes_are_matched_by_name(model: str, images: tuple[Path, Path], tmp_path: Path):
    """Also on data with some of the classes, which have other numbers there."""
    settings = {**ARGUMENTS[model], "optim.lr": 2e-3, "batch_size": 16, "augment.hflip": True}
    run = train(images[0], model=model, epochs=5, settings=settings, out=tmp_path / "run", workers=0, quiet=True)
    assert run.top1 >= 95  # guessing: 25
    config = json.loads((run.out / "best" / "config.json").read_text())
    assert config["label_names"] == sorted(COLOURS) == ["10", "2", "A", "b"]

    later = evaluate(run.out, images[1], workers=0, quiet=True)
    assert later.classes == sorted(COLOURS)
    assert later.top1 >= 95
    files = sorted(images[1].rglob("*.png"))
    rows = predict(run.out, files, quiet=True)
    assert np.mean([row.top[0][0] == path.parent.name for row, path in zip(rows, files, strict=True)]) >= 0.95

    some = tmp_path / "some"
    for name in ("A", "b"):
        shutil.copytree(images[1] / name, some / name)
    result = evaluate(run.out, some, split="all", workers=0, quiet=True)
    assert result.count == 12
    assert result.top1 >= 95
    (some / "A").rename(some / "unheard of")
    with pytest.raises(DataError, match="unheard of"):
        evaluate(run.out, some, split="all", workers=0, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ONE_OF_NANO)
def test_digits(model: str, tmp_path: Path) -> None:
    run = train("digits", model=model, epochs=4, out=tmp_path / "run", seed=0, quiet=True)
    assert run.top1 >= 88


@pytest.mark.slow
@pytest.mark.skipif(not FEW9.is_file(), reason="needs few9.tar of the shared data, which is not part of the project")
def test_few_photos_with_offline_weights(tmp_path: Path) -> None:
    """A linear classifier on the features of public weights that come with a package."""
    unpack(FEW9, tmp_path / "photos")
    (folder,) = (path for path in (tmp_path / "photos").iterdir() if path.is_dir())
    run = train(folder, recipe="probe", model="tf_efficientnet_lite0", out=tmp_path / "run", quiet=True)
    assert run.top1 >= 88
