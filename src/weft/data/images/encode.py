"""Encode images for HTML pages and notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from weft import markup
from weft.data.images.colour import common_range
from weft.data.images.decode import BadImage, image_values, open_image
from weft.data.images.limits import MAX_PIXELS

THUMBNAIL = 300  # pixels of the longer side


def encoded(image: np.ndarray) -> tuple[str, bytes]:
    """Return the MIME type and the content of an image file: lossless for a small image, which is enlarged."""
    buffer, is_small = io.BytesIO(), min(image.shape[:2]) <= markup.SMALL
    Image.fromarray(image).save(buffer, "PNG" if is_small else "JPEG", quality=90)
    return "image/png" if is_small else "image/jpeg", buffer.getvalue()


def image_to_show(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image for a person; more than 8 bits per channel are scaled by the values of the image.

    Raises:
        BadImage: as `open_image`.
    """
    values = image_values(path, max_pixels=max_pixels)
    return open_image(path, max_pixels=max_pixels, value_range=None if values is None else common_range([values]))


def image_card(path: str, lines: Sequence[str]) -> markup.Card:
    """Return an image file with a caption, for a gallery; without the image if the file cannot be read."""
    name = str(Path(*Path(path).parts[-2:]))
    try:
        image = image_to_show(Path(path))
    except BadImage as error:
        return markup.Card([], [*lines, str(error)], name)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    is_small = min(image.size) <= markup.SMALL
    return markup.Card([(*encoded(np.asarray(image)), path)], lines, name, is_small)
