"""The pictures of errors: those that can be read, each with its map where the network has attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import weft
from tests.helpers import lively
from weft.data import Source, open_data
from weft.inference import Predictor, TorchModel
from weft.inference.error_gallery import MAX_ERRORS, explained_errors, gallery_html
from weft.inference.metrics import Mistake


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """16 images; the second training image is gone since they were listed."""
    rng = np.random.default_rng(0)
    for name in ("a", "$b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    source = open_data(tmp_path).train
    (tmp_path / source.keys[1]).unlink()
    return source


def explained(network: Any, source: Source, *places: int) -> list[Any]:
    wrong = [Mistake(f"{place}.png", "a", "$b", 0.9, place) for place in places]
    return explained_errors(Predictor(TorchModel(network, fold=False)), source, wrong)


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_each_image_and_its_map(name: str, source: Source) -> None:
    errors = explained(lively(name, num_classes=2), source, 0, 2, 3)
    for error in errors:
        assert error.overlay is not None
        assert error.overlay.shape == error.image.shape == (32, 32, 3)
        assert np.ptp(error.overlay.astype(int) - error.image, axis=(0, 1)).min() > 10  # not even: it has a map
    page = gallery_html(errors)
    assert page.count("<img ") == 6
    assert page.count('<div dir="auto">true class: a</div><div dir="auto">predicted: $b, 90 %</div>') == 3
    assert page.count('class="small"') == 6  # of 32 pixels: enlarged without smoothing


def test_the_first_errors_whose_images_can_be_read(source: Source) -> None:
    network = lively("levit_nano_32", num_classes=2, depth=[1, 1, 1])
    assert explained(network, source) == []
    errors = explained(network, source, *range(MAX_ERRORS + 1))
    assert [error.mistake.place for error in errors] == [0, *range(2, MAX_ERRORS)]


def test_a_network_without_attention_has_the_images_alone(source: Source) -> None:
    errors = explained(weft.create_model("resnet10t", num_classes=2), source, 0, 2)
    assert [error.overlay for error in errors] == [None, None]
    assert gallery_html(errors).count("<img ") == 2
