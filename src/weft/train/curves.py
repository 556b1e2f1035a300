"""Figures of accuracy and loss over the epochs of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.report.pages import COLOURS, new_figure
from weft.runs.directory import EpochRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = COLOURS[:2]


def curve_figures(history: Sequence[EpochRow], best_epoch: int) -> list[tuple[Figure, str]]:
    """Draw top-1 accuracy and loss of the training and validation sets by epoch, with the best epoch marked.

    Returns:
        Each figure with its alternative text.
    """
    best = next(row for row in history if row.epoch == best_epoch)
    accuracy, accuracy_axes = _figure(history, best, "top1")
    accuracy_axes.set(ylabel="top-1 accuracy (%)", title=f"best: epoch {best.epoch}, {best.val_top1:.2f} %")
    loss, loss_axes = _figure(history, best, "loss")
    loss_axes.set(ylabel="loss (cross-entropy, nats)", title=f"at the best epoch: {best.val_loss:.3f}")
    loss_axes.set_ylim(bottom=0)
    return [(accuracy, "Accuracy by epoch"), (loss, "Loss by epoch")]


def _figure(history: Sequence[EpochRow], best: EpochRow, measure: str) -> tuple[Figure, Axes]:
    """Draw `top1` or `loss` of both sets without the epochs that have no value, and mark the best epoch."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.8, 3.6)
    axes = figure.add_subplot()
    sets = (("train", "--o", BLUE, "training"), ("val", "-s", ORANGE, "held out"))
    for prefix, style, color, name in sets:
        points = [(row.epoch, getattr(row, f"{prefix}_{measure}")) for row in history]
        known = [point for point in points if not math.isnan(point[1])] or [(best.epoch, math.nan)]
        step = max(1, len(known) // 20)
        axes.plot(*zip(*known, strict=True), style, color=color, label=name, markersize=4, markevery=step)
    axes.axvline(best.epoch, color="0.5", linewidth=1, linestyle=":", zorder=1)
    value = getattr(best, f"val_{measure}")
    axes.plot(best.epoch, value, "o", color=ORANGE, markersize=11, markerfacecolor="none", label="best epoch")
    axes.margins(y=0.1)
    axes.set_xlim(history[0].epoch - 0.5, history[-1].epoch + 0.5)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize="small")
    return figure, axes
