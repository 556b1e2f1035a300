"""An explanation as one picture: the image, and over it what each level, the whole and Grad-CAM looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft.interpret.explaining import Explanation

SIDE = 2.4  # inches of a panel
COLUMNS = 4


def panels(found: Explanation, names: Sequence[str] | None = None, title: str = "") -> Figure:
    """A figure with one panel per map.

    Args:
        found: of `explain`.
        names: of the classes; numbers without.
        title: over all of it.
    """
    maps = [(f"attention, {level}", fmap) for level, fmap in found.attention.items()]
    if found.rollout is not None:
        maps.append(("attention, rolled out", found.rollout))
    if found.grad_cam is not None:
        maps.append(("Grad-CAM", found.grad_cam))
    count = 1 + len(maps) + (found.depth is not None)
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(SIDE * columns, (SIDE + 0.3) * rows + 0.3), layout="constrained")
    places = iter(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    name = str(found.label) if names is None else names[found.label]
    picture(next(places), found, f"{_short(name)}, {100 * found.probabilities[found.label]:.1f} %")
    for what, fmap in maps:
        axes = next(places)
        picture(axes, found, what)
        over(axes, found, fmap)
    if found.depth is not None:
        _depth(next(places), found.depth)
    for axes in places:
        axes.set_axis_off()
    if title:
        figure.suptitle(_short(title, 60), fontsize="medium")
    return figure


def picture(axes: Axes, found: Explanation, title: str) -> None:
    """What the network saw."""
    axes.imshow(found.picture)
    axes.set_title(title, fontsize="small")
    axes.set_axis_off()


def over(axes: Axes, found: Explanation, fmap: np.ndarray) -> None:
    """A map laid over it, from its least (dark) to its most (bright)."""
    height, width = found.picture.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(fmap, cmap="inferno", alpha=0.6, interpolation="bilinear", extent=extent)


def _depth(axes: Axes, depth: np.ndarray) -> None:
    axes.bar(np.arange(1, len(depth) + 1), 100 * depth, color="#0072B2")
    axes.set_title("taken from layer (LCA), %", fontsize="small")
    axes.tick_params(labelsize="x-small")
    axes.set_xlabel("layer", fontsize="x-small")


def _short(text: str, width: int = 28) -> str:
    """Printable, cut, and with `$` kept from starting a formula."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")
