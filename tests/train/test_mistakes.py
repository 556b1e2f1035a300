"""The picture of mistakes: those that can be read, each with its map; nothing where there is nothing to look into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import weft
from tests.helpers import lively
from weft.data import open_data
from weft.inference import Predictor, TorchModel
from weft.inference.error_gallery import MAX_ERRORS, explained_errors, gallery_html
from weft.inference.metrics import Mistake

pytestmark = pytest.mark.figures


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a", "$b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def predictor(network: Any) -> Predictor:
    return Predictor(TorchModel(network, fold=False))


def wrong(count: int) -> list[Mistake]:
    return [Mistake(f"{i}.png", "a", "$b", 0.9, i) for i in range(count)]


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_each_image_and_its_map(name, photos):
    model, source = lively(name, num_classes=2), open_data(photos).train
    errors = explained_errors(predictor(model), source, wrong(3))
    for error in errors:
        assert error.overlay is not None
        assert error.overlay.shape == error.image.shape == (32, 32, 3)
        assert np.ptp(error.overlay.astype(int) - error.image, axis=(0, 1)).min() > 10  # not even: it has a map
    page = gallery_html(errors)
    assert page.count("<img ") == 6
    assert page.count('<div dir="auto">true class: a</div><div dir="auto">predicted: $b, 90 %</div>') == 3
    assert page.count('class="small"') == 6  # of 32 pixels: enlarged without smoothing


def test_at_most_so_many(photos):
    errors = explained_errors(predictor(lively("levit_nano_32", num_classes=2)), open_data(photos).train, wrong(13))
    assert len(errors) == MAX_ERRORS


def test_an_image_that_is_gone_is_left_out(photos):
    source = open_data(photos).train
    Path(photos / source.read(1).key).write_bytes(b"")
    errors = explained_errors(predictor(lively("levit_nano_32", num_classes=2)), source, wrong(3))
    assert [error.mistake.place for error in errors] == [0, 2]


def test_nothing_to_look_into(photos):
    """Networks without attention maps have the images alone."""
    source = open_data(photos).train
    assert explained_errors(predictor(lively("levit_nano_32", num_classes=2)), source, []) == []
    for network in (
        weft.create_model("resnet18", num_classes=2),
        weft.create_model("grafted_r50s1_deit_small_9", num_classes=2, img_size=32, depth=1),
    ):
        errors = explained_errors(predictor(network), source, wrong(2))
        assert [error.overlay for error in errors] == [None, None]
        assert gallery_html(errors).count("<img ") == 2
