"""The picture of mistakes: those that can be read, each with its map; nothing where there is nothing to look into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weft
from tests.helpers import lively
from weft.data import open_data
from weft.train.metrics import Mistake
from weft.train.mistakes import MOST, mistakes_figure


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a", "$b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def wrong(count: int) -> list[Mistake]:
    return [Mistake(f"{i}.png", "a", "$b", 0.9, i) for i in range(count)]


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_each_image_and_its_map(name, photos):
    model, source = lively(name, num_classes=2).train(), open_data(photos).train
    figure = mistakes_figure(model, source, wrong(3))
    assert figure is not None
    axes = figure.axes
    assert [len(ax.get_images()) for ax in axes] == [1, 2, 1, 2, 1, 2]
    assert [ax.get_title() for ax in axes[:2]] == ["is a", r"taken for \$b, 90 %"]
    assert model.training


def test_at_most_so_many(photos):
    figure = mistakes_figure(lively("levit_nano_32", num_classes=2), open_data(photos).train, wrong(12))
    assert figure is not None
    assert len(figure.axes) == 2 * MOST


def test_an_image_that_is_gone_is_left_out(photos):
    source = open_data(photos).train
    Path(photos / source.read(1).key).write_bytes(b"")
    figure = mistakes_figure(lively("levit_nano_32", num_classes=2), source, wrong(3))
    assert figure is not None
    assert len([ax for ax in figure.axes if ax.get_images()]) == 4


def test_nothing_to_look_into(photos):
    source = open_data(photos).train
    assert mistakes_figure(lively("levit_nano_32", num_classes=2), source, []) is None
    assert mistakes_figure(weft.create_model("resnet18", num_classes=2), source, wrong(2)) is None
    assert (
        mistakes_figure(weft.create_model("t2t_vit_14", num_classes=2, img_size=32, depth=1), source, wrong(1)) is None
    )
