"""Report of a study: the paper's numbers next to weft's, effects with confidence intervals, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.intervals import interval_text
from weft.pages import COLOURS, Lead, Section, new_figure, series_style, shown, write_page
from weft.study.result import HEADER, Row, StudyResult, cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 34  # characters of a name in a figure
MANY_SEEDS = 5  # with so many, more seeds are no longer suggested
MAX_CURVES = 12  # with more, a figure of curves is unreadable


def write_study_report(result: StudyResult) -> None:
    """Write report.md, report.html and their figures to the directory of a study."""
    study = result.study
    counts = {len(row.top1) for row in result.rows if row.top1} or {result.seeds}
    seeds = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    summary = [
        ("source", study.source),
        ("scale", f"{result.scale}: recipe {study.scales[result.scale].recipe}, {result.data}"),
        ("settings of all variants", ", ".join(f"{key}={value}" for key, value in result.settings.items()) or "none"),
        ("runs", f"{seeds} per variant, seeds from 0; {_hours(result.seconds)} of training in total"),
        *([] if result.teacher is None else [("teacher", f"top-1 {result.teacher:.2f} %")]),
        ("intervals", _intervals(seeds)),
    ]
    failed = [(row.variant, str(seed), reason) for row in result.rows for seed, reason in row.errors]
    sections = [Section("Variants", table=(HEADER, [cells(row) for row in result.rows]))]
    if any(row.effect is not None for row in result.rows):
        figure = {"effects.png": (effects_figure(result.rows), "Effect of each variant here and in the paper")}
        sections.append(Section("Effect of each variant here and in the paper", "", figure))
    if study.x is not None:
        figure = {"lines.png": (lines_figure(result), f"Held-out top-1 accuracy by {study.x}")}
        sections.append(Section(f"Accuracy by {study.x}", "", figure))
    if study.x is None and len(result.curves) <= MAX_CURVES and any(len(curve) > 1 for curve in result.curves.values()):
        figure = {"curves.png": (curves_figure(result.curves), "Held-out top-1 accuracy by epoch")}
        sections.append(Section("Accuracy by epoch", "Held-out images, mean over the seeds.", figure))
    if failed:
        sections.append(Section("Failed runs", table=(("variant", "seed", "reason"), failed)))
    write_page(result.out, study.title, _lead(result), summary, sections)


def _lead(result: StudyResult) -> Lead:
    """Return the claim, and which effects are significant here."""
    sentences = [f"Claim: {result.study.claim}"]
    compared = [row for row in result.rows if row.effect is not None and row.against is not None]
    significant = [row for row in compared if row.verdict.startswith(("higher", "lower"))]
    for row in significant:
        effect = interval_text(row.effect, signed=True)
        sentences.append(f"{row.variant} is {row.verdict}: {effect} points, compared with {row.against}.")
    if others := [row.variant for row in compared if row not in significant]:
        sentences.append(f"No significant difference here: {', '.join(others)}.")
    steps = []
    if others and result.seeds < MANY_SEEDS:
        steps.append(f"Repeat with more seeds, for example --seeds {2 * result.seeds + 1}; finished runs are kept.")
    if any(row.errors for row in result.rows):
        steps.append("Repeat the study to train the failed runs again; their reasons are listed below.")
    return Lead(sentences, steps)


def _intervals(seeds: str) -> str:
    if seeds == "1":
        return (
            "95 %, of effects, over the same held-out images (Agresti and Min); with one seed, the variation between"
            " training runs is not included"
        )
    return f"95 %, by Student's t over {seeds} seeds; effects paired by seed"


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
    names = [shown(row.variant, WIDTH) for row in rows]
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


def lines_figure(result: StudyResult) -> Figure:
    """Draw top-1 accuracy over the axis of the study, one line per group of variants."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    variants = {variant.name: variant for variant in result.study.variants}
    names = list(dict.fromkeys(variants[row.variant].line or "" for row in result.rows))
    for number, name in enumerate(names):
        rows = [row for row in result.rows if (variants[row.variant].line or "") == name and row.mean is not None]
        rows = sorted((row for row in rows if variants[row.variant].at is not None), key=lambda r: _at(variants, r))
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
    were_run = (variants[row.variant] for row in result.rows)
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
    return float(variants[row.variant].at)


def _finite(length: float) -> float:
    return length if np.isfinite(length) else 0.0
