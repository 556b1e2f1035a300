"""Error gallery: the most confident errors with their attention maps, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from weft.data import Source, eval_transform, open_image
from weft.errors import DataError
from weft.interpret import explain
from weft.interpret.panels import over, picture
from weft.models.base import Backbone
from weft.train.build import preprocessing
from weft.train.metrics import Mistake
from weft.train.page import shown

MOST = 8
PAIRS = 4  # in a row
WIDTH = 18  # letters of a class


def mistakes_figure(model: nn.Module, source: Source, mistakes: Sequence[Mistake]) -> Figure | None:
    """A figure of at most eight; None where there is nothing to look into: no mistakes, or not one of weft's networks.

    Args:
        model: that made them; it is left in the mode it came in.
        source: that `Mistake.place` counts in.
        mistakes: first the worst.
    """
    if not isinstance(model, Backbone):
        return None
    transform: Any = eval_transform(preprocessing(model))
    found = []
    for mistake in mistakes[:MOST]:
        try:
            found.append(
                (mistake, explain(model, transform(open_image(source.read(mistake.place).data)), grad_cam=False))
            )
        except DataError:  # gone since
            continue
    if not found or found[0][1].focus is None:
        return None
    columns = min(PAIRS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(3.3 * columns, 2.1 * rows + 0.2), layout="constrained")
    places = iter(figure.subplots(rows, 2 * columns, squeeze=False).ravel())
    for mistake, seen in found:
        left, right = next(places), next(places)
        taken = f"{shown(mistake.predicted, WIDTH)}, {100 * mistake.probability:.0f} %"
        picture(left, seen, f"is {shown(mistake.true, WIDTH)}")
        picture(right, seen, f"taken for {taken}")
        if seen.focus is not None:
            over(right, seen, seen.focus)
    for axes in places:
        axes.set_axis_off()
    return figure
