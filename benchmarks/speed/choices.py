"""What the choices that weft makes for OpenVINO bring: each network with and without, in turns.

    python benchmarks/speed/choices.py --out benchmarks/speed    # ten minutes on two cores

`batch known`: the same file, compiled for one batch instead of any; for the first peer's graph, too, which is run the
same way. `LeFF on the map`: CeiT's folded LeFF, and the one that goes back and forth between map and tokens. Medians of
twelve calls in turns. One line of choices.csv per choice, network, precision and batch: images per second with and
without, their ratio, and for a known batch the seconds that compiling for it takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import weft
from weft.bench.peers import build_peer, peers_of
from weft.bench.records import read_csv, write_csv
from weft.deploy.graphs import write_graph
from weft.deploy.runtimes import OpenVinoGraph
from weft.models.ceit import network as ceit

MODELS = ("levit_256", "cvt_13", "ceit_tiny_patch16_224")
BATCHES, CALLS = (1, 16), 12
KNOWN, MAP = "batch known", "LeFF on the map"


def opened(network: nn.Module, precision: str, folder: str) -> OpenVinoGraph:
    """A network in OpenVINO; int8 is calibrated on noise, which is enough for its speed."""
    file = Path(folder) / f"{id(network)}.xml"
    noise = np.random.default_rng(0).standard_normal((4, 1, 3, 224, 224), dtype=np.float32)
    write_graph(network, file, "openvino", precision, (3, 224, 224), noise)
    return OpenVinoGraph(file, precision, torch.get_num_threads(), max_fixed=len(BATCHES))


def seconds_in_turns(calls: tuple[Callable[[], Any], ...]) -> list[float]:
    """Of each, the median."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS):
        for call, times in zip(calls, seconds, strict=True):
            call()
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in seconds]


def batch_known(called: str, network: nn.Module, precision: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        answer = opened(network, precision, folder)
        for size in BATCHES:
            images = np.random.default_rng(0).standard_normal((size, 3, 224, 224), dtype=np.float32)
            begun = time.perf_counter()
            answer(images)
            compiling = time.perf_counter() - begun
            one, of_any = answer.fixed[size], answer.dynamic
            times = seconds_in_turns((lambda one=one, x=images: one(x), lambda any=of_any, x=images: any(x)))
            yield line(KNOWN, called, precision, size, times, f"{compiling - times[0]:.2f}")


def leff_on_the_map(called: str, precision: str) -> Iterator[dict[str, Any]]:
    model = weft.create_model(called).eval()
    with mock.patch.object(ceit, "FoldedLeFF", lambda leff: leff):
        on_tokens = weft.fold(model)
    with tempfile.TemporaryDirectory() as folder:
        answers = [opened(network, precision, folder) for network in (weft.fold(model), on_tokens)]
        for size in BATCHES:
            images = np.random.default_rng(0).standard_normal((size, 3, 224, 224), dtype=np.float32)
            times = seconds_in_turns(tuple(lambda answer=answer, x=images: answer(x) for answer in answers))
            yield line(MAP, called, precision, size, times)


def line(
    choice: str, called: str, precision: str, batch_size: int, seconds: list[float], compiling: str = ""
) -> dict[str, Any]:
    taken, left = (batch_size / each for each in seconds)
    return {
        "choice": choice,
        "model": called,
        "precision": precision,
        "batch_size": batch_size,
        "images_per_second": f"{taken:.4g}",
        "images_per_second_without": f"{left:.4g}",
        "ratio": f"{taken / left:.3f}",
        "seconds_to_compile": compiling,
    }


def measured(choice: str) -> Iterator[dict[str, Any]]:
    if choice == MAP:
        for precision in ("fp32", "bf16", "int8"):
            yield from leff_on_the_map("ceit_tiny_patch16_224", precision)
        return
    for precision in ("fp32", "bf16"):
        for name in MODELS:
            peer = peers_of(name)[0]
            yield from batch_known(name, weft.fold(weft.create_model(name).eval()), precision)
            yield from batch_known(peer.label, build_peer(peer).eval(), precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--choices", nargs="+", choices=(KNOWN, MAP), default=(KNOWN, MAP))
    args = parser.parse_args()
    file = args.out / "choices.csv"
    for choice in args.choices:
        rows: list[dict[str, Any]] = [row for row in read_csv(file) if row["choice"] != choice]
        for row in measured(choice):
            rows.append(row)
            print(*row.values(), sep="  ", flush=True)
        write_csv(file, rows)


if __name__ == "__main__":
    main()
