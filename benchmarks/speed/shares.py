"""Where the time goes, by kind of operation: in a step of training, in answering by torch, in answering by OpenVINO.

    python benchmarks/speed/shares.py --out benchmarks/speed

Ours beside the peer, batch 16, 224 pixels. torch is asked by its profiler (time of an operation itself, without those
that it calls), OpenVINO by its counters; medians of five runs. One line of shares.csv per network, program, precision
and kind: how many calls, milliseconds, percent of the whole.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openvino
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import weft
from weft.bench.peers import build_peer, peers_of
from weft.bench.records import write_csv
from weft.deploy.graphs import write_graph

MODELS = ("levit_256", "cvt_13", "ceit_tiny_patch16_224")
BATCH, SIDE, RUNS = 16, 224, 5
KINDS = {  # the first that is in an operation's name, in small letters
    "attention, fused": ("scaled_dot_product", "scaleddotproduct"),
    "depthwise convolutions": ("groupconvolution",),  # torch's profiler does not tell them from others
    "convolutions": ("convolution", "conv2d"),
    "products": ("addmm", "bmm", "mm", "linear", "matmul", "fullyconnected"),
    "softmax": ("softmax",),
    "norms": ("batch_norm", "layer_norm", "mvn"),
    "activations and sums": ("gelu", "hardswish", "hswish", "silu", "sigmoid", "add", "mul", "subgraph", "eltwise"),
    "copies and layouts": (
        "copy",
        "clone",
        "cat",
        "contiguous",
        "convert",
        "transpose",
        "reorder",
        "reshape",
        "concat",
        "split",
        "slice",
    ),
    "optimiser": ("adam",),
}
Share = dict[str, tuple[int, float]]  # of a kind of operation: calls, seconds


def kind_of(name: str) -> str:
    """The kind of an operation."""
    low = name.lower()
    return next((kind for kind, arguments in KINDS.items() if any(word in low for word in arguments)), "other")


def by_torch(call: Callable[[], Any]) -> Iterator[Share]:
    """One run after another."""
    call()
    for _ in range(RUNS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        share: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
        for event in profiler.key_averages():
            calls, seconds = share[kind_of(event.key)]
            share[kind_of(event.key)] = (calls + event.count, seconds + event.self_cpu_time_total / 1e6)
        yield share


def by_openvino(network: nn.Module, precision: str, images: torch.Tensor) -> Iterator[Share]:
    """One run after another."""
    arguments = {
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[precision],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERF_COUNT": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.xml"
        write_graph(network, file, "openvino", "fp32", tuple(images.shape[1:]))
        request = openvino.compile_model(str(file), "CPU", arguments).create_infer_request()
        request.infer([images.numpy()])
        for _ in range(RUNS):
            request.infer([images.numpy()])
            share: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
            for node in request.profiling_info:
                if node.real_time.total_seconds():
                    calls, seconds = share[kind_of(node.node_type)]
                    share[kind_of(node.node_type)] = (calls + 1, seconds + node.real_time.total_seconds())
            yield share


def training(network: nn.Module, precision: str, images: torch.Tensor) -> Callable[[], Any]:
    """A step, as step.py of benchmarks/training takes it."""
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    labels = torch.randint(1000, (len(images),))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = network(images)
            heads = logits if isinstance(logits, tuple) else (logits,)
            loss = torch.stack([F.cross_entropy(head.float(), labels) for head in heads]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def answering(network: nn.Module, precision: str, images: torch.Tensor) -> Callable[[], Any]:
    """A call, as `weft bench` makes it."""

    @torch.inference_mode()
    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            network(images)

    return call


def measured(name: str) -> Iterator[dict[str, Any]]:
    """Lines of one pair."""
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    for precision in ("fp32", "bf16"):
        for is_ours in (True, False):

            def fresh(is_ours: bool = is_ours) -> tuple[str, nn.Module]:
                peer = peers_of(name)[0]
                return (name, weft.create_model(name)) if is_ours else (peer.label, build_peer(peer))

            called, network = fresh()
            yield from lines(called, "training", precision, by_torch(training(network, precision, images)))
            network = weft.fold(fresh()[1].eval()) if is_ours else fresh()[1].eval()
            yield from lines(called, "torch", precision, by_torch(answering(network, precision, images)))
            yield from lines(called, "openvino", precision, by_openvino(network, precision, images))


def lines(called: str, program: str, precision: str, shares: Iterator[Share]) -> Iterator[dict[str, Any]]:
    """Medians of all runs; the largest first."""
    runs = list(shares)
    medians = {kind: statistics.median(run[kind][1] for run in runs) for kind in runs[0]}
    whole = sum(medians.values())
    for kind, seconds in sorted(medians.items(), key=lambda pair: -pair[1]):
        yield {
            "model": called,
            "program": program,
            "precision": precision,
            "kind": kind,
            "calls": runs[0][kind][0],
            "milliseconds": f"{1000 * seconds:.4g}",
            "percent": f"{100 * seconds / whole:.1f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for row in measured(name):
            rows.append(row)
            print(*row.values(), sep="  ", flush=True)
    write_csv(args.out / "shares.csv", rows)


if __name__ == "__main__":
    main()
