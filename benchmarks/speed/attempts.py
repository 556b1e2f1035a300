"""Measure ideas that could make a network faster, next to the ways that weft uses.

    python benchmarks/speed/attempts.py levit_256 ceit_tiny_patch16_224      # a quarter of an hour per network

Each attempt is a separate process, as in `weft bench`; the processes take turns. Writes a row per attempt and batch
size to attempts.csv; `to_base` is the throughput relative to the same way without the idea.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows
from benchmarks.common.ways import worker

from weft.bench.worker_process import WorkerProcess
from weft.errors import UsageError
from weft.machine.processor import processor_class

FILE = Path(__file__).parent / "attempts.csv"
HUGE = (("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),)
PINNED = (("OMP_PROC_BIND", "close"), ("OMP_PLACES", "cores"))
FROZEN = (("TORCHINDUCTOR_FREEZING", "1"),)
TUNED = (
    *FROZEN,
    ("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
    ("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "CPP,ATEN"),
)


class Attempt(NamedTuple):
    """An idea: its name ('' for the way as weft uses it), the way to run the network, and environment variables."""

    idea: str
    way: str
    environment: tuple[tuple[str, str], ...] = ()


ATTEMPTS = (
    Attempt("", "folded"),
    Attempt("huge pages", "folded", HUGE),
    Attempt("pinned threads", "folded", PINNED),
    Attempt("", "compiled"),
    Attempt("weights packed ahead of time", "compiled", FROZEN),
    Attempt("max-autotune with C++ templates", "compiled", TUNED),
    Attempt("", "aotinductor"),
    Attempt("weights packed ahead of time", "aotinductor", FROZEN),
    Attempt("", "openvino"),
    Attempt("huge pages", "openvino", HUGE),
)


def measure(name: str, precision: str, batch_sizes: list[int], rounds: int) -> list[dict[str, object]]:
    """Return a row per attempt and batch size; an attempt that fails has the reason in place of a speed."""
    threads, rows = torch.get_num_threads(), []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        workers: dict[Attempt, WorkerProcess] = {}
        failed: dict[Attempt, str] = {}
        for attempt in ATTEMPTS:
            process = stack.enter_context(worker(name, attempt.way, precision, folder=folder, threads=threads))
            try:
                with mock.patch.dict(os.environ, dict(attempt.environment)):
                    process.build()
                process.turn(batch_sizes[0])
                workers[attempt] = process
                print(f"{name} {precision}, {attempt.way}, {attempt.idea or 'as it is'}: ready", flush=True)
            except UsageError as error:
                failed[attempt] = str(error)
                print(error, flush=True)
        for batch_size in batch_sizes:
            times: dict[Attempt, list[float]] = {attempt: [] for attempt in workers}
            for _ in range(rounds):
                for attempt, process in workers.items():
                    times[attempt] += process.turn(batch_size)
            speeds = {attempt: batch_size / statistics.median(values) for attempt, values in times.items()}
            bases = {attempt.way: speed for attempt, speed in speeds.items() if not attempt.idea}
            for attempt in ATTEMPTS:
                is_measured = attempt in speeds
                rows.append(
                    {
                        "model": name,
                        "batch_size": batch_size,
                        "precision": precision,
                        "way": attempt.way,
                        "idea": attempt.idea,
                        "images_per_second": f"{speeds[attempt]:.4g}" if is_measured else "",
                        "to_base": f"{speeds[attempt] / bases[attempt.way]:.2f}" if is_measured else "",
                        "failed": failed.get(attempt, "").partition(";")[0][:200],
                        "threads": threads,
                        "torch": torch.__version__,
                        "processor_class": processor_class(),
                    }
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=FILE)
    args = parser.parse_args()
    for model in args.models:
        for kind in args.precision:
            found = measure(model, kind, args.batch_size, args.rounds)
            replace_rows(args.csv, found, ("model", "batch_size", "precision", "processor_class"))
