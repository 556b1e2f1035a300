"""Plot throughput against multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

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
        UsageError: another ending, or exports alone.
        StorageError: it cannot be written.
    """
    check_plot(path)
    rows = [row for row in rows if row.macs]
    if not rows:
        raise UsageError(
            "A plot is of speed against multiply-adds, which exports do not tell; name a model or a run, too."
        )
    panels = _panels(rows)
    figure = Figure(figsize=(4.8 * len(panels) + 2.4, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    ways = list(dict.fromkeys(f"{row.way} {row.precision}" for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    colors = {way: mpl.colormaps["tab20"](number % 20) for number, way in enumerate(ways)}
    for place, panel in zip(axes, panels, strict=True):
        for row in panel:
            marker = MARKERS[models.index(row.model) % len(MARKERS)]
            color = colors[f"{row.way} {row.precision}"]
            place.scatter((row.macs or 0) / 1e9, row.images_per_second, 36, color=color, marker=marker, alpha=0.85)
        sizes = {row.batch_size for row in panel}
        title = f"batch {sizes.pop()}" if len(sizes) == 1 else "best batch"
        place.set(xscale="log", yscale="log", xlabel="multiply-adds of an image, G", title=title)
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(_plainly)  # 0.3, where the default says 3 times 10 to the -1
            axis.set_minor_formatter(_plainly)
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


def _plainly(value: float, _: int | None = None) -> str:
    """A number on a logarithmic axis: those that begin with 1, 2, 3 or 5, which leave each other room."""
    text = f"{value:g}"
    return text if text.strip("0.")[:1] in ("1", "2", "3", "5") else ""


def _panels(rows: Sequence[SpeedRow]) -> list[list[SpeedRow]]:
    """One for every batch size that was asked for: each way of each model stands in each once."""
    panels: list[list[SpeedRow]] = []
    seen: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.model, row.way, row.precision)
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(panels):
            panels.append([])
        panels[number].append(row)
    return panels
