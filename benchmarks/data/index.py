"""Starts on a dataset of many files: python benchmarks/data/index.py PHOTOS [--files N] [--classes N] [--work DIR]

The files are hard links to the photos, in class folders, so that they are in the page cache. Each start is a process of
its own; the first one knows nothing about the files, the second one knows all of them. With `--generated`, the first
one takes the properties of one photo for those of every file, and reads none: for more files than can be read here.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START = """
import resource, sys, time
import weft.data.source
from weft.data import open_data
if sys.argv[2] == "generated":
    info = weft.data.source.image_header(sys.argv[3])
    weft.data.source.image_header = lambda path, **_: info
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
splits = open_data(sys.argv[1], check="header")
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(splits.train) + len(splits.val), len(splits.classes), f"{seconds:.1f}", f"{peak / 1024:.0f}")
"""
COLUMNS = ("processor_class", "files", "classes", "split", "start", "images", "seconds", "peak_mb")


def main() -> None:
    """Make the files, start twice, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--files", type=int, default=1_280_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--generated", action="store_true")
    parser.add_argument(
        "--work", type=Path, help="folder of the file system of PHOTOS (default: a temporary one next to it)"
    )
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    from weft.machine.processor import processor_class

    photos = sorted(path for path in args.photos.rglob("*") if path.is_file())
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work or args.photos.parent) as folder:
        data, cache = Path(folder) / "data", Path(folder) / "cache"
        shares = {"train": args.files - args.files // 25, "val": args.files // 25}  # as ImageNet has them
        for split, number in shares.items():
            for i in range(number):
                name = f"n{i % args.classes:08}"
                place = data / split / name
                if i < args.classes:
                    place.mkdir(parents=True)
                os.link(photos[i % len(photos)], place / f"{name}_{i}.JPEG")
        time.sleep(3)  # files that changed just before are read again
        for start in ("first", "second"):
            kind = "generated" if args.generated and start == "first" else "read"
            command = [sys.executable, "-c", START, str(data), kind, str(photos[0])]
            environment = {**os.environ, "WEFT_CACHE": str(cache)}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            images, classes, seconds, peak = done.stdout.split()
            rows.append(
                (processor_class(), args.files, classes, "train, val", f"{start}, {kind}", images, seconds, peak)
            )
            print(*rows[-1], flush=True)
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows] if is_new else rows)


if __name__ == "__main__":
    main()
