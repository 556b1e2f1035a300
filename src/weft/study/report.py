"""Report of a study or comparison: conclusions, tables, and figures of effects, curves, and accuracy by speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.intervals import MAX_HALF_WIDTH, interval_text
from weft.pages import COLOURS, Lead, Section, new_figure, series_style, shown, write_page
from weft.study.result import ExperimentResult, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "0.6"
WIDTH = 34  # characters of a name in a figure
MANY_SEEDS = 5  # with so many, more seeds are no longer suggested
MAX_CURVES = 12  # with more, a figure of curves is unreadable


def write_report(result: ExperimentResult) -> None:
    """Write report.md, report.html and their figures to the directory of a study or comparison."""
    study, is_comparison = result.study, result.limits is not None
    summary = _of_comparison(result) if is_comparison else _of_study(result)
    sections = [Section("Training" if is_comparison else "Variants", table=result.table())]
    if is_comparison:
        figure = {"frontier.png": (frontier_figure(result), "Top-1 accuracy by throughput")}
        sections.insert(0, Section("Accuracy by speed", "On the held-out images, on this machine.", figure))
        sections.append(Section("Inference on this machine", table=result.deployed()))
    elif any(row.effect is not None for row in result.rows):
        figure = {"effects.png": (effects_figure(result.rows), "Effect of each variant here and in the paper")}
        sections.append(Section("Effect of each variant here and in the paper", "", figure))
    if study.x is not None:
        figure = {"lines.png": (lines_figure(result), f"Held-out top-1 accuracy by {study.x}")}
        sections.append(Section(f"Accuracy by {study.x}", "", figure))
    curves = {row.name + (", stopped" if row.stopped_after else ""): row.curve for row in result.rows if row.curve}
    if study.x is None and len(curves) <= MAX_CURVES and any(len(curve) > 1 for curve in curves.values()):
        figure = {"curves.png": (curves_figure(curves), "Held-out top-1 accuracy by epoch")}
        sections.append(Section("Accuracy by epoch", "Held-out images, mean over the seeds.", figure))
    if result.failed:
        rows = [(name, str(seed), reason) for name, seed, reason in result.failed]
        sections.append(
            Section("Failed runs", table=(("model" if is_comparison else "variant", "seed", "reason"), rows))
        )
    lead = _lead_of_comparison(result) if is_comparison else _lead_of_study(result)
    write_page(result.out, study.title, lead, summary, sections)


def _of_study(result: ExperimentResult) -> list[tuple[str, str]]:
    counts = sorted({len(row.top1) for row in result.rows if row.top1} or {result.seeds})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [
        ("source", result.study.source),
        ("scale", f"{result.scale}: recipe {result.study.scales[result.scale].recipe}, {result.data}"),
        ("settings of all variants", ", ".join(f"{key}={value}" for key, value in result.settings.items()) or "none"),
        ("runs", f"{seeds} per variant, seeds from 0; {_hours(result.seconds)} of training in total"),
        (
            "intervals",
            "95 %, of effects, over the same held-out images (Agresti and Min); with one seed, the variation between"
            " training runs is not included"
            if seeds == "1"
            else f"95 %, by Student's t over {seeds} seeds; effects paired by seed",
        ),
    ]


def _of_comparison(result: ExperimentResult) -> list[tuple[str, str]]:
    assert result.limits is not None
    texts = {"{:g} ms latency": result.limits.latency_ms, "{:g} MB": result.limits.megabytes}
    limits = [text.format(limit) for text, limit in texts.items() if limit is not None]
    return [
        ("data", result.data),
        ("protocol", result.protocol),
        ("limits", " and ".join(limits) or "none"),
        (
            "intervals",
            "95 %, over the held-out images (Wilson), differences on the same images (Agresti and Min); with one seed,"
            " the variation between training runs is not included"
            if result.seeds == 1
            else f"95 %, by Student's t over {result.seeds} seeds; differences paired by seed",
        ),
        *(("note", note) for note in result.notes),
    ]


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


def effects_figure(rows: Sequence[Row]) -> Figure:
    """Draw the effect of each variant with its interval, and the effect in the paper as a hollow diamond."""
    rows = [row for row in rows if row.effect is not None or row.paper_effect is not None]
    figure = new_figure(6.4, 1.5 + 0.4 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color="0.6", linewidth=1)
    for place, row in enumerate(rows):
        if row.effect is not None:
            ends = [[row.effect.value - row.effect.low], [row.effect.high - row.effect.value]]
            axes.errorbar(row.effect.value, place, xerr=ends, fmt="o", color=COLOURS[0], capsize=4)
        if row.paper_effect is not None:
            axes.plot(row.paper_effect, place, "D", markerfacecolor="none", color=COLOURS[1], markersize=9)
    axes.plot([], [], "o", color=COLOURS[0], label="here, 95 % CI")
    if any(row.paper_effect is not None for row in rows):
        axes.plot([], [], "D", markerfacecolor="none", color=COLOURS[1], markersize=9, label="paper")
    names = [shown(row.name, WIDTH) for row in rows]
    axes.set_yticks(range(len(rows)), labels=names)
    axes.invert_yaxis()
    axes.set_xlabel(f"difference of top-1 to {_bases(rows)}, percentage points")
    axes.grid(True, axis="x", alpha=0.25)
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    return figure


def _bases(rows: Sequence[Row]) -> str:
    bases = {row.against for row in rows}
    return f"'{shown(str(bases.pop()), WIDTH)}'" if len(bases) == 1 else "the baseline of each"


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw the validation top-1 accuracy by epoch, one line per name."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6.4, 5)
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        if curve:
            epochs, values = zip(*curve, strict=True)
            colour, marker = series_style(number)
            axes.plot(
                epochs,
                values,
                marker=marker,
                markevery=max(1, len(epochs) // 10),
                markersize=5,
                color=colour,
                label=shown(name, WIDTH),
            )
    axes.set(xlabel="epoch", ylabel="held-out top-1 accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, alpha=0.25)
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def frontier_figure(result: ExperimentResult) -> Figure:
    """Draw accuracy over throughput: filled points for float, hollow for int8. Forms off the frontier are grey."""
    figure = new_figure(6.4, 5)
    axes = figure.add_subplot()
    joined = []
    for number, row in enumerate(result.rows):
        points = [(form.images_per_second, form.top1) for form in row.forms]
        is_on = [(row.name, form.name) in result.frontier for form in row.forms]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), ":", color=GREY, linewidth=1, zorder=1)
        colour, marker = series_style(number)
        for form, point, is_best in zip(row.forms, points, is_on, strict=True):
            color = colour if is_best else GREY
            face = color if form.name == "float" else "white"
            axes.plot(*point, marker, color=color, markerfacecolor=face, markersize=9, zorder=3)
        label = shown(row.name, WIDTH) + (", stopped" if row.stopped_after else "")
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


def lines_figure(result: ExperimentResult) -> Figure:
    """Draw top-1 accuracy over the axis of the study, one line per group of variants."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    variants = {variant.name: variant for variant in result.study.variants}
    names = list(dict.fromkeys(variants[row.name].line or "" for row in result.rows))
    for number, name in enumerate(names):
        rows = [row for row in result.rows if (variants[row.name].line or "") == name and row.mean is not None]
        rows = sorted((row for row in rows if variants[row.name].at is not None), key=lambda r: _at(variants, r))
        if not rows:
            continue
        means = [row.mean for row in rows if row.mean is not None]
        values = [mean.value for mean in means]
        below = [_finite(mean.value - mean.low) for mean in means]
        above = [_finite(mean.high - mean.value) for mean in means]
        colour, marker = series_style(number)
        axes.errorbar(
            [_at(variants, row) for row in rows],
            values,
            yerr=[below, above],
            fmt=f"{marker}-",
            color=colour,
            capsize=3,
            label=shown(name, WIDTH) or None,
        )
    were_run = (variants[row.name] for row in result.rows)
    places = sorted({variant.at for variant in were_run if variant.at is not None})
    if len(places) > 2 and places[-1] / places[0] >= 10:
        axes.set_xscale("log")
    axes.set_xticks(places, labels=[f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=shown(result.study.x or "", WIDTH), ylabel="held-out top-1 accuracy (%)")
    axes.grid(True, alpha=0.25)
    if any(names):
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return figure


def _at(variants: dict, row: Row) -> float:
    return float(variants[row.name].at)


def _finite(length: float) -> float:
    return length if np.isfinite(length) else 0.0
