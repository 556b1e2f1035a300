"""Measure accuracy by the number of images per class: linear probe, fine-tuning, LoRA, nearest neighbours, scratch.

    python benchmarks/few-images/curves.py PHOTOS --sizes 3 10 --seeds 0 1 2

Each seed draws different training images. The other photos, at least three per class, are the held-out images, so a
small class can have fewer training images. Fine-tuning is measured after its last epoch, so that no method selects an
epoch by the held-out images. All methods except `scratch` start from tf_efficientnet_lite0 (extra `offline`). LoRA
needs the package peft; it adds matrices of rank 8 to the 1x1 convolutions and trains them with the classifier of the
probe. Adds rows to curves.csv, and skips measurements that are in it.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
from neighbours import votes
from torch import nn

from weft.checkpoints.hub import create_model
from weft.inference import embed, evaluate
from weft.runs.directory import read_metrics
from weft.train import train

HERE = Path(__file__).parent
MODEL = "tf_efficientnet_lite0"
FINE_TUNING = {"recipe": "finetune", "model": MODEL}
RANK = 8
METHODS = ("probe", "5 neighbours", "LP-FT", "full fine-tuning", "LoRA", "scratch")


def split(photos: Path, size: int, seed: int, folder: Path) -> int:
    """Copy `size` photos of every class to train/ and the others to val/; return the number of the latter."""
    rng, count = np.random.default_rng(seed), 0
    for directory in sorted(path for path in photos.iterdir() if path.is_dir()):
        files = sorted(directory.iterdir())
        order = rng.permutation(len(files))
        for position, number in enumerate(order):
            part = folder / ("train" if position < min(size, len(files) - 3) else "val") / directory.name
            part.mkdir(parents=True, exist_ok=True)
            copyfile(files[number], part / files[number].name)
            count += part.parent.name == "val"
    return count


def with_lora(folder: Path) -> nn.Module:
    """Return the network with LoRA on its 1x1 convolutions, and a new classifier."""
    from peft import LoraConfig, inject_adapter_in_model

    classes = sum(path.is_dir() for path in (folder / "train").iterdir())
    network: Any = create_model(MODEL, pretrained=True, num_classes=classes)
    names = [
        name for name, part in network.named_modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1)
    ]
    adapted = inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names), network)
    for parameter in adapted.get_classifier().parameters():
        parameter.requires_grad = True
    return adapted


def top1(method: str, folder: Path, out: Path, seed: int) -> float:
    """Train by a method and return its accuracy on the held-out images."""
    common: dict[str, Any] = {"out": out, "seed": seed, "quiet": True, "force": True}
    if method == "5 neighbours":
        known, queries = (embed(MODEL, folder / part, quiet=True) for part in ("train", "val"))
        classes = sorted(path.name for path in (folder / "train").iterdir())
        labels, right = (
            np.array([classes.index(Path(path).parent.name) for path in one.images]) for one in (known, queries)
        )
        predicted = votes(known.features, labels, queries.features, len(classes), 5).argmax(1)
        return 100 * float((predicted == right).mean())
    if method == "probe":
        train(folder, model=MODEL, recipe="probe", **common)
        return evaluate(out, folder, quiet=True).top1
    if method == "LP-FT":
        train(folder, **FINE_TUNING, **common)
    elif method == "full fine-tuning":
        train(folder, **FINE_TUNING, settings={"head_init": "random"}, **common)
    elif method == "LoRA":
        settings = {"head_init": "probe", "train_mode": "eval", "optim.lr": 1e-3, "augment.color_jitter": 0.0}
        train(folder, model=with_lora(folder), epochs=8, batch_size=16, settings=settings, **common)
    else:
        train(folder, from_scratch=True, **common)
    return read_metrics(out / "metrics.csv")[-1].val_top1


def main() -> None:
    """Measure every method, size and seed that is not in curves.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[3, 10])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    table = HERE / "curves.csv"
    rows = (
        list(csv.reader(table.open())) if table.is_file() else [["method", "size", "seed", "top1", "images", "seconds"]]
    )
    for seed in args.seeds:
        for size in args.sizes:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                count = split(args.photos, size, seed, folder / "photos")
                for method in args.methods:
                    key = [method, str(size), str(seed)]
                    if any(row[:3] == key for row in rows):
                        continue
                    start = time.perf_counter()
                    accuracy = top1(method, folder / "photos", folder / "run", seed)
                    seconds = time.perf_counter() - start
                    rows.append([*key, f"{accuracy:.2f}", str(count), f"{seconds:.1f}"])
                    print(*rows[-1], flush=True)
                    with table.open("w", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
