"""Report of a run: curves, confusion matrix, error gallery, as figures, Markdown and one HTML file.

Colours are from the Okabe-Ito set, and every line also has its own dash and marker: nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weft.train.metrics import Evaluation
from weft.train.page import COLOURS, Facts, shown, write_page
from weft.train.rundir import EpochRow

BLUE, ORANGE = COLOURS[:2]
PICTURES = ("curves.png", "confusion.png", "reliability.png", "mistakes.png")
MAX_VALUES = 20  # with more classes than this, a cell is too small to hold its value
MAX_NAMES = 50  # and with more than this, a tick is too small to hold its name
NAME_WIDTH = 24


def write_report(
    folder: Path,
    title: str,
    facts: Facts,
    result: Evaluation,
    history: Sequence[EpochRow] = (),
    mistakes: Figure | None = None,
) -> None:
    """Writes `report.md`, `report.html`, and the pictures in PICTURES, of which some need what may not be there.

    Args:
        folder: where to; made if missing, files in it are replaced.
        title: the heading.
        facts: lines above the tables, as (name, value).
        result: an evaluation on held-out images.
        history: one row per epoch.
        mistakes: a picture of them.
    """
    pictures = {
        "confusion.png": (confusion_figure(result), "Confusion matrix on the held-out images"),
        "reliability.png": (reliability_figure(result), "How often answers of a probability are right"),
    }
    if mistakes is not None:
        pictures["mistakes.png"] = (mistakes, "The most confident mistakes, and what the network looked at")
    facts = [*facts, ("calibration", f"expected error {result.ece:.1f} points: {_leaning(result)}")]
    if history:
        pictures = {"curves.png": (curves_figure(history), "Loss and accuracy by epoch"), **pictures}
    tables = [
        ("Per class", ("class", "images", "precision %", "recall %", "F1 %"), _class_rows(result)),
        ("Most confused pairs", ("is", "was taken for", "times", "share of class %"), _pair_rows(result)),
        ("Most confident mistakes", ("image", "is", "was taken for", "probability"), _mistake_rows(result)),
    ]
    tables = [table for table in tables if table[2]]
    write_page(folder, title, facts, pictures, tables)


def curves_figure(history: Sequence[EpochRow]) -> Figure:
    """Loss and top-1 accuracy of training and held-out images over the epochs, and the best epoch marked."""
    epochs = [row.epoch for row in history]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _two_lines(left, epochs, [row.train_loss for row in history], [row.val_loss for row in history])
    left.set_ylabel("loss (cross-entropy, nats)")
    left.set_ylim(bottom=0)
    _two_lines(right, epochs, [row.train_top1 for row in history], [row.val_top1 for row in history])
    right.set_ylabel("top-1 accuracy (%)")
    best = max(history, key=lambda row: row.val_top1)
    right.annotate(
        f"best: {best.val_top1:.2f} %\nepoch {best.epoch}",
        (best.epoch, best.val_top1),
        xytext=(0.62, 0.45),
        textcoords="axes fraction",
        arrowprops=dict(arrowstyle="->", color="0.3"),
    )
    left.legend(frameon=False)
    figure.suptitle("Training loss has label smoothing and augmentation, held-out loss has neither", fontsize=9)
    return figure


def _two_lines(axes: Axes, epochs: list[int], train: list[float], held_out: list[float]) -> None:
    marker_every = max(1, len(epochs) // 20)
    axes.plot(epochs, train, "--o", color=BLUE, label="training", markersize=4, markevery=marker_every)
    axes.plot(epochs, held_out, "-s", color=ORANGE, label="held out", markersize=4, markevery=marker_every)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def confusion_figure(result: Evaluation) -> Figure:
    """Rows: what an image is; columns: what it was taken for; colour: share of the row; text: number of images."""
    counts = result.confusion
    number = len(result.classes)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(4.5 + 0.38 * number, 16)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(image, ax=axes, label="share of the class (%)", shrink=0.8)
    if number <= MAX_NAMES:
        names = [shown(name, NAME_WIDTH) for name in result.classes]
        is_narrow = max(map(len, names)) <= 2
        axes.set_xticks(range(number), names, rotation=0 if is_narrow else 45, ha="center" if is_narrow else "right")
        axes.set_yticks(range(number), names)
    if number <= MAX_VALUES:
        for row, column in np.ndindex(counts.shape):
            if counts[row, column]:
                shade = "white" if share[row, column] > 55 else "black"
                axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=shade, fontsize=9)
    axes.set_xticks(np.arange(number - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(number - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("was taken for")
    axes.set_ylabel("is")
    axes.set_title(f"top-1 {result.top1:.2f} % of {result.count} images", fontsize=10)
    return figure


def reliability_figure(result: Evaluation) -> Figure:
    """How often answers are right, over how sure they are; below, how many are that sure."""
    bins = result.calibration
    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 100], [0, 100], ":", color="0.4", label="what the probability says")
    sure, right = ([100 * getattr(row, name) for row in bins] for name in ("sure", "right"))
    upper.plot(sure, right, "-o", color=BLUE, markersize=5, label="here")
    upper.set(ylabel="answered right (%)", ylim=(0, 102), xlim=(0, 102))
    upper.set_title(f"expected calibration error {result.ece:.1f} points", fontsize=10)
    upper.legend(frameon=False)
    widths = [100 * (row.high - row.low) for row in bins]
    lower.bar(
        [100 * row.low for row in bins], [row.images for row in bins], widths, align="edge", color=BLUE, ec="white"
    )
    lower.set(xlabel="probability of the answer (%)", ylabel="images")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _leaning(result: Evaluation) -> str:
    """Which way the probabilities err, on the whole."""
    apart = 100 * float(result.sure.mean()) - result.top1
    if abs(apart) < 1:
        return "on the whole as sure as it is right"
    return f"on the whole {abs(apart):.1f} points {'surer' if apart > 0 else 'less sure'} than it is right"


def _class_rows(result: Evaluation) -> list[tuple[str, ...]]:
    return [
        (row.name, f"{row.images}", f"{row.precision:.1f}", f"{row.recall:.1f}", f"{row.f1:.1f}")
        for row in result.per_class
    ]


def _pair_rows(result: Evaluation, most: int = 10) -> list[tuple[str, ...]]:
    wrong = result.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [divmod(int(place), len(result.classes)) for place in order]
    totals = result.confusion.sum(axis=1)
    return [
        (
            result.classes[true],
            result.classes[taken],
            f"{wrong[true, taken]}",
            f"{100 * wrong[true, taken] / totals[true]:.1f}",
        )
        for true, taken in pairs
        if wrong[true, taken]
    ]


def _mistake_rows(result: Evaluation) -> list[tuple[str, ...]]:
    return [(mistake.key, mistake.true, mistake.predicted, f"{mistake.probability:.3f}") for mistake in result.mistakes]
