"""Memory while a dataset of many images is opened: python benchmarks/data/memory.py [--images N] [--out FILE]

The images are a list of names as those of ImageNet, all with the bytes of one small PNG and an ending of their own, so
that no disk takes part and no two are equal. Peak and rest are of this process's resident memory, less that before.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import resource
import sys
from pathlib import Path

import psutil
from PIL import Image

from weft.data import open as opening
from weft.data import open_data
from weft.data.inventory import Inventory

CLASSES = 1000
COLUMNS = ("images", "peak_mb", "after_mb", "peak_bytes_per_image", "after_bytes_per_image")


def main() -> None:
    """Open the list once, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_300_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    data = file.getvalue()

    def listed() -> Inventory:
        classes = [f"n{number:08}" for number in range(CLASSES)]
        inventory = Inventory("many", lambda key: data + key.encode(), {"": classes})
        for i in range(args.images):
            inventory.add(f"n{i % CLASSES:08}/n{i % CLASSES:08}_{i:08}.JPEG", f"n{i % CLASSES:08}")
        return inventory

    opening.open_digits = listed  # type: ignore[assignment]
    gc.collect()
    before = psutil.Process().memory_info().rss
    splits = open_data("digits")
    gc.collect()
    after = psutil.Process().memory_info().rss - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) - before
    assert len(splits.train) + len(splits.val) == args.images
    row = (args.images, *(f"{x / 1e6:.0f}" for x in (peak, after)), *(f"{x / args.images:.0f}" for x in (peak, after)))
    with args.out.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, row])
    print(*row)


if __name__ == "__main__":
    main()
