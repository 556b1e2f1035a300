"""Figure of an explanation: the image, and its attention maps and Grad-CAM as overlays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.interpret.explaining import Explanation
from weft.interpret.overlay import overlaid
from weft.report.pages import COLOURS, new_figure, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 2.4  # inches of a panel
COLUMNS = 4


def panels(explanation: Explanation, names: Sequence[str] | None = None, title: str = "") -> Figure:
    """Return a figure with one panel per map.

    Args:
        explanation: result of `explain`.
        names: class names; None: numbers.
        title: title of the figure.
    """
    name = str(explanation.label) if names is None else names[explanation.label]
    images = {f"{shown(name, 28)}, {100 * explanation.probabilities[explanation.label]:.1f} %": explanation.image}
    maps = {f"attention, {level}": fmap for level, fmap in explanation.attention.items()}
    maps |= {"attention rollout": explanation.rollout, "Grad-CAM": explanation.grad_cam}
    images |= {caption: overlaid(explanation.image, fmap) for caption, fmap in maps.items() if fmap is not None}

    count = len(images) + (explanation.depth is not None)
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = new_figure(SIDE * columns, (SIDE + 0.3) * rows + 0.3)
    places = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    for axes in places:
        axes.set_axis_off()
    for axes, (caption, pixels) in zip(places, images.items(), strict=False):
        axes.imshow(pixels)
        axes.set_title(caption, fontsize="small")
    if explanation.depth is not None:
        axes = places[len(images)]
        axes.set_axis_on()
        axes.bar(np.arange(1, len(explanation.depth) + 1), 100 * explanation.depth, color=COLOURS[0])
        axes.set_title("taken from layer (LCA), %", fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.set_xlabel("layer", fontsize="x-small")
    if title:
        figure.suptitle(shown(title, 60), fontsize="medium")
    return figure
