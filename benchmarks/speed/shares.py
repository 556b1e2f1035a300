"""Share of the time by kind of operation: in a training step, and in inference by torch and by OpenVINO.

    python benchmarks/speed/shares.py --out benchmarks/speed

weft's networks and their peers, batch 16, 224 pixels. Times are from torch's profiler (of an operation without the
operations that it calls) and from OpenVINO's performance counters; medians of five runs. bf16 only where the
processor has it. Writes shares.csv: a row per network, program, precision and kind of operation with the number of
calls, milliseconds and percent of the total. Rows of other processor classes and networks stay.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openvino
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.peers import build_peer, peers_of
from benchmarks.common.records import replace_rows

import weft
from weft.deploy.graphs import write_graph
from weft.machine.processor import has_bf16, processor_class

MODELS = ("levit_256", "cvt_13", "ceit_tiny_patch16_224")
SIDE, RUNS = 224, 5
KINDS = {  # kind of operation: parts of the lower-case names of its operations; the first match counts
    "attention, fused": ("scaled_dot_product", "scaleddotproduct"),
    "depthwise convolutions": ("groupconvolution",),  # torch's profiler does not separate them from others
    "convolutions": ("convolution", "conv2d"),
    "matrix multiplications": ("addmm", "bmm", "mm", "linear", "matmul", "fullyconnected"),
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
Share = dict[str, tuple[int, float]]  # kind of operation: calls, seconds


def kind_of(name: str) -> str:
    """Return the kind of an operation."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def profile_torch(call: Callable[[], Any]) -> Iterator[Share]:
    """Yield the calls and seconds of every run of a function in torch."""
    call()
    for _ in range(RUNS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        share: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
        for event in profiler.key_averages():
            calls, seconds = share[kind_of(event.key)]
            share[kind_of(event.key)] = (calls + event.count, seconds + event.self_cpu_time_total / 1e6)
        yield share


def profile_openvino(network: nn.Module, precision: str, images: torch.Tensor) -> Iterator[Share]:
    """Yield the calls and seconds of every run of a network in OpenVINO."""
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


def training_step(network: nn.Module, precision: str, images: torch.Tensor) -> Callable[[], Any]:
    """Return a function that runs a training step, as in benchmarks/training/step.py."""
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


def forward_pass(network: nn.Module, precision: str, images: torch.Tensor) -> Callable[[], Any]:
    """Return a function that runs inference, as in `weft bench`."""

    @torch.inference_mode()
    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            network(images)

    return call


def measure(name: str, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model and of its peer."""
    images = torch.randn(batch_size, 3, SIDE, SIDE)
    for precision in ("fp32", "bf16") if has_bf16() else ("fp32",):
        for is_peer in (False, True):

            def create(is_peer: bool = is_peer) -> tuple[str, nn.Module]:
                peer = peers_of(name)[0]
                return (peer.label, build_peer(peer)) if is_peer else (name, weft.create_model(name))

            label, network = create()
            yield from rows_of(label, "training", precision, profile_torch(training_step(network, precision, images)))
            network = create()[1].eval() if is_peer else weft.fold(create()[1].eval())
            yield from rows_of(label, "torch", precision, profile_torch(forward_pass(network, precision, images)))
            yield from rows_of(label, "openvino", precision, profile_openvino(network, precision, images))


def rows_of(label: str, program: str, precision: str, shares: Iterator[Share]) -> Iterator[dict[str, Any]]:
    """Yield a row per kind of operation with the median of all runs, the longest time first."""
    runs = list(shares)
    medians = {kind: statistics.median(run[kind][1] for run in runs) for kind in runs[0]}
    total = sum(medians.values())
    for kind, seconds in sorted(medians.items(), key=lambda pair: -pair[1]):
        yield {
            "model": label,
            "program": program,
            "precision": precision,
            "kind": kind,
            "calls": runs[0][kind][0],
            "milliseconds": f"{1000 * seconds:.4g}",
            "percent": f"{100 * seconds / total:.1f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    file = args.out / "shares.csv"
    for name in args.models:
        rows = [{"processor_class": processor_class(), **row} for row in measure(name, args.batch_size)]
        for row in rows:
            print(*row.values(), sep="  ", flush=True)
        replace_rows(file, rows, ("processor_class", "model"))


if __name__ == "__main__":
    main()
