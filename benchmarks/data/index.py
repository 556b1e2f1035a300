"""Starts on a dataset of many files: python benchmarks/data/index.py PHOTOS [--files N] [--classes N] [--shards N]

The files are hard links to the photos, in class folders, so that they are in the page cache. Each start is a process of
its own; the first one knows nothing about the files, the second one knows all of them. With `--generated`, the first
one takes the properties of one photo for those of every file, and reads none: for more files than can be read here.
With `--shards`, the images are in so many tar shards, each a JPEG of 32 pixels, and a process may open 256 files.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from weft.machine.processor import processor_class

START = """
import resource, sys, time
import weft.data.source
from weft.data import open_data
if sys.argv[4] == "shards":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
if sys.argv[2] == "generated":
    info = weft.data.source.image_header(sys.argv[3])
    weft.data.source.image_header = lambda path, **_: info
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
splits = open_data(sys.argv[1], check="header")
seconds = time.perf_counter() - start
for i in range(0, len(splits.train), max(len(splits.train) // 2000, 1)):
    splits.train.read(i)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(splits.train) + len(splits.val), len(splits.classes), f"{seconds:.1f}", f"{peak / 1024:.0f}")
"""
COLUMNS = ("processor_class", "files", "classes", "in", "start", "images", "seconds", "peak_mb")


def link(folder: Path, names: Iterable[str], photos: list[Path]) -> None:
    """Make hard links to photos, one after the other."""
    made = set[str]()
    for i, name in enumerate(names):
        place = f"{folder}/{name}"
        if (parent := os.path.dirname(place)) not in made:
            os.makedirs(parent)
            made.add(parent)
        os.link(photos[i % len(photos)], place)


def write_shards(folder: Path, split: str, names: list[str], number: int) -> None:
    """Write small images in class folders into tar shards."""
    folder.mkdir(exist_ok=True)
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 40, 90)).save(file, "JPEG")
    for shard in range(number):
        with tarfile.open(folder / f"{split}-{shard:06}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for name in names[shard::number]:
                member = tarfile.TarInfo(name)
                member.size = len(file.getvalue())
                archive.addfile(member, io.BytesIO(file.getvalue()))


def main() -> None:
    """Make the files, start twice, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--files", type=int, default=1_280_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder of the file system of PHOTOS (default: a temporary one next to it)"
    )
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    photos = sorted(path for path in args.photos.rglob("*") if path.is_file())
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work or args.photos.parent) as folder:
        data, cache = Path(folder) / "data", Path(folder) / "cache"
        shares = {"train": args.files - args.files // 25, "val": args.files // 25}  # as ImageNet has them
        for split, number in shares.items():
            names = (f"n{i % args.classes:08}/n{i % args.classes:08}_{i}.JPEG" for i in range(number))
            if args.shards:
                write_shards(data, split, list(names), max(args.shards * number // args.files, 1))
            else:
                link(data / split, names, photos)
        time.sleep(3)  # files that changed just before are read again
        for start in ("first", "second"):
            kind = "generated" if args.generated and start == "first" else "read"
            place = "shards" if args.shards else "folders"
            command = [sys.executable, "-c", START, str(data), kind, str(photos[0]), place]
            environment = {**os.environ, "WEFT_CACHE": str(cache)}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            images, classes, seconds, peak = done.stdout.split()
            rows.append(
                (
                    processor_class(),
                    args.files,
                    classes,
                    place if not args.shards else f"{args.shards} shards",
                    f"{start}, {kind}",
                    images,
                    seconds,
                    peak,
                )
            )
            print(*rows[-1], flush=True)
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows] if is_new else rows)


if __name__ == "__main__":
    main()
