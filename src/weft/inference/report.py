"""Report of an evaluation: conclusions, curves, confusion matrix, calibration, errors.

Lines differ in dash and marker as well as in colour, so that the figures can be read without colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.inference.conclusions import Training, conclusions
from weft.inference.metrics import MAX_MATRIX, Evaluation
from weft.inference.scores import percent_text
from weft.report import markup
from weft.report.intervals import accuracy_of
from weft.report.pages import COLOURS, Fields, Section, Table, new_figure, shown, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = COLOURS[0]
MAX_VALUES = 20  # with more classes, the confusion matrix is a figure without numbers
MAX_NAMES = 50  # with more classes, there is no room for class names at the ticks
MAX_PAIRS = 10
MAX_ROWS = 100  # of more than MAX_MATRIX classes, and of their confused pairs
COMPLETE = "evaluation.json of weft evaluate RUN DATA --out DIR lists all."
NAME_WIDTH = 24


def write_report(
    folder: Path,
    title: str,
    summary: Fields,
    result: Evaluation,
    errors: Sequence[markup.Card] = (),
    curves: Sequence[tuple[Figure, str]] = (),
    training: Training | None = None,
    features: tuple[Figure, str] | None = None,
    series: Sequence[markup.Card] = (),
    candidates: Table = ((), ()),
    is_fitted: bool = False,
) -> None:
    """Write `report.html`.

    Args:
        folder: output folder; created if missing, and an existing report is replaced.
        title: heading of the report.
        summary: (name, value) lines below the conclusions.
        result: an evaluation on held-out images.
        errors: the most confident errors with their images, by `explained_errors`.
        curves: figures of accuracy and loss by epoch, with their alternative texts.
        features: map of the features, with its caption.
        series: pairs of images of one series.
        candidates: header and rows of a table of the networks that training could start from; no rows without any.
        training: the run, for conclusions about it.
        is_fitted: the temperature was fitted to the evaluated images.
    """
    sections = []
    if curves:
        text = "Training loss includes label smoothing and augmentation; held-out loss includes neither."
        sections.append(Section("Accuracy and loss by epoch", text, curves))
    text = "Rows are true classes, columns are predicted classes. Colours show the share of the row."
    if len(result.classes) <= MAX_VALUES:
        table = markup.matrix(result.classes, result.confusion.tolist())
        sections.append(Section("Confusion matrix", text, html=table))
    elif len(result.classes) <= MAX_MATRIX:
        figure = confusion_figure(result), "Confusion matrix: true classes by predicted classes"
        sections.append(Section("Confusion matrix", text, [figure], is_wide=True))
    if errors:
        under = ", and under its attention map" if len(errors[0].images) > 1 else ""
        text = f"Each image as the network saw it{under}."
        sections.append(Section("Most confident errors", text, html=markup.gallery(errors)))
    if series:
        text = "Both images of a pair are on one side of the split. A random split would put many pairs on both sides."
        sections.append(Section("Images of one series", text, html=markup.gallery(series)))
    if candidates[1]:
        text = "A linear probe on the features of each, by cross-validation on training images."
        sections.append(Section("Networks to start from", text, table=candidates))
    is_cut = len(result.classes) > MAX_MATRIX
    if pairs := _pair_rows(result, MAX_ROWS if is_cut else MAX_PAIRS):
        header = ("true class", "predicted", "images", "share of class %")
        text = f"{len(pairs):,} of {len(result.confused):,} pairs. {COMPLETE}" if is_cut else ""
        sections.append(Section("Most confused pairs", text, table=(header, pairs)))
    header = ("class", "images", "recall %", "95 % interval", "precision %", "F1 %")
    text = (
        "Recall: share of the images of the class that are predicted correctly. Precision: share of the predictions of"
        " the class that are correct."
    )
    rows = result.weakest(MAX_ROWS) if is_cut else range(len(result.classes))
    if is_cut:
        text += f" The {MAX_ROWS:,} of {len(result.classes):,} classes with the lowest recall. {COMPLETE}"
    sections.append(Section("Per class", text, table=(header, _class_rows(result, rows))))
    if result.mistakes:
        header = ("image", "true class", "predicted", "confidence")
        sections.append(Section("List of the most confident errors", table=(header, _error_rows(result))))
    if features is not None:
        sections.append(Section("Map of the features", features[1], [features]))
    calibration = reliability_figure(result), "Accuracy by confidence (reliability diagram)"
    fitted = " (underestimated: the temperature was fitted to these images)" if is_fitted else ""
    text = f"Expected calibration error {result.ece:.1f} points{fitted}; {_confidence_text(result)}."
    sections.append(Section("Confidence", text, [calibration]))
    write_page(folder, title, conclusions(result, training), summary, sections)


def confusion_figure(result: Evaluation) -> Figure:
    """Draw the confusion matrix of 21 to 100 classes: rows are true classes; colour is the share of the row."""
    counts = result.confusion
    num_classes = len(result.classes)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(4.5 + 0.38 * num_classes, 16)
    figure = new_figure(side + 1, side)
    axes = figure.subplots()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(image, ax=axes, label="share of the true class (%)", shrink=0.8)
    if num_classes <= MAX_NAMES:
        names = [shown(name, NAME_WIDTH) for name in result.classes]
        is_narrow = max(map(len, names)) <= 2
        rotation, alignment = (0, "center") if is_narrow else (45, "right")
        axes.set_xticks(range(num_classes), names, rotation=rotation, ha=alignment)
        axes.set_yticks(range(num_classes), names)
    axes.set_xticks(np.arange(num_classes - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(num_classes - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    return figure


def reliability_figure(result: Evaluation) -> Figure:
    """Draw the reliability diagram: accuracy by confidence, and below it the number of images by confidence."""
    bins = result.calibration
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.8, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 100], [0, 100], ":", color="0.4", label="perfect calibration")
    confidence, accuracy = ([100 * getattr(row, name) for row in bins] for name in ("sure", "right"))
    upper.plot(confidence, accuracy, "-o", color=BLUE, markersize=5, label="this model")
    upper.set(ylabel="accuracy (%)", ylim=(0, 102), xlim=(0, 102))
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    widths = [100 * (row.high - row.low) for row in bins]
    lower.bar(
        [100 * row.low for row in bins], [row.images for row in bins], widths, align="edge", color=BLUE, ec="white"
    )
    lower.set(xlabel="confidence (%)", ylabel="images")
    lower.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _confidence_text(result: Evaluation) -> str:
    """Compare mean confidence with accuracy, in a few words."""
    difference = 100 * float(result.confidence.mean()) - result.top1
    if abs(difference) < 1:
        return "mean confidence equals accuracy within 1 point"
    bias = "above accuracy (overconfident)" if difference > 0 else "below accuracy (underconfident)"
    return f"mean confidence {abs(difference):.1f} points {bias}"


def _class_rows(result: Evaluation, classes: Iterable[int]) -> list[tuple[str, ...]]:
    rows, scores, correct = [], result.per_class, result.class_counts.correct.tolist()
    for place in classes:
        score = scores[place]
        interval = accuracy_of(correct[place], score.images) if score.images else None
        bounds = "-" if interval is None else f"{interval.low:.1f} to {interval.high:.1f}"
        recall, precision, f1 = map(percent_text, (score.recall, score.precision, score.f1))
        rows.append((score.name, f"{score.images:,}", recall, bounds, precision, f1))
    return rows


def _pair_rows(result: Evaluation, most: int) -> list[tuple[str, ...]]:
    images = result.class_counts.images.tolist()
    return [
        (result.classes[true], result.classes[predicted], f"{count}", f"{100 * count / images[true]:.1f}")
        for true, predicted, count in result.confused[:most].tolist()
    ]


def _error_rows(result: Evaluation) -> list[tuple[str, ...]]:
    return [(error.key, error.true, error.predicted, f"{error.probability:.3f}") for error in result.mistakes]
