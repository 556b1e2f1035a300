"""How time and memory grow with the size of the image and with the batch.

    python benchmarks/speed/growth.py --out benchmarks/speed

Every point is a process of its own: the folded network answers three times, and the peak of the process's memory while
it does, less what it held before, is what answering takes (Linux). Writes growth.csv and growth.png. `products` is the
same network with attention as plain matrix products, which keep all scores: what fused attention saves.
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

from weft.bench.records import write_csv

MODELS = ("ceit_tiny_patch16_224", "cvt_13", "levit_256")
SIZES = (224, 384, 512, 768, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)


def point(name: str, size: int, batch_size: int, attention: str) -> dict[str, Any]:
    """One line, measured in this process."""
    import torch

    import weft
    from weft.layers import attention as layer
    from weft.memory import release_memory

    if attention == "products":
        layer._products_are_faster = lambda q, k: True
    model = weft.fold(weft.create_model(name, img_size=size).eval())
    images = torch.randn(batch_size, 3, size, size)
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
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


def _kib(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    figure = Figure(figsize=(10, 7), layout="constrained")
    for column, (key, word) in enumerate((("img_size", "side of the image, pixels"), ("batch_size", "batch"))):
        other, usual = ("batch_size", 1) if key == "img_size" else ("img_size", SIZES[0])
        for line, (value, label) in enumerate((("seconds", "seconds"), ("mib", "MiB for answering"))):
            axes = figure.add_subplot(2, 2, 2 * line + column + 1)
            for name in MODELS:
                for attention, style in (("fused", "-"), ("products", ":")):
                    chosen = [
                        row
                        for row in rows
                        if row["model"] == name and row["attention"] == attention and int(row[other]) == usual
                    ]
                    if len(chosen) > 1:
                        places = [int(row[key]) for row in chosen]
                        heights = [float(row[value]) for row in chosen]
                        color = f"C{MODELS.index(name)}"
                        axes.plot(places, heights, style, marker="o", color=color, label=f"{name}, {attention}")
            axes.set(xscale="log", yscale="log", xlabel=word, ylabel=label)
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
    parser.add_argument("--point", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        name, size, batch_size, attention = args.point
        print(json.dumps(point(name, int(size), int(batch_size), attention)))
        return
    places = [(size, 1) for size in SIZES] + [(SIZES[0], count) for count in BATCHES[1:]]
    tasks = [(name, *place, "fused") for name in MODELS[:2] for place in places]
    tasks += [(name, size, 1, "products") for name in MODELS[:2] for size in SIZES]
    tasks += [(MODELS[2], *place, "products") for place in places]  # LeViT's always are
    rows = []
    for task in tasks:
        command = [sys.executable, __file__, "--out", str(args.out), "--point", *map(str, task)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    write_csv(args.out / "growth.csv", rows)
    plot(rows, args.out / "growth.png")


if __name__ == "__main__":
    main()
