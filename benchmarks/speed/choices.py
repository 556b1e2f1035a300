"""Speedup of weft's optimizations for OpenVINO: each network with and without them, in alternating turns.

    python benchmarks/speed/choices.py --out benchmarks/speed    # ten minutes on two cores

`batch known`: the graph compiled for a fixed batch size instead of any batch size; also of the first peer.
`LeFF on the map`: CeiT's folded LeFF, which computes on maps only, instead of one that converts between maps and
tokens. Medians of twelve calls. Writes choices.csv: a row per optimization, network, precision and batch size with the
images per second with and without it, their ratio, and, for `batch known`, the seconds that the compilation takes.
bf16 only where the processor has it. Rows of other processor classes stay.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.peers import build_peer, peers_of
from benchmarks.common.records import read_csv, write_csv

import weft
from weft.deploy.graphs import write_graph
from weft.deploy.runtimes import OpenVinoModel, run_file
from weft.machine.processor import has_bf16, processor_class
from weft.models.ceit import inference as ceit

MODELS = ("levit_256", "cvt_13", "ceit_tiny_patch16_224")
BATCHES = (1, 16)
KNOWN, MAP = "batch known", "LeFF on the map"


def to_openvino(network: nn.Module, precision: str, folder: str) -> OpenVinoModel:
    """Return a network in OpenVINO; int8 is calibrated on noise, which is sufficient to measure its speed."""
    file = Path(folder) / f"{id(network)}.xml"
    noise = np.random.default_rng(0).standard_normal((4, 1, 3, 224, 224), dtype=np.float32)
    write_graph(network, file, "openvino", precision, (3, 224, 224), noise)
    model = run_file(file, "openvino", precision, torch.get_num_threads(), fixed=len(BATCHES))
    assert isinstance(model, OpenVinoModel)
    return model


def median_seconds(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[float]:
    """Return the median seconds of each function; the functions take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            call()
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in seconds]


def fixed_batch_rows(label: str, network: nn.Module, precision: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size: the graph for this batch size, and for any batch size."""
    with tempfile.TemporaryDirectory() as folder:
        graph = to_openvino(network, precision, folder)
        for size in BATCHES:
            images = np.random.default_rng(0).standard_normal((size, 3, 224, 224), dtype=np.float32)
            begun = time.perf_counter()
            graph.run(images)
            first_call = time.perf_counter() - begun  # compiles for this batch size
            graphs = graph.fixed[size], graph.dynamic
            times = median_seconds(tuple(lambda graph=graph, x=images: graph(x) for graph in graphs), rounds)
            yield row_of(KNOWN, label, precision, size, times, f"{first_call - times[0]:.2f}")


def leff_rows(name: str, precision: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size: the folded LeFF on maps, and the LeFF that converts between maps and tokens."""
    model = weft.create_model(name).eval()
    with mock.patch.object(ceit, "FoldedLeFF", lambda leff: leff):
        on_tokens = weft.fold(model)
    with tempfile.TemporaryDirectory() as folder:
        graphs = [to_openvino(network, precision, folder) for network in (weft.fold(model), on_tokens)]
        for size in BATCHES:
            images = np.random.default_rng(0).standard_normal((size, 3, 224, 224), dtype=np.float32)
            times = median_seconds(tuple(lambda graph=graph, x=images: graph.run(x) for graph in graphs), rounds)
            yield row_of(MAP, name, precision, size, times)


def row_of(
    choice: str, label: str, precision: str, batch_size: int, seconds: list[float], compile_seconds: str = ""
) -> dict[str, Any]:
    """Return a row; `seconds` has the time of a batch with the optimization and without it."""
    with_choice, without = (batch_size / value for value in seconds)
    return {
        "choice": choice,
        "model": label,
        "precision": precision,
        "batch_size": batch_size,
        "images_per_second": f"{with_choice:.4g}",
        "images_per_second_without": f"{without:.4g}",
        "ratio": f"{with_choice / without:.3f}",
        "seconds_to_compile": compile_seconds,
    }


def measure(choice: str, models: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of an optimization."""
    floats = ("fp32", "bf16") if has_bf16() else ("fp32",)
    if choice == MAP:
        for precision in (*floats, "int8"):
            yield from leff_rows("ceit_tiny_patch16_224", precision, rounds)
        return
    for precision in floats:
        for name in models:
            peer = peers_of(name)[0]
            yield from fixed_batch_rows(name, weft.fold(weft.create_model(name).eval()), precision, rounds)
            yield from fixed_batch_rows(peer.label, build_peer(peer).eval(), precision, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--choices", nargs="+", choices=(KNOWN, MAP), default=(KNOWN, MAP))
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"of {KNOWN!r}")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    file = args.out / "choices.csv"
    for choice in args.choices:
        key = (choice, processor_class())
        rows: list[dict[str, Any]] = [row for row in read_csv(file) if (row["choice"], row["processor_class"]) != key]
        for row in measure(choice, args.models, args.rounds):
            rows.append({"processor_class": processor_class(), **row})
            print(*row.values(), sep="  ", flush=True)
        write_csv(file, rows)


if __name__ == "__main__":
    main()
