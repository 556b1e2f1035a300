"""Plot throughput against multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.bench.speed import SpeedRow
from weft.errors import UsageError
from weft.files import writing

SUFFIXES = (".png", ".svg", ".pdf")
MARKERS = "osD^v<>ph*"


def check_plot(path: str | Path) -> None:
    """Check the file name of a plot, before the measurement.

    Raises:
        UsageError: the name does not end in one of SUFFIXES.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"The name of a plot must end in {', '.join(SUFFIXES)}; got {path}.")


def plot_speed(rows: Sequence[SpeedRow], path: str | Path) -> None:
    """Plot images per second against multiply-adds: one colour per way and precision, one marker per model.

    Args:
        rows: results of `speed`; exports, whose multiply-adds are not known, are left out.
        path: .png, .svg or .pdf; an existing file is replaced.

    Raises:
        UsageError: another suffix, or only exports.
        StorageError: the file cannot be written.
    """
    import matplotlib as mpl  # here: the tables of a measurement are written without it
    from matplotlib.figure import Figure

    check_plot(path)
    rows = [row for row in rows if row.macs]
    if not rows:
        raise UsageError("A plot needs multiply-adds, which are not known for exports; also measure a model or a run.")
    panels = _panels(rows)
    figure = Figure(figsize=(4.8 * len(panels) + 2.4, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    ways = list(dict.fromkeys(f"{row.way} {row.precision}" for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    colors = {way: mpl.colormaps["tab20"](number % 20) for number, way in enumerate(ways)}
    for ax, panel in zip(axes, panels, strict=True):
        for row in panel:
            marker = MARKERS[models.index(row.model) % len(MARKERS)]
            color = colors[f"{row.way} {row.precision}"]
            ax.scatter((row.macs or 0) / 1e9, row.images_per_second, 36, color=color, marker=marker, alpha=0.85)
        sizes = {row.batch_size for row in panel}
        title = f"batch size {sizes.pop()}" if len(sizes) == 1 else "best batch size"
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
    with writing(Path(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _tick_label(value: float, _: int | None = None) -> str:
    """Return the label of a tick on a logarithmic axis; empty for ticks that do not begin with 1, 2, 3 or 5."""
    text = f"{value:g}"
    return text if text.strip("0.")[:1] in ("1", "2", "3", "5") else ""


def _panels(rows: Sequence[SpeedRow]) -> list[list[SpeedRow]]:
    """Return the rows by requested batch size; each way of each model is in each panel once."""
    panels: list[list[SpeedRow]] = []
    seen: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.model, row.way, row.precision)
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(panels):
            panels.append([])
        panels[number].append(row)
    return panels
