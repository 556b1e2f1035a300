"""Measure a forward pass that is called from a new thread, after another thread has computed.

    python benchmarks/serving/threads.py

CeiT-T, folded, fp32, random weights, with 1, 2 and 4 images. Each thread that computes with torch keeps compute threads
of its own until it ends. Writes threads.csv next to this file: medians of 25 calls, in milliseconds, of three
alternating processes for each way. The network itself is always made in a thread that has ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

from weft.machine.processor import call_in_thread, num_threads, processor_class

FILE = Path(__file__).parent / "threads.csv"
WAYS = ("no other thread has computed", "another thread has ended", "main thread has computed")
BATCHES = (1, 2, 4)
CALLS = 25


def measure(way: str) -> dict[int, float]:
    """Return the median duration of a forward pass for each batch size, in milliseconds."""
    import torch

    import weft

    model = call_in_thread(lambda: weft.fold(weft.create_model("ceit_tiny_patch16_224").eval()))
    images = torch.randn(max(BATCHES), 3, 224, 224)
    times: dict[int, float] = {}

    def forward(count: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            model(images[:count])
        return 1000 * (time.perf_counter() - begun)

    def all_sizes() -> None:
        times.update({count: statistics.median(forward(count) for _ in range(CALLS)) for count in BATCHES})

    first: dict[str, Callable[[], object]] = {
        WAYS[1]: lambda: call_in_thread(lambda: forward(2)),
        WAYS[2]: lambda: forward(2),
    }
    if way in first:
        first[way]()
    thread = threading.Thread(target=all_sizes)
    thread.start()
    thread.join()
    return times


def main() -> None:
    """Measure every way in processes of its own, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way)))
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, __file__, "--way", way], stdout=subprocess.PIPE, text=True, check=True
            )
            for count, milliseconds in json.loads(done.stdout).items():
                found.setdefault((way, count), []).append(milliseconds)
    rows = [
        {
            "way": way,
            "images": count,
            "ms": f"{statistics.median(times):.1f}",
            "threads": num_threads(),
            "processor_class": processor_class(),
        }
        for (way, count), times in found.items()
    ]
    print(*rows, sep="\n")
    replace_rows(FILE, rows)


if __name__ == "__main__":
    main()
