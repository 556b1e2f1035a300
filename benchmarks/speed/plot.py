"""Plot throughput against multiply-adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]
MARKERS = "osD^v<>ph*"


def plot_speed(rows: Sequence[Row], path: Path) -> None:
    """Plot images per second against multiply-adds: one colour per way and precision, one marker per model.

    Args:
        rows: of figures.csv, of one allocator and number of threads.
        path: of the image; an existing file is replaced.
    """
    import matplotlib as mpl  # here: the tables of a measurement are written without it
    from matplotlib.figure import Figure

    panels = _panels(rows)
    figure = Figure(figsize=(4.8 * len(panels) + 2.4, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    ways = list(dict.fromkeys(f"{row['way']} {row['precision']}" for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    colors = {way: mpl.colormaps["tab20"](number % 20) for number, way in enumerate(ways)}
    for ax, (batch_size, panel) in zip(axes, panels.items(), strict=True):
        for row in panel:
            marker = MARKERS[models.index(row["model"]) % len(MARKERS)]
            color = colors[f"{row['way']} {row['precision']}"]
            place = float(row["macs"]) / 1e9, float(row["images_per_second"])
            ax.scatter(*place, 36, color=color, marker=marker, alpha=0.85)
        title = f"batch size {batch_size}"
        ax.set(xscale="log", yscale="log", xlabel="multiply-adds per image, G", title=title)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(_tick_label)  # 0.3 instead of 3 x 10^-1
            axis.set_minor_formatter(_tick_label)
        ax.grid(True, which="both", alpha=0.25)
    axes[0].set_ylabel("images per second")
    for way in ways:
        axes[-1].scatter([], [], 36, color=colors[way], label=way)
    for number, model in enumerate(models):
        axes[-1].scatter([], [], 36, color="0.4", marker=MARKERS[number % len(MARKERS)], label=model)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def _tick_label(value: float, _: int | None = None) -> str:
    """Return the label of a tick on a logarithmic axis; empty for ticks that do not begin with 1, 2, 3 or 5."""
    text = f"{value:g}"
    return text if text.strip("0.")[:1] in ("1", "2", "3", "5") else ""


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by batch size."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row["batch_size"], []).append(row)
    return panels
