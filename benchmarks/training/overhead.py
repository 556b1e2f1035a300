"""Overhead of weft's training loop relative to plain forward pass, backward pass and optimizer step.

    python benchmarks/training/overhead.py --csv benchmarks/training/overhead.csv

Epochs of both alternate, over the same batches in memory, with the same model, optimizer and loss. The overhead is
everything else that `weft train` does in a step: seeding, targets, gradient norm, check for non-finite values, learning
rate, metrics, row of `steps.csv`. It does not include reading images and saving states.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

import weft
from weft.machine.processor import processor_class
from weft.machine.runtime import Runtime
from weft.recipes import load_recipe
from weft.runs.directory import StepLog
from weft.train.loop import Learner, Meter, StepResult, train_epoch
from weft.train.stop import Stop

CASES = {
    "ceit_nano_32": (64, 4),
    "levit_nano_32": (64, 8),
    "ceit_tiny_patch16_224": (16, 1),
}  # batch size, steps per epoch


def measure(name: str, rounds: int) -> dict[str, object]:
    """Return the row of a model."""
    batch_size, steps = CASES[name]
    recipe = load_recipe(None, [("batch_size", batch_size), ("optim.clip_grad", 0), ("loss.label_smoothing", 0)])
    runtime, stop = Runtime.of("cpu"), Stop()
    torch.manual_seed(0)
    model: Any = weft.create_model(name, num_classes=10)
    learner = Learner(model, recipe, runtime, steps, 1000 * steps, 10)
    size = model.pretrained_cfg["input_size"]
    batches = [(torch.randn(batch_size, *size), torch.randint(10, (batch_size,))) for _ in range(steps)]

    def plain_epoch() -> None:
        model.train()
        for images, labels in batches:
            logits = model(images)
            heads = logits if isinstance(logits, tuple) else (logits,)
            loss = torch.stack([F.cross_entropy(head, labels) for head in heads]).mean()
            learner.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            learner.optimizer.step()

    def loop_epoch(log: StepLog) -> None:
        def on_step(meter: Meter, result: StepResult) -> None:
            log.add(learner.step, 1, learner.lr_at(learner.step - 1), result.loss, result.grad_norm)
            assert runtime.max([stop.reason]) == [0]

        train_epoch(learner, [([batch], ()) for batch in batches], Meter(steps=steps), on_step)

    times: dict[str, list[float]] = {"bare": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        log = StepLog(Path(folder) / "steps.csv", 0)
        for number in range(rounds + 1):
            for kind, epoch in (("bare", plain_epoch), ("loop", lambda: loop_epoch(log))):
                begun = time.perf_counter()
                epoch()
                if number:  # the first round is a warm-up
                    times[kind].append((time.perf_counter() - begun) / steps)
        log.close()
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    return {
        "model": name,
        "batch_size": batch_size,
        "bare_ms": round(1e3 * medians["bare"], 2),
        "loop_ms": round(1e3 * medians["loop"], 2),
        "overhead_percent": round(100 * (medians["loop"] / medians["bare"] - 1), 2),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "processor_class": processor_class(),
        "torch": version("torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(name, args.rounds) for name in CASES]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
