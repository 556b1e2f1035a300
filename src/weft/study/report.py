"""Report of a study or comparison: conclusions, tables, and figures of effects, curves, and accuracy by speed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.files import write_file
from weft.report.intervals import MAX_HALF_WIDTH, Estimate, interval_text
from weft.report.pages import COLOURS, Lead, Section, new_figure, series_style, shown, write_page
from weft.study.result import FAILED, ExperimentResult, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "0.6"
WIDTH = 34  # characters of a name in a figure
MANY_SEEDS = 5  # with so many, more seeds are no longer suggested
MAX_CURVES = 12  # with more, a figure of curves is unreadable


def write_report(result: ExperimentResult) -> None:
    """Write results.json and report.html to the directory of a study or comparison."""
    content = {key: value for key, value in result.as_dict().items() if key != "out"}  # a path of this machine
    write_file(result.out / "results.json", json.dumps(content, indent=2) + "\n")
    study, rows, tables = result.study, result.rows, result.tables()
    failed = tables.pop(FAILED, None)
    sections = [Section(heading, table=table) for heading, table in tables.items()]
    if result.limits is not None:
        figure = frontier_figure(result), "Top-1 accuracy by throughput"
        sections.insert(0, Section("Accuracy by speed", "On the held-out images, on this machine.", [figure]))
    elif any(row.effect is not None for row in rows):
        heading = "Effect of each variant here and in the paper"
        sections.append(Section(heading, figures=[(effects_figure(rows), heading)]))
    curves = {row.name + (", stopped" if row.stopped_after else ""): row.curve for row in rows if row.curve}
    if study.x is not None:
        figure = lines_figure(result), f"Held-out top-1 accuracy by {study.x}"
        sections.append(Section(f"Accuracy by {study.x}", figures=[figure]))
    elif len(curves) <= MAX_CURVES and any(len(curve) > 1 for curve in curves.values()):
        figure = curves_figure(curves), "Held-out top-1 accuracy by epoch"
        sections.append(Section("Accuracy by epoch", "Held-out images, mean over the seeds.", [figure]))
    if failed is not None:
        sections.append(Section(FAILED, table=failed))
    lead = _lead_of_study(result) if result.limits is None else _lead_of_comparison(result)
    write_page(result.out, study.title, lead, _summary(result), sections)


def _summary(result: ExperimentResult) -> list[tuple[str, str]]:
    """Return name and value of what the report states about the runs."""
    study, limits = result.study, result.limits
    counts = sorted({len(row.top1) for row in result.rows if row.top1} or {result.seeds})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    alone = "with one seed, the variation between training runs is not included"
    if limits is None:
        images, over = "of effects, over the same held-out images (Agresti and Min)", "effects paired by seed"
        settings = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        lines = [
            ("source", study.source),
            ("scale", f"{result.scale}: recipe {study.scales[result.scale].recipe}, {result.data}"),
            ("settings of all variants", settings or "none"),
            ("runs", f"{seeds} per variant, seeds from 0; {_hours(result.seconds)} of training in total"),
        ]
    else:
        seeds, over = str(result.seeds), "differences paired by seed"
        images = "over the held-out images (Wilson), differences on the same images (Agresti and Min)"
        texts = {"{:g} ms latency": limits.latency_ms, "{:g} MB": limits.megabytes}
        bounds = " and ".join(text.format(limit) for text, limit in texts.items() if limit is not None)
        lines = [("data", result.data), ("protocol", result.protocol), ("limits", bounds or "none")]
    method = f"{images}; {alone}" if seeds == "1" else f"by Student's t over {seeds} seeds; {over}"
    return [*lines, ("intervals", f"95 %, {method}"), *(("note", note) for note in result.notes)]


def _lead_of_study(result: ExperimentResult) -> Lead:
    """Return the claim, and which effects are significant here."""
    sentences = [f"Claim: {result.study.claim}"]
    compared = [row for row in result.rows if row.effect is not None and row.against is not None]
    significant = [row for row in compared if row.verdict.startswith(("higher", "lower"))]
    for row in significant:
        effect = interval_text(row.effect, signed=True)
        sentences.append(f"{row.name} is {row.verdict}: {effect} points, compared with {row.against}.")
    if others := [row.name for row in compared if row not in significant]:
        sentences.append(f"No significant difference here: {', '.join(others)}.")
    steps = []
    if others and result.seeds < MANY_SEEDS:
        steps.append(f"Repeat with more seeds, for example --seeds {2 * result.seeds + 1}; finished runs are kept.")
    if result.failed:
        steps.append("Repeat the study to train the failed runs again; their reasons are listed below.")
    return Lead(sentences, steps)


def _lead_of_comparison(result: ExperimentResult) -> Lead:
    """Return the recommendation, and what would make it more certain."""
    best, steps = result.rows[0], list[str]()
    if best.mean is not None and best.mean.is_wide:
        steps.append(
            f"Hold out more images: the interval of {best.name} is wider than {MAX_HALF_WIDTH:g} points to each side,"
            " which is too wide to rank models."
        )
    if result.seeds == 1:
        steps.append("Repeat with --seeds 3 to include the variation between training runs; finished runs are kept.")
    if any(row.stopped_after for row in result.rows):
        steps.append("Raise --budget to train the stopped models to the end.")
    return Lead([result.advice], steps)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"


def _figure(height: float, xlabel: str, ylabel: str = "held-out top-1 accuracy (%)") -> tuple[Figure, Axes]:
    figure = new_figure(6.4, height)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(True, alpha=0.25)
    return figure, axes


def _legend(figure: Figure, columns: int) -> None:
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=columns)


def effects_figure(rows: Sequence[Row]) -> Figure:
    """Draw the effect of each variant with its interval, and the effect in the paper as a hollow diamond."""
    rows = [row for row in rows if row.effect is not None or row.paper_effect is not None]
    bases = {row.against for row in rows}
    base = f"'{shown(str(bases.pop()), WIDTH)}'" if len(bases) == 1 else "the baseline of each"
    figure, axes = _figure(1.5 + 0.4 * len(rows), f"difference of top-1 to {base}, percentage points", "")
    axes.axvline(0, color=GREY, linewidth=1)
    hollow = {"markerfacecolor": "none", "color": COLOURS[1], "markersize": 9}
    for place, row in enumerate(rows):
        if row.effect is not None:
            bars = _bars([row.effect])
            axes.errorbar(row.effect.value, place, xerr=bars, fmt="o", color=COLOURS[0], capsize=4)
        if row.paper_effect is not None:
            axes.plot(row.paper_effect, place, "D", **hollow)
    axes.plot([], [], "o", color=COLOURS[0], label="here, 95 % CI")
    if any(row.paper_effect is not None for row in rows):
        axes.plot([], [], "D", label="paper", **hollow)
    axes.set_yticks(range(len(rows)), labels=[shown(row.name, WIDTH) for row in rows])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    return figure


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of error bars below and above the values; none where an interval is infinite."""
    ends = [(value - low, high - value) for value, low, high in estimates]
    return [[length if math.isfinite(length) else 0.0 for length in side] for side in zip(*ends, strict=True)]


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw the validation top-1 accuracy by epoch, one line per name."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(5, "epoch")
    for number, (name, curve) in enumerate(curves.items()):
        colour, marker = series_style(number)
        style = {"marker": marker, "markevery": max(1, len(curve) // 10), "markersize": 5}
        axes.plot(*zip(*curve, strict=True), color=colour, label=shown(name, WIDTH), **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, 2)
    return figure


def frontier_figure(result: ExperimentResult) -> Figure:
    """Draw accuracy over throughput: filled points for float, hollow for int8. Forms off the frontier are grey."""
    figure, axes = _figure(5, "images per second, this machine")
    joined = list[tuple[float, float]]()
    for number, row in enumerate(result.rows):
        if not row.forms:
            continue
        points = {form.name: (form.images_per_second, form.top1) for form in row.forms}
        best = {name: point for name, point in points.items() if (row.name, name) in result.frontier}
        axes.plot(*zip(*points.values(), strict=True), ":", color=GREY, linewidth=1, zorder=1)
        colour, marker = series_style(number)
        for name, point in points.items():
            color = colour if name in best else GREY
            face = color if name == "float" else "white"
            axes.plot(*point, marker, color=color, markerfacecolor=face, markersize=9, zorder=3)
        label = shown(row.name, WIDTH) + (", stopped" if row.stopped_after else "")
        axes.plot([], [], marker, color=colour if best else GREY, label=label)
        joined += best.values()
    if joined:
        axes.plot(*zip(*sorted(joined), strict=True), "-", color="0.5", linewidth=1, zorder=2, label="frontier")
    for label, face in (("float", "0.5"), ("int8", "white")):
        axes.plot([], [], "o", color="0.5", markerfacecolor=face, label=label)
    _legend(figure, 3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", which="both", labelsize="small", rotation=30)
    axes.margins(0.15)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])  # the margin may be above
    return figure


def lines_figure(result: ExperimentResult) -> Figure:
    """Draw top-1 accuracy over the axis of the study, one line per group of variants."""
    figure, axes = _figure(4.4, shown(result.study.x or "", WIDTH))
    variants = {variant.name: variant for variant in result.study.variants}
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    for variant, mean in ((variants[row.name], row.mean) for row in result.rows):
        points = lines.setdefault(variant.line or "", [])
        if variant.at is not None and mean is not None:
            points.append((variant.at, mean))
    for number, (name, points) in enumerate(lines.items()):
        if points:
            at, means = zip(*sorted(points), strict=True)
            colour, marker = series_style(number)
            style = {"fmt": f"{marker}-", "color": colour, "capsize": 3, "label": shown(name, WIDTH) or None}
            axes.errorbar(at, [mean.value for mean in means], yerr=_bars(means), **style)
    places = sorted({at for row in result.rows if (at := variants[row.name].at) is not None})
    if len(places) > 2 and places[-1] / places[0] >= 10:
        axes.set_xscale("log")
    axes.set_xticks(places, labels=[f"{place:g}" for place in places])
    axes.minorticks_off()
    if any(lines):
        _legend(figure, 2)
    return figure
