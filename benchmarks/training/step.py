"""One step of training, ours beside its peer: forward, cross-entropy, backward, AdamW.

    python benchmarks/training/step.py --pairs cvt levit ceit --modes eager --precisions fp32 bf16 --csv results.csv

Both sides of a pair run in turns within one process (A B A B ...), on the same random pictures, with the same fused
optimiser, so that a busy machine is busy for both. Told are the median of either side's images per second and the ratio
of the medians; memory is the high-water mark of a child process that does three steps of one side alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Logits(nn.Module):
    """transformers' models answer with an object; this is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def ours(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import weft

        return weft.create_model(name)

    return build


def timms(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name)

    return build


def transformers_cvt() -> nn.Module:
    from transformers import CvtConfig, CvtForImageClassification

    return Logits(CvtForImageClassification(CvtConfig(num_labels=1000)))  # the default configuration is CvT-13


PAIRS: dict[str, tuple[tuple[str, Callable[[], nn.Module]], tuple[str, Callable[[], nn.Module]]]] = {
    "cvt": (("weft cvt_13", ours("cvt_13")), ("transformers CvT-13", transformers_cvt)),
    "levit": (("weft levit_256", ours("levit_256")), ("timm levit_256", timms("levit_256"))),
    "ceit": (
        ("weft ceit_tiny_patch16_224", ours("ceit_tiny_patch16_224")),
        ("timm deit_tiny_patch16_224", timms("deit_tiny_patch16_224")),
    ),
}


class Side:
    """One network in training."""

    def __init__(self, build: Callable[[], nn.Module], mode: str, precision: str, device: str, batch_size: int) -> None:
        torch.manual_seed(0)
        self.model = build().to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call: Any = torch.compile(self.model) if mode == "compiled" else self.model
        self.device, self.precision = device, precision
        self.images = torch.randn(batch_size, 3, 224, 224, device=device)
        self.labels = torch.randint(1000, (batch_size,), device=device)

    def step(self) -> float:
        """Seconds of one step."""
        self._wait()
        begun = time.perf_counter()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.call(self.images)
            heads = logits if isinstance(logits, tuple) else (logits,)
            loss = torch.stack([F.cross_entropy(head.float(), self.labels) for head in heads]).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def compare(name: str, mode: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    sides = [Side(build, mode, precision, args.device, args.batch_size) for _, build in PAIRS[name]]
    for side in sides:
        for _ in range(args.warmup):
            side.step()
    times: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for side, seconds in zip(sides, times, strict=True):
            seconds.append(side.step())
    speeds = [args.batch_size / statistics.median(seconds) for seconds in times]
    memory = [peak_mib(name, place, mode, precision, args) for place in (0, 1)] if args.memory else [None, None]
    return {
        "ours": PAIRS[name][0][0],
        "peer": PAIRS[name][1][0],
        "mode": mode,
        "precision": precision,
        "ours_img_s": round(speeds[0], 2),
        "peer_img_s": round(speeds[1], 2),
        "ratio": round(speeds[0] / speeds[1], 3),
        "ours_peak_mib": memory[0],
        "peer_peak_mib": memory[1],
        "batch_size": args.batch_size,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        **{package: version(package) for package in ("torch", "timm", "transformers")},
    }


def peak_mib(name: str, place: int, mode: str, precision: str, args: argparse.Namespace) -> float:
    """Memory of three steps in a process of their own, above what it had with the network built."""
    words = [sys.executable, __file__, "--alone", name, str(place), mode, precision, "--device", args.device]
    words += ["--batch-size", str(args.batch_size), "--threads", str(torch.get_num_threads())]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def alone(name: str, place: int, mode: str, precision: str, args: argparse.Namespace) -> float:
    """High-water mark in MiB, in this process."""
    side = Side(PAIRS[name][place][1], mode, precision, args.device, args.batch_size)
    for _ in range(3):
        side.step()
    if args.device == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true", help="measure peak memory, too")
    parser.add_argument("--csv", type=Path, help="add the lines to this file")
    parser.add_argument("--alone", nargs=4, metavar="X", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone:
        name, place, mode, precision = args.alone
        print(json.dumps(alone(name, int(place), mode, precision, args)))
        return
    for mode in args.modes:
        for precision in args.precisions:
            for name in args.pairs:
                row = compare(name, mode, precision, args)
                print("  ".join(f"{key} {row[key]}" for key in list(row)[:9]), flush=True)
                if args.csv:
                    is_new = not args.csv.exists()
                    with args.csv.open("a", newline="") as file:
                        writer = csv.DictWriter(file, row, lineterminator="\n")
                        if is_new:
                            writer.writeheader()
                        writer.writerow(row)


if __name__ == "__main__":
    main()
