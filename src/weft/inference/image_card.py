"""Image files in the galleries of reports and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.data import BadImage
from weft.data.decode import image_to_show
from weft.report import markup

THUMBNAIL = 300  # pixels of the longer side


def image_card(path: str, lines: Sequence[str]) -> markup.Card:
    """Return an image file with its caption and the end of its path; without the image if it cannot be read."""
    name = str(Path(*Path(path).parts[-2:]))
    try:
        image = image_to_show(Path(path))
    except BadImage as error:  # no longer readable
        return markup.Card({}, [*lines, str(error)], name)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return markup.Card({path: np.asarray(image)}, lines, name)


def image_gallery(paths: Sequence[str], captions: Sequence[str]) -> str:
    """Return a gallery of image files, each with its caption."""
    return markup.gallery([image_card(path, [text]) for path, text in zip(paths, captions, strict=True)])
