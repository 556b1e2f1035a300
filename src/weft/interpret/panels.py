"""Figure of an explanation: the image, and its attention maps and Grad-CAM as overlays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.interpret.explaining import Explanation
from weft.pages import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    maps = [(f"attention, {level}", fmap) for level, fmap in explanation.attention.items()]
    if explanation.rollout is not None:
        maps.append(("attention rollout", explanation.rollout))
    if explanation.grad_cam is not None:
        maps.append(("Grad-CAM", explanation.grad_cam))
    count = 1 + len(maps) + (explanation.depth is not None)
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = new_figure(SIDE * columns, (SIDE + 0.3) * rows + 0.3)
    places = iter(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    name = str(explanation.label) if names is None else names[explanation.label]
    draw_image(next(places), explanation, f"{_short(name)}, {100 * explanation.probabilities[explanation.label]:.1f} %")
    for what, fmap in maps:
        axes = next(places)
        draw_image(axes, explanation, what)
        draw_map(axes, explanation, fmap)
    if explanation.depth is not None:
        _depth(next(places), explanation.depth)
    for axes in places:
        axes.set_axis_off()
    if title:
        figure.suptitle(_short(title, 60), fontsize="medium")
    return figure


def draw_image(axes: Axes, explanation: Explanation, title: str) -> None:
    """Draw the image as the network saw it."""
    axes.imshow(explanation.image)
    axes.set_title(title, fontsize="small")
    axes.set_axis_off()


def draw_map(axes: Axes, explanation: Explanation, fmap: np.ndarray) -> None:
    """Draw a map over the image, from its lowest value (dark) to its highest (bright)."""
    height, width = explanation.image.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(fmap, cmap="inferno", alpha=0.6, interpolation="bilinear", extent=extent)


def _depth(axes: Axes, depth: np.ndarray) -> None:
    axes.bar(np.arange(1, len(depth) + 1), 100 * depth, color="#0072B2")
    axes.set_title("taken from layer (LCA), %", fontsize="small")
    axes.tick_params(labelsize="x-small")
    axes.set_xlabel("layer", fontsize="x-small")


def _short(text: str, width: int = 28) -> str:
    """Return the text printable and cut, with `$` escaped, which would start a formula."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")
