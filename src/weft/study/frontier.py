"""Report of a comparison: frontier of accuracy and speed, learning curves, tables."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft.study.outcome import Comparison, Entry
from weft.study.report import curves_figure, interval
from weft.train.page import COLOURS, MARKERS, Table, shown, write_page
from weft.train.progress import clock

GREY = "0.6"
WIDTH = 28  # letters of a name in a picture
LEAST_CHANCE = 1e-6  # smaller ones say no more

TRAINED = (
    *("model", "started from", "top-1 % (95 %)", "to the best (95 %)", "McNemar p", "says"),
    *("parameters", "MACs", "trained in", "peak"),
)
USED = ("model", "form", "fastest as", "top-1 %", "one image, ms", "images/s", "MB", "frontier")


def write_comparison(found: Comparison) -> None:
    """Writes report.md, report.html and their pictures into the comparison's directory."""
    facts = [
        ("which to take", found.advice),
        ("data", found.data),
        ("protocol", found.protocol),
        ("limits", _limits(found)),
        ("intervals", _how(found.seeds)),
        *(("note", note) for note in found.notes),
    ]
    failed = [(entry.name, str(entry.error)) for entry in found.entries if entry.error is not None]
    tables: list[Table] = [
        ("Trained", TRAINED, [trained_cells(entry) for entry in found.entries if entry.error is None]),
        ("Used, on this machine", USED, used_rows(found)),
    ]
    if failed:
        tables.append(("Could not be trained", ("model", "why"), [tuple(row) for row in failed]))
    pictures = {"frontier.png": (frontier_figure(found), "Top-1 against images per second")}
    if any(len(entry.curve) > 1 for entry in found.entries):
        pictures["curves.png"] = (curves_figure(_curves(found)), "Held-out top-1 by epoch")
    write_page(found.out, f"Which model for {found.data}", facts, pictures, tables)


def trained_cells(entry: Entry) -> tuple[str, ...]:
    """A row of the first table."""
    stopped = "" if entry.stopped_after is None else f"stopped after epoch {entry.stopped_after}"
    if entry.to_best is None:
        says = "the best"
    else:
        says = "worse than the best" if entry.is_told_apart else "no difference shown"
    return (
        f"{entry.name} ({entry.model})" if entry.name != entry.model else entry.name,
        entry.weights or "scratch",
        interval(entry.accuracy),
        interval(entry.to_best, signed=True),
        _chance(entry.p_value),
        stopped or says,
        f"{entry.params:,}",
        f"{entry.macs / 1e6:,.0f}M",
        clock(entry.seconds),
        f"{entry.peak_mib:,} MiB",
    )


def _chance(p_value: float | None) -> str:
    if p_value is None:
        return ""
    return f"{p_value:.2g}" if p_value >= LEAST_CHANCE else f"< {LEAST_CHANCE:g}"


def used_rows(found: Comparison) -> list[tuple[str, ...]]:
    """The second table."""
    rows = []
    for entry in found.entries:
        for form in entry.forms:
            is_allowed = found.limits.allows(form)
            on_it = (entry.name, form.name) in found.frontier
            rows.append(
                (
                    entry.name,
                    form.name,
                    form.way,
                    f"{form.top1:.2f}",
                    f"{form.latency_ms:.2f}",
                    f"{form.images_per_second:,.0f}",
                    f"{form.megabytes:.1f}",
                    "yes" if on_it else "" if is_allowed else "beyond the limits",
                )
            )
    return rows


def _limits(found: Comparison) -> str:
    words = []
    if found.limits.latency_ms is not None:
        words.append(f"{found.limits.latency_ms:g} ms for one image")
    if found.limits.megabytes is not None:
        words.append(f"{found.limits.megabytes:g} MB")
    return " and ".join(words) or "none"


def _how(seeds: int) -> str:
    if seeds == 1:
        return (
            "95 %, by bootstrap over the held-out images, differences on the same images; one seed: another training"
            " may end elsewhere"
        )
    return f"95 %, by Student's t over {seeds} seeds; differences seed by seed"


def frontier_figure(found: Comparison) -> Figure:
    """A pair of points per model, filled for float and hollow for int8; those on the frontier joined. What another
    beats, exceeds the limits or was stopped is grey."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    joined = []
    for number, entry in enumerate(found.entries):
        points = [(form.images_per_second, form.top1) for form in entry.forms]
        is_on = [(entry.name, form.name) in found.frontier for form in entry.forms]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), ":", color=GREY, linewidth=1, zorder=1)
        for form, point, is_best in zip(entry.forms, points, is_on, strict=True):
            color = COLOURS[number % len(COLOURS)] if is_best else GREY
            face = color if form.name == "float" else "white"
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(*point, marker, color=color, markerfacecolor=face, markersize=9, zorder=3)
        axes.annotate(
            shown(entry.name, WIDTH) + (", stopped" if entry.stopped_after else ""),
            max(points),
            xytext=(8, 6),
            textcoords="offset points",
            color="0.1" if any(is_on) else "0.5",
        )
        joined += [point for point, is_best in zip(points, is_on, strict=True) if is_best]
    if joined:
        axes.plot(*zip(*sorted(joined), strict=True), "-", color="0.3", linewidth=1, zorder=2, label="frontier")
    for label, face in (("float", "0.4"), ("int8", "white")):
        axes.plot([], [], "o", color="0.4", markerfacecolor=face, label=label)
    axes.legend(frameon=False, loc="best")
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set(xlabel="images per second, this machine", ylabel="held-out top-1 (%)")
    axes.margins(0.15)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= min(high, 100)])  # above are names alone
    axes.grid(True, alpha=0.25)
    return figure


def _plain_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", which="both", labelsize="small", rotation=30)


def _curves(found: Comparison) -> dict[str, tuple[tuple[int, float], ...]]:
    """Where one ends early, its run was stopped."""
    return {entry.name + (", stopped" if entry.stopped_after else ""): entry.curve for entry in found.entries}
