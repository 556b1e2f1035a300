"""What a recipe says about images reaches them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import weft
from tests.data.pictures import Whole
from weft.data import open_data
from weft.recipes import load_recipe
from weft.train.batches import training_images


@pytest.mark.parametrize(("draft", "size"), [(True, (100, 150)), (False, (400, 600))])
def test_large_photos_are_decoded_smaller(draft: bool, size: tuple[int, int], tmp_path: Path) -> None:
    """Twice 32 pixels must be left on both sides: of 400 a quarter is enough, an eighth is not."""
    for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (600, 400)).save(tmp_path / name)
    recipe = load_recipe(None, [("data.draft", draft)])
    images = training_images(recipe, open_data(tmp_path).train, weft.create_model("ceit_nano_32"))
    images.transform = Whole()
    assert images.__getitems__([(0, 0)]).pixels.shape[1:] == (*size, 3)
