"""Compare fp32 and bf16 for weft's own recipes: time of a training step, and accuracy.

    python benchmarks/training/precision.py steps
    python benchmarks/training/precision.py accuracy digits cifar10/train

`steps` writes precision_steps.csv, a row per recipe and network; the precisions take turns. `accuracy` writes
precision_accuracy.csv, a row per dataset, precision and seed: the top-1 accuracy of the last epoch, of the default
recipe (digits) or of four epochs of `small_images` on 10,000 images.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.machine.processor import processor_class
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.recipes import load_recipe
from weft.runs.directory import read_metrics
from weft.train import train
from weft.train.network import build_model
from weft.train.timing import time_step

HERE = Path(__file__).parent
RECIPES = (
    ("digits", "ceit_nano_32"),
    ("small_images", "ceit_nano_32"),
    ("small_images", "cvt_nano_32"),
    ("small_images", "levit_nano_32"),
    ("cifar10", "ceit_nano_32"),
    ("finetune", "tf_efficientnet_lite0"),
    ("finetune", "levit_128s"),
    ("small_folder", "levit_128s"),
)
PRECISIONS = ("fp32", "bf16")


def steps(rounds: int, only: str) -> None:
    """Time a training step of each recipe in both precisions."""
    rows = [row for row in read_csv(HERE / "precision_steps.csv") if row["processor_class"] != processor_class()]
    for name, model in RECIPES:
        if only not in name:
            continue
        recipe = dataclasses.replace(load_recipe(name), model=model, pretrained=False, start_from=None)
        assert isinstance(recipe.batch_size, int)
        seconds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for _ in range(rounds):
            for precision in PRECISIONS:
                runtime = Runtime.of("cpu", precision)
                seconds[precision].append(time_step(recipe, recipe.batch_size, 10, runtime))
        fp32, bf16 = (statistics.median(seconds[precision]) for precision in PRECISIONS)
        row = {
            "recipe": name,
            "model": model,
            "img_size": preprocessing(build_model(recipe, 10))["input_size"][1],
            "batch_size": recipe.batch_size,
            "fp32_ms": f"{1e3 * fp32:.4g}",
            "bf16_ms": f"{1e3 * bf16:.4g}",
            "speedup": f"{fp32 / bf16:.2f}",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "processor_class": processor_class(),
        }
        print(row, flush=True)
        rows.append(row)
        write_csv(HERE / "precision_steps.csv", rows)


def accuracy(sources: list[str], seeds: int, limit: int | None) -> None:
    """Train with both precisions and several seeds."""
    file = HERE / "precision_accuracy.csv"
    names = {source: "digits" if source == "digits" else Path(source).parent.name for source in sources}
    rows = [row for row in read_csv(file) if row["data"] not in names.values()]
    for source in sources:
        more: dict[str, Any] = {"limit": limit}
        if source != "digits":
            more = {"recipe": "small_images", "epochs": 4, "limit": limit or 10_000}
        for seed in range(seeds):
            for precision in PRECISIONS:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "run"
                    result = train(source, precision=precision, seed=seed, out=out, quiet=True, **more)
                    last = read_metrics(out / "metrics.csv")[-1]
                row = {
                    "data": names[source],
                    "precision": precision,
                    "seed": seed,
                    "epochs": result.epochs,
                    "top1": f"{last.val_top1:.2f}",
                    "seconds": f"{result.seconds:.0f}",
                    "processor_class": processor_class(),
                }
                print(row, flush=True)
                rows.append(row)
                write_csv(file, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["steps", "accuracy"])
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="number of images for `accuracy`")
    parser.add_argument("--rounds", type=int, default=5, help="of `steps`")
    parser.add_argument("--only", default="", help="time only the recipes whose name contains this")
    args = parser.parse_args()
    if args.part == "steps":
        steps(args.rounds, args.only)
    else:
        accuracy(args.sources, args.seeds, args.limit)
