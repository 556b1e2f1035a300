"""What a run leaves for a person to look at: curves, confusion, mistakes, as pictures, Markdown and one HTML page.

Colours are from the Okabe-Ito set, and every line also has its own dash and marker: nothing is told by colour alone.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weft.durable import writing
from weft.train.metrics import Evaluation
from weft.train.rundir import EpochRow, write_text

BLUE, ORANGE = "#0072B2", "#D55E00"
MAX_VALUES = 20  # with more classes than this, a cell is too small to hold its value
MAX_NAMES = 50  # and with more than this, a tick is too small to hold its name
NAME_WIDTH = 24

Facts = Sequence[tuple[str, str]]  # (name, value), or (file, caption)
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # heading, header, rows


def write_report(folder: Path, title: str, facts: Facts, result: Evaluation, history: Sequence[EpochRow] = ()) -> None:
    """Writes `report.md`, `report.html`, `confusion.png` and, where there is a history, `curves.png`.

    Args:
        folder: where to; made if missing, files in it are replaced.
        title: the heading.
        facts: lines above the tables, as (name, value).
        result: an evaluation on held-out images.
        history: one row per epoch.
    """
    pictures = {"confusion.png": (confusion_figure(result), "Confusion matrix on the held-out images")}
    if history:
        pictures = {"curves.png": (curves_figure(history), "Loss and accuracy by epoch"), **pictures}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, (figure, _) in pictures.items():
            figure.savefig(folder / name, dpi=130, metadata={"Software": None})
    captions = [(name, caption) for name, (_, caption) in pictures.items()]
    tables = [
        ("Per class", ("class", "images", "precision %", "recall %", "F1 %"), _class_rows(result)),
        ("Most confused pairs", ("is", "was taken for", "times", "share of class %"), _pair_rows(result)),
        ("Most confident mistakes", ("image", "is", "was taken for", "probability"), _mistake_rows(result)),
    ]
    tables = [table for table in tables if table[2]]
    write_text(folder / "report.md", _markdown(title, facts, captions, tables))
    write_text(folder / "report.html", _html(folder, title, facts, captions, tables))


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
        names = [_short(name) for name in result.classes]
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


def _short(name: str) -> str:
    """A class name for a tick: printable, cut, and with `$` kept from starting a formula."""
    text = "".join(letter if letter.isprintable() else "?" for letter in name).replace("$", r"\$")
    return text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 1]}…"


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


def _markdown(title: str, facts: Facts, captions: Facts, tables: Sequence[Table]) -> str:
    def cell(text: str) -> str:
        return html.escape(text, quote=False).replace("|", r"\|").replace("\n", " ")

    lines = [f"# {cell(title)}", "", *(f"- {name}: {cell(value)}" for name, value in facts), ""]
    for name, caption in captions:
        lines += [f"![{caption}]({name})", ""]
    for heading, header, rows in tables:
        lines += [f"## {heading}", "", f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        lines += [f"| {' | '.join(map(cell, row))} |" for row in rows] + [""]
    return "\n".join(lines)


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222; }
img { max-width: 100%; } table { border-collapse: collapse; margin-bottom: 2rem; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; overflow-wrap: anywhere; }"""


def _html(
    folder: Path,
    title: str,
    facts: Facts,
    captions: Facts,
    tables: Sequence[Table],
) -> str:
    """One page that needs no other file: the pictures are inside."""

    def row(cells: Sequence[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = [f"<h1>{html.escape(title)}</h1>", "<table>", *(row(fact) for fact in facts), "</table>"]
    for name, caption in captions:
        data = base64.b64encode((folder / name).read_bytes()).decode("ascii")
        body.append(f'<p><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}"></p>')
    for heading, header, rows in tables:
        body += [
            f"<h2>{html.escape(heading)}</h2>",
            "<table>",
            row(header, "th"),
            *(row(cells) for cells in rows),
            "</table>",
        ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
