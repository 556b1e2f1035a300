"""Report of a comparison: frontier of accuracy and speed, learning curves, tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.intervals import MAX_HALF_WIDTH
from weft.pages import Lead, Section, new_figure, series_style, shown, write_page
from weft.study.outcome import DEPLOYED, TRAINED, Comparison, deployed_rows, trained_cells
from weft.study.report import curves_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "0.6"
WIDTH = 28  # characters of a name in a figure


def write_comparison(comparison: Comparison) -> None:
    """Write report.md, report.html and their figures to the directory of a comparison."""
    summary = [
        ("data", comparison.data),
        ("protocol", comparison.protocol),
        ("limits", _limits(comparison)),
        ("intervals", _intervals(comparison.seeds)),
        *(("note", note) for note in comparison.notes),
    ]
    failed = [(entry.name, str(entry.error)) for entry in comparison.entries if entry.error is not None]
    frontier = {"frontier.png": (frontier_figure(comparison), "Top-1 accuracy by throughput")}
    trained = [trained_cells(entry) for entry in comparison.entries if entry.error is None]
    sections = [
        Section("Accuracy by speed", "On the held-out images, on this machine.", frontier),
        Section("Training", table=(TRAINED, trained)),
        Section("Inference on this machine", table=(DEPLOYED, deployed_rows(comparison))),
    ]
    if any(len(entry.curve) > 1 for entry in comparison.entries):
        curves = {"curves.png": (curves_figure(_curves(comparison)), "Held-out top-1 by epoch")}
        sections.append(Section("Accuracy by epoch", "", curves))
    if failed:
        sections.append(Section("Failed", table=(("model", "reason"), failed)))
    write_page(comparison.out, f"Comparison of models on {comparison.data}", _lead(comparison), summary, sections)


def _lead(comparison: Comparison) -> Lead:
    """Return the recommendation, and what would make it more certain."""
    best = next((entry for entry in comparison.entries if entry.accuracy is not None), None)
    steps = []
    if best is not None and best.accuracy is not None and best.accuracy.is_wide:
        steps.append(
            f"Hold out more images: the interval of {best.name} is wider than {MAX_HALF_WIDTH:g} points to each side,"
            " which is too wide to rank models."
        )
    if comparison.seeds == 1:
        steps.append("Repeat with --seeds 3 to include the variation between training runs; finished runs are kept.")
    if any(entry.stopped_after for entry in comparison.entries):
        steps.append("Raise --budget to train the stopped models to the end.")
    return Lead([comparison.advice], steps)


def _limits(comparison: Comparison) -> str:
    limits = []
    if comparison.limits.latency_ms is not None:
        limits.append(f"{comparison.limits.latency_ms:g} ms latency")
    if comparison.limits.megabytes is not None:
        limits.append(f"{comparison.limits.megabytes:g} MB")
    return " and ".join(limits) or "none"


def _intervals(seeds: int) -> str:
    if seeds == 1:
        return (
            "95 %, over the held-out images (Wilson), differences on the same images (Agresti and Min); with one seed,"
            " the variation between training runs is not included"
        )
    return f"95 %, by Student's t over {seeds} seeds; differences paired by seed"


def frontier_figure(comparison: Comparison) -> Figure:
    """Draw accuracy over throughput: filled points for float, hollow for int8. Forms off the frontier are grey."""
    figure = new_figure(6.4, 5)
    axes = figure.add_subplot()
    joined = []
    for number, entry in enumerate(comparison.entries):
        points = [(form.images_per_second, form.top1) for form in entry.forms]
        is_on = [(entry.name, form.name) in comparison.frontier for form in entry.forms]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), ":", color=GREY, linewidth=1, zorder=1)
        colour, marker = series_style(number)
        for form, point, is_best in zip(entry.forms, points, is_on, strict=True):
            color = colour if is_best else GREY
            face = color if form.name == "float" else "white"
            axes.plot(*point, marker, color=color, markerfacecolor=face, markersize=9, zorder=3)
        label = shown(entry.name, WIDTH) + (", stopped" if entry.stopped_after else "")
        axes.plot([], [], marker, color=colour if any(is_on) else GREY, label=label)
        joined += [point for point, is_best in zip(points, is_on, strict=True) if is_best]
    if joined:
        axes.plot(*zip(*sorted(joined), strict=True), "-", color="0.5", linewidth=1, zorder=2, label="frontier")
    for label, face in (("float", "0.5"), ("int8", "white")):
        axes.plot([], [], "o", color="0.5", markerfacecolor=face, label=label)
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=3)
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set(xlabel="images per second, this machine", ylabel="held-out top-1 accuracy (%)")
    axes.margins(0.15)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])  # the margin may be above
    axes.grid(True, alpha=0.25)
    return figure


def _plain_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", which="both", labelsize="small", rotation=30)


def _curves(comparison: Comparison) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the learning curves by name; those of stopped runs end early."""
    return {entry.name + (", stopped" if entry.stopped_after else ""): entry.curve for entry in comparison.entries}
