"""Compare the training images of weft with those of timm: the same files and augmentation, in turns.

    python benchmarks/data/loader.py PHOTOS SMALL --csv benchmarks/data/loader.csv

PHOTOS and SMALL are folders of JPEGs, of about 500x375 and of 32x32 pixels. A batch is read, decoded, augmented and
normalised, in one process on one thread, or by the worker processes of a loader. `weft_ms` and `timm_ms` are
milliseconds of the processor per image, with workers of the clock; `ratio` is weft's relative to timm's. `bare_ms` is
the time of decoding, cropping, resizing and colours alone, of images in memory, and `overhead` what weft adds to it
until the batch is in 8-bit pixels, which is what a worker process does; normalising, on the device, is in `weft_ms`.
The memory that is freed stays in the process, as under the command `weft`, for both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import simplejpeg
import timm.data
import torch
from PIL import Image
from timm.data import auto_augment
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

from weft.data import ImageDataset, make_loader, train_transform
from weft.data.colour import Picture
from weft.data.decode import read_regular
from weft.data.source import KeyedSource
from weft.data.transforms import posterize_at_least_one_bit
from weft.machine.memory import keep_memory
from weft.machine.processor import processor_class

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 25
RECIPES = {  # name -> settings of weft, and of timm
    "levit_pretrain": (
        dict(rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.25, scale=(0.08, 1.0)),
        dict(auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, re_mode="pixel", scale=(0.08, 1.0), color_jitter=None),
    ),
    "small_folder": (
        dict(rand_augment="rand-m5-mstd0.5-inc1", scale=(0.5, 1.0)),
        dict(auto_augment="rand-m5-mstd0.5-inc1", scale=(0.5, 1.0), color_jitter=None),
    ),
    "default augmentation": (dict(color_jitter=0.2, scale=(0.35, 1.0)), dict(color_jitter=0.2, scale=(0.35, 1.0))),
    "finetune": (dict(scale=(0.35, 1.0)), dict(scale=(0.35, 1.0), color_jitter=None)),
}
SMALL = "images of 32 pixels"


class TimmImages(Dataset):
    """Images of timm's loader: Pillow, timm's transform."""

    def __init__(self, files: list[str], transform: Callable[[Image.Image], Any]):
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with open(self.files[index], "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), 0


def timm_transform(settings: dict[str, Any] | None) -> Any:
    """Return timm's transform, without the level of posterize that Pillow refuses; for small images the usual one."""
    if settings is None:
        shift = [transforms.RandomCrop(32, padding=4, padding_mode="edge"), transforms.RandomHorizontalFlip()]
        return transforms.Compose([*shift, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    whole = timm.data.create_transform(
        224, is_training=True, mean=MEAN, std=STD, interpolation="bicubic", **{"auto_augment": None, **settings}
    )
    for step in whole.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = posterize_at_least_one_bit
    return whole


def consume(batches: Any) -> None:
    """Take all batches."""
    for _ in batches:
        pass


def compared(files: list[str], own: dict[str, Any], other: dict[str, Any] | None, workers: int, rounds: int) -> Any:
    """Return milliseconds per image, by way: weft, timm, and without workers the bare operations and 8-bit batches."""
    size = 32 if other is None else 224
    transform = train_transform(size, MEAN, STD, "bicubic", **own)
    dataset = ImageDataset(KeyedSource(read_regular, ["a"], files, [0] * len(files)), transform)
    weft = make_loader(dataset, BATCH, shuffle=True, workers=workers)
    timms = DataLoader(
        TimmImages(files, timm_transform(other)),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    pixels = [Path(file).read_bytes() for file in files]

    def bare() -> None:
        for data in pixels:
            transform.draw(Picture(simplejpeg.decode_jpeg(data, "RGB")))

    def eight_bit() -> None:
        for keys in weft.batch_sampler:
            dataset.__getitems__(keys)

    ways = {"weft": lambda: consume(weft), "timm": lambda: consume(timms)}
    ways |= {} if workers else {"bare": bare, "eight bit": eight_bit}
    clock = time.perf_counter if workers else time.process_time
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        weft.start_at(number)
        for name, work in list(ways.items())[:: 1 if number % 2 else -1]:  # none is always the second
            start = clock()
            work()
            times[name] += [clock() - start] if number else []  # the first round starts workers and fills caches
    return {name: 1e3 * statistics.median(own) / len(files) for name, own in times.items()}


def main() -> None:
    """Measure all recipes, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("small", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("loader.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    folders = {name: args.photos for name in RECIPES} | {SMALL: args.small}
    rows = []
    for name, folder in folders.items():
        files = sorted(str(file) for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
        files = [file for file in files if Image.open(file).mode == "RGB"]
        own, other = RECIPES.get(name, ({}, None))
        for workers in args.workers:
            ms = compared(files, own, other, workers, args.rounds)
            row = {"processor_class": processor_class(), "augmentation": name, "workers": workers, "images": len(files)}
            row |= {"weft_ms": f"{ms['weft']:.3f}", "timm_ms": f"{ms['timm']:.3f}"}
            row |= {"ratio": f"{ms['weft'] / ms['timm']:.2f}"}
            if "bare" in ms:
                row |= {"bare_ms": f"{ms['bare']:.3f}", "overhead": f"{ms['eight bit'] / ms['bare'] - 1:.2f}"}
            rows.append(row)
            print(*row.values(), flush=True)
    replace_rows(args.csv, rows, ("processor_class", "augmentation", "workers"))


if __name__ == "__main__":
    main()
