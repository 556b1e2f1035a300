"""The pictures of errors: those that can be read, each with its map where the network has attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.helpers import lively, noise_images
from weft.data import Source, open_data
from weft.inference import Predictor, TorchModel
from weft.inference.error_gallery import MAX_ERRORS, explained_errors
from weft.inference.scores import Mistake
from weft.report.markup import gallery


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """16 images; the second training image is gone since they were listed."""
    names = [f"{name}/{i}.png" for name in ("a", "$b") for i in range(8)]
    source = open_data(noise_images(tmp_path, *names)).train
    (tmp_path / source.keys[1]).unlink()
    return source


def explained(network: Any, source: Source, *places: int) -> list[Any]:
    wrong = [Mistake(f"{place}.png", "a", "$b", 0.9, place) for place in places]
    return explained_errors(Predictor(TorchModel(network, fold=False)), source, wrong)


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_each_image_and_its_map(name: str, source: Source) -> None:
    errors = explained(lively(name, num_classes=2), source, 0, 2, 3)
    for error in errors:
        image, overlay = error.images.values()
        assert overlay.shape == image.shape == (32, 32, 3)
        assert np.ptp(overlay.astype(int) - image, axis=(0, 1)).min() > 10  # not even: it has a map
    page = gallery(errors)
    assert page.count("<img ") == 6
    assert page.count('<div dir="auto">true class: a</div><div dir="auto">predicted: $b, 90 %</div>') == 3
    assert page.count('class="small"') == 6  # of 32 pixels: enlarged without smoothing


def test_the_first_errors_whose_images_can_be_read(source: Source) -> None:
    network = lively("levit_nano_32", num_classes=2, depth=[1, 1, 1])
    assert explained(network, source) == []
    errors = explained(network, source, *range(MAX_ERRORS + 1))
    assert [error.name for error in errors] == [f"{place}.png" for place in (0, *range(2, MAX_ERRORS))]


def test_a_network_without_attention_has_the_images_alone(source: Source) -> None:
    errors = explained(weft.create_model("resnet10t", num_classes=2), source, 0, 2)
    assert [len(error.images) for error in errors] == [1, 1]
