"""Speed against cost, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from weft.bench.speed import SpeedRow
from weft.durable import writing
from weft.errors import UsageError

SUFFIXES = (".png", ".svg", ".pdf")
MARKERS = "osD^v<>ph*"


def check_plot(path: str | Path) -> None:
    """Before anything is measured.

    Raises:
        UsageError: the file's name does not say what picture it is.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"A plot is a file that ends in {', '.join(SUFFIXES)}; got {path}.")


def plot_speed(rows: Sequence[SpeedRow], path: str | Path) -> None:
    """Images per second over multiply-adds: one colour per way and number format, one shape per model.

    Args:
        rows: of `speed`; those without multiply-adds, of exports, are left out.
        path: .png, .svg or .pdf; a file that is there is replaced.

    Raises:
        UsageError: another ending.
        StorageError: it cannot be written.
    """
    check_plot(path)
    batch_sizes = sorted({row.batch_size for row in rows})
    figure = Figure(figsize=(4.8 * len(batch_sizes) + 2.4, 4.6), layout="constrained")
    axes = figure.subplots(1, len(batch_sizes), squeeze=False)[0]
    ways = list(dict.fromkeys(f"{row.way} {row.precision}" for row in rows))
    models = list(dict.fromkeys(row.model for row in rows if row.macs))
    colors = {way: mpl.colormaps["tab10"](number % 10) for number, way in enumerate(ways)}
    for place, batch_size in zip(axes, batch_sizes, strict=True):
        for row in rows:
            if row.batch_size == batch_size and row.macs:
                marker = MARKERS[models.index(row.model) % len(MARKERS)]
                color = colors[f"{row.way} {row.precision}"]
                place.scatter(row.macs / 1e9, row.images_per_second, 36, color=color, marker=marker, alpha=0.85)
        place.set(xscale="log", yscale="log", xlabel="multiply-adds of an image, G", title=f"batch {batch_size}")
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(LogFormatter())  # 60, where the default says 6 times 10 to the 1
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(3, 1)))
        place.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel("images per second")
    for way in ways:
        axes[-1].scatter([], [], 36, color=colors[way], label=way)
    for number, model in enumerate(models):
        axes[-1].scatter([], [], 36, color="0.4", marker=MARKERS[number % len(MARKERS)], label=model)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    with writing(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
