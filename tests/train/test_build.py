"""What a recipe says about images reaches them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

import weft
from weft.data import Sample
from weft.recipes import load_recipe
from weft.train.plan import training_images


class OneLargePhoto:
    classes, labels, keys = ["a"], [0], ["a/0.jpg"]

    def __init__(self) -> None:
        file = io.BytesIO()
        Image.fromarray(np.zeros((400, 600, 3), np.uint8)).save(file, "JPEG")
        self.sample = Sample(file.getvalue(), 0, self.keys[0])

    def __len__(self) -> int:
        return 1

    def read(self, i: int) -> Sample:
        return self.sample


@pytest.mark.parametrize(("draft", "size"), [(True, (150, 100)), (False, (600, 400))])
def test_large_photos_are_decoded_smaller(draft, size):
    """Twice 32 pixels must be left on both sides: of 400 a quarter is enough, an eighth is not."""
    recipe = load_recipe(None, [("data.draft", draft)])
    images = training_images(recipe, OneLargePhoto(), weft.create_model("ceit_nano_32"))
    seen = []
    images.transform = lambda image: seen.append(image.size)
    images[(0, 0)]
    assert seen == [size]
