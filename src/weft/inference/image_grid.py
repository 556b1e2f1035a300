"""Grid of image files with titles, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data import BadImage
from weft.data.decode import image_to_show
from weft.pages import new_figure, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 2.2  # inches of an image
PIXELS = 300  # of its longer side
COLUMNS = 5
TITLE_WIDTH = 28


def image_grid(paths: Sequence[str | Path], titles: Sequence[str]) -> Figure:
    """Draw image files in rows of five, each under its title. The place of a file that cannot be read stays empty."""
    columns = max(min(COLUMNS, len(paths)), 1)
    rows = max(-(-len(paths) // columns), 1)
    figure = new_figure(SIDE * columns, (SIDE + 0.3) * rows)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in places:
        axes.set_axis_off()
    for axes, path, title in zip(places, paths, titles, strict=False):
        axes.set_title(shown(title, TITLE_WIDTH), fontsize="small")
        try:
            image = image_to_show(Path(path))
        except BadImage:
            continue
        image.thumbnail((PIXELS, PIXELS))
        axes.imshow(image.convert("RGB"))
    return figure
