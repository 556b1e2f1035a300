"""Report of a study: the paper's numbers next to weft's, effects with confidence intervals, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weft.study.result import Row, StudyResult
from weft.study.statistics import Estimate
from weft.train.page import COLOURS, DASHES, MARKERS, Table, shown, write_page

WIDTH = 34  # letters of a variant's name in a picture
MAX_CURVES = 12  # with more than this, a picture of curves is a tangle

HEADER = ("variant", "paper %", "paper, effect", "here % (95 %)", "here, effect (95 %)", "says", "parameters", "MACs")


def write_study_report(found: StudyResult) -> None:
    """Writes report.md, report.html and their pictures into the study's directory."""
    study = found.study
    facts = [
        ("claim", study.claim),
        ("source", study.source),
        ("scale", f"{found.scale}: recipe {study.scales[found.scale].recipe}, {found.data}"),
        ("in all variants", ", ".join(f"{key}={value}" for key, value in found.settings.items()) or "nothing"),
        ("runs", f"{found.seeds} per variant, seeds from 0; {_hours(found.seconds)} in all"),
        ("intervals", _how(found.seeds)),
    ]
    failed = [(row.variant, str(seed), reason) for row in found.rows for seed, reason in row.errors]
    tables: list[Table] = [("Variants", HEADER, [cells(row) for row in found.rows])]
    if failed:
        tables.append(("Runs that failed", ("variant", "seed", "why"), failed))
    pictures = {}
    if any(row.effect is not None for row in found.rows):
        pictures["effects.png"] = (effects_figure(found.rows), "Effect of each variant, with the paper's beside")
    if study.x is not None:
        pictures["lines.png"] = (lines_figure(found), f"Held-out top-1 by {study.x}")
    if study.x is None and len(found.curves) <= MAX_CURVES and any(len(curve) > 1 for curve in found.curves.values()):
        pictures["curves.png"] = (curves_figure(found.curves), "Held-out top-1 by epoch, mean over the seeds")
    write_page(found.out, study.title, facts, pictures, tables)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    return (
        row.variant,
        "" if row.paper is None else f"{row.paper:g}",
        "" if row.paper_effect is None else f"{row.paper_effect:+g}",
        interval(row.mean),
        interval(row.effect, signed=True),
        row.verdict,
        f"{row.params:,}" if row.params else "",
        f"{row.macs / 1e6:,.1f}M" if row.macs else "",
    )


def interval(estimate: Estimate | None, *, signed: bool = False) -> str:
    """An estimate as text."""
    if estimate is None:
        return ""
    sign = "+" if signed else ""
    if not np.isfinite(estimate.high):
        return f"{estimate.value:{sign}.2f}"
    return f"{estimate.value:{sign}.2f} ({estimate.low:{sign}.2f} to {estimate.high:{sign}.2f})"


def _how(seeds: int) -> str:
    if seeds == 1:
        return "95 %, by bootstrap over the held-out images; one seed says nothing of another training"
    return f"95 %, by Student's t over {seeds} seeds; effects seed by seed"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"


def effects_figure(rows: Sequence[Row]) -> Figure:
    """Dots with intervals, one line per variant, the paper's effect as a hollow diamond."""
    rows = [row for row in rows if row.effect is not None or row.paper_effect is not None]
    figure = Figure(figsize=(9, 1.4 + 0.45 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="0.6", linewidth=1)
    for place, row in enumerate(rows):
        if row.effect is not None:
            ends = [[row.effect.value - row.effect.low], [row.effect.high - row.effect.value]]
            axes.errorbar(row.effect.value, place, xerr=ends, fmt="o", color=COLOURS[0], capsize=4)
        if row.paper_effect is not None:
            axes.plot(row.paper_effect, place, "D", markerfacecolor="none", color=COLOURS[1], markersize=9)
    axes.plot([], [], "o", color=COLOURS[0], label="here, 95 %")
    if any(row.paper_effect is not None for row in rows):
        axes.plot([], [], "D", markerfacecolor="none", color=COLOURS[1], markersize=9, label="paper")
    names = [shown(row.variant, WIDTH) for row in rows]
    axes.set_yticks(range(len(rows)), labels=names)
    axes.invert_yaxis()
    axes.set_xlabel(f"points of top-1 above {_bases(rows)}")
    axes.grid(True, axis="x", alpha=0.25)
    axes.legend(frameon=False, loc="best")
    return figure


def _bases(rows: Sequence[Row]) -> str:
    bases = {row.against for row in rows}
    return f"'{shown(str(bases.pop()), WIDTH)}'" if len(bases) == 1 else "what each is compared with"


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Held-out top-1 over the epochs, a line for each name."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        if curve:
            epochs, values = zip(*curve, strict=True)
            axes.plot(
                epochs,
                values,
                DASHES[number // len(COLOURS) % len(DASHES)],
                marker=MARKERS[number % len(MARKERS)],
                markevery=max(1, len(epochs) // 10),
                markersize=5,
                color=COLOURS[number % len(COLOURS)],
                label=shown(name, WIDTH),
            )
    axes.set(xlabel="epoch", ylabel="held-out top-1 (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    return figure


def lines_figure(found: StudyResult) -> Figure:
    """Top-1 over what the study varies, one line per kind of variant."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    variants = {variant.name: variant for variant in found.study.variants}
    names = list(dict.fromkeys(variants[row.variant].line or "" for row in found.rows))
    for number, name in enumerate(names):
        rows = [row for row in found.rows if (variants[row.variant].line or "") == name and row.mean is not None]
        rows = sorted((row for row in rows if variants[row.variant].at is not None), key=lambda r: _at(variants, r))
        if not rows:
            continue
        means = [row.mean for row in rows if row.mean is not None]
        values = [mean.value for mean in means]
        below = [_finite(mean.value - mean.low) for mean in means]
        above = [_finite(mean.high - mean.value) for mean in means]
        axes.errorbar(
            [_at(variants, row) for row in rows],
            values,
            yerr=[below, above],
            fmt=f"{MARKERS[number % len(MARKERS)]}-",
            color=COLOURS[number % len(COLOURS)],
            capsize=3,
            label=shown(name, WIDTH) or None,
        )
    were_run = (variants[row.variant] for row in found.rows)
    places = sorted({variant.at for variant in were_run if variant.at is not None})
    if len(places) > 2 and places[-1] / places[0] >= 10:
        axes.set_xscale("log")
    axes.set_xticks(places, labels=[f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=shown(found.study.x or "", WIDTH), ylabel="held-out top-1 (%)")
    axes.grid(True, alpha=0.25)
    if any(names):
        axes.legend(frameon=False)
    return figure


def _at(variants: dict, row: Row) -> float:
    return float(variants[row.variant].at)


def _finite(length: float) -> float:
    return length if np.isfinite(length) else 0.0
