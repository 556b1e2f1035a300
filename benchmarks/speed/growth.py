"""Inference time and memory by image size and by batch size.

    python benchmarks/speed/growth.py --out benchmarks/speed

Every point is a separate process that runs the folded network three times. Its memory is the peak of the process during
inference minus its memory before (Linux). Writes growth.csv and growth.png. The rows `plain` are the same network
with plain matrix multiplication in place of fused attention, which stores all attention scores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

from weft.machine.processor import processor_class

MODELS = ("ceit_tiny_patch16_224", "cvt_13", "levit_256")
SIZES = (224, 384, 512, 768, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)


def point(name: str, size: int, batch_size: int, attention: str) -> dict[str, Any]:
    """Measure a point in this process; return its row."""
    import torch

    import weft
    from weft.layers import attention as layer
    from weft.machine.memory import release_memory

    if attention == "plain":
        layer._is_plain_faster = lambda q, k: True
    model = weft.fold(weft.create_model(name, img_size=size).eval())
    images = torch.randn(batch_size, 3, size, size)
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, seconds = _kib("VmRSS"), []
    with torch.inference_mode():
        for _ in range(3):
            begun = time.perf_counter()
            model(images)
            seconds.append(time.perf_counter() - begun)
    return {
        "model": name,
        "attention": attention,
        "img_size": size,
        "batch_size": batch_size,
        "seconds": f"{sorted(seconds)[1]:.4g}",
        "mib": f"{(_kib('VmHWM') - before) / 1024:.0f}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _kib(key: str) -> int:
    """Return a value of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw seconds and memory against image size and batch size."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    for column, (key, x_label) in enumerate((("img_size", "image size, pixels"), ("batch_size", "batch size"))):
        other, default = ("batch_size", 1) if key == "img_size" else ("img_size", SIZES[0])
        for line, (value, y_label) in enumerate((("seconds", "seconds"), ("mib", "memory of inference, MiB"))):
            axes = figure.add_subplot(2, 2, 2 * line + column + 1)
            for name in MODELS:
                for attention, style in (("fused", "-"), ("plain", ":")):
                    chosen = [
                        row
                        for row in rows
                        if row["model"] == name and row["attention"] == attention and int(row[other]) == default
                    ]
                    if len(chosen) > 1:
                        x = [int(row[key]) for row in chosen]
                        y = [float(row[value]) for row in chosen]
                        color = f"C{MODELS.index(name)}"
                        axes.plot(x, y, style, marker="o", color=color, label=f"{name}, {attention}")
            axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
            axes.set_xticks(
                SIZES if key == "img_size" else BATCHES,
                labels=[str(n) for n in (SIZES if key == "img_size" else BATCHES)],
            )
            axes.minorticks_off()
            axes.grid(True, alpha=0.25)
            if line == column == 0:
                axes.legend(fontsize="small", frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="number of points (default: all)")
    parser.add_argument("--point", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        name, size, batch_size, attention = args.point
        print(json.dumps(point(name, int(size), int(batch_size), attention)))
        return
    shapes = [(size, 1) for size in SIZES] + [(SIZES[0], count) for count in BATCHES[1:]]
    tasks = [(name, *shape, "fused") for name in MODELS[:2] for shape in shapes]
    tasks += [(name, size, 1, "plain") for name in MODELS[:2] for size in SIZES]
    tasks += [(MODELS[2], *shape, "plain") for shape in shapes]  # LeViT has no fused attention
    rows = []
    for task in tasks[: args.limit]:
        command = [sys.executable, __file__, "--out", str(args.out), "--point", *map(str, task)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row | {"processor_class": processor_class()})
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    write_csv(args.out / "growth.csv", rows)
    plot(rows, args.out / "growth.png")


if __name__ == "__main__":
    main()
