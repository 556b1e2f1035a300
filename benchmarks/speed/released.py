"""Throughput of the released CeiT, weft's CeiT and timm's DeiT-T under equal conditions.

    python benchmarks/speed/released.py CHECKOUT --csv released.csv

CHECKOUT is a checkout of github.com/coeusguo/ceit. Its `ceit_model.py` is imported, so use only code that you trust.
The CeiTs have the same weights. Each side is a separate process; the processes take turns (A B C A B C ...) with the
same threads and the same allocator. Before the measurement, the outputs of weft's network are compared with those of
the released network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

import weft

NAME, PARENT = "ceit_tiny_patch16_224", "deit_tiny_patch16_224"
SIDES = ("released", "weft eager", "weft folded", "timm DeiT-T")
TOLERANCE = 1e-4  # of the largest logit, in float32


def released(checkout: str) -> nn.Module:
    """Return the network of a checkout, with random weights that are the same in every process."""
    sys.path.insert(0, checkout)
    torch.manual_seed(0)
    return importlib.import_module("ceit_model").ceit_tiny_patch16_224(pretrained=False).eval()


def network(side: str, checkout: str) -> nn.Module:
    """Return the network of a side."""
    if side == "timm DeiT-T":
        return timm.create_model(PARENT).eval()
    reference = released(checkout)
    if side == "released":
        return reference
    model = weft.create_model(NAME).eval()
    weft.load_checkpoint(model, reference.state_dict())
    return weft.fold(model) if side == "weft folded" else model


def serve(side: str, checkout: str, batch_size: int, threads: int, keep: bool) -> None:
    """Print the logits, then the seconds of a forward pass for every line of stdin; runs in the process of a side."""
    torch.set_num_threads(threads)
    if keep:
        assert weft.keep_memory()
    model = network(side, checkout)
    images = torch.randn(batch_size, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(images)
        print(json.dumps(logits.flatten().tolist()), flush=True)
        for _ in sys.stdin:
            begun = time.perf_counter()
            model(images)
            print(json.dumps(time.perf_counter() - begun), flush=True)


class Side:
    """Process of a side."""

    def __init__(self, side: str, args: argparse.Namespace, keep: bool) -> None:
        arguments = [sys.executable, __file__, args.checkout, "--side", side, "--batch-size", str(args.batch_size)]
        arguments += ["--threads", str(args.threads), *(["--keep"] * keep)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.logits = torch.tensor(self.read())

    def read(self) -> Any:
        """Return the next value that the process prints."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def turn(self) -> float:
        """Run a forward pass; return its seconds."""
        assert self.process.stdin is not None
        print("turn", file=self.process.stdin, flush=True)
        return self.read()


def compare(args: argparse.Namespace, keep: bool) -> list[dict[str, Any]]:
    """Return a row per side for one allocator."""
    sides = {side: Side(side, args, keep) for side in SIDES}
    expected = sides["released"].logits
    for side in ("weft eager", "weft folded"):
        difference = (sides[side].logits - expected).abs().max() / expected.abs().max()
        assert difference < TOLERANCE, (
            f"{side} differs from the released network by {difference:.1e} of the largest logit"
        )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, process in sides.items():
            process.turn()  # fills the caches again after the turns of the others
            times[side].append(process.turn())
    for process in sides.values():
        process.process.kill()
        process.process.wait()
    seconds = {side: statistics.median(values) for side, values in times.items()}
    return [
        {
            "side": side,
            "allocator": "keep" if keep else "default",
            "batch_size": args.batch_size,
            "images_per_second": round(args.batch_size / seconds[side], 2),
            "to_released": round(seconds["released"] / seconds[side], 3),
            "to_deit": round(seconds["timm DeiT-T"] / seconds[side], 3),
            "rounds": args.rounds,
            "threads": args.threads,
        }
        for side in SIDES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args.side, args.checkout, args.batch_size, args.threads, args.keep)
        return
    rows = [row for keep in (False, True) for row in compare(args, keep)]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
