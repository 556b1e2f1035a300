"""Throughput of a training step of weft's network and of its peer: forward, cross-entropy, backward, AdamW.

    python benchmarks/training/step.py --pairs cvt levit ceit --modes eager --precisions fp32 bf16 --csv results.csv

Each side of a pair is a separate process. The processes take turns (A B A B ...) on the same random images, with the
same fused optimizer, threads and allocator. The table has the median throughput of both sides, the ratio of the
medians, and the peak memory. On a CPU, both sides are measured twice unless `--allocators` has one of the two: with the
default allocator, and with `weft.keep_memory()`, as in `weft train`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.peers import build_peer, peers_of
from benchmarks.common.records import read_csv, write_csv

import weft
from weft.machine.memory import keep_memory
from weft.machine.processor import processor_class

PAIRS = {"cvt": "cvt_13", "levit": "levit_256", "ceit": "ceit_tiny_patch16_224"}


def network(name: str, side: int) -> tuple[str, nn.Module]:
    """Return the name and the network of a side: weft's (0), or its peer (1)."""
    if side == 0:
        return f"weft {PAIRS[name]}", weft.create_model(PAIRS[name])
    peer = peers_of(PAIRS[name])[0]
    return peer.label, build_peer(peer)


class Side:
    """A network with its optimizer and a batch of random images."""

    def __init__(self, model: nn.Module, mode: str, precision: str, device: str, batch_size: int) -> None:
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call: Any = torch.compile(self.model) if mode == "compiled" else self.model
        self.device, self.precision = device, precision
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        self.images = torch.randn(batch_size, 3, 224, 224, device=device)
        self.labels = torch.randint(1000, (batch_size,), device=device)

    def step(self) -> float:
        """Run a training step; return its seconds."""
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


class Child:
    """A side in a separate process, which runs a step per request."""

    def __init__(self, name: str, side: int, mode: str, precision: str, keep: bool, args: argparse.Namespace) -> None:
        arguments = [sys.executable, __file__, "--side", name, str(side), mode, precision, "--device", args.device]
        arguments += ["--batch-size", str(args.batch_size), "--threads", str(args.threads)] + ["--keep"] * keep
        self.name = f"{mode} {precision} of {name}'s {'peer' if side else 'network of weft'}"
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.process = subprocess.Popen(arguments, text=True, **pipes)

    def warm_up(self, steps: int) -> None:
        """Run steps that are not timed; the first one compiles."""
        for _ in range(steps):
            self.request("step")

    def request(self, command: str) -> float:
        """Return the seconds of a step (command 'step'), or the peak memory in MiB (command 'memory').

        Raises:
            RuntimeError: the process has ended; the message has its exit code and the last line of its standard error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(command, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.process.communicate()
            with self.errors:
                self.errors.seek(0)
                text = self.errors.read().strip()
            print(text, file=sys.stderr)
            last = text.splitlines()[-1] if text else "no output"
            raise RuntimeError(f"{self.name} ended with exit code {self.process.returncode}: {last}")
        return float(line)

    def end(self) -> float:
        """End the process; return its peak memory in MiB."""
        memory = self.request("memory")
        self.process.kill()
        self.process.wait()
        self.errors.close()
        return memory


def serve(side: Side) -> None:
    """Print a result for every command that is read from stdin; runs in the child process."""
    for line in sys.stdin:
        if line.strip() == "step":
            result = side.step()
        elif side.device == "cuda":
            result = torch.cuda.max_memory_allocated() / 2**20
        else:
            result = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(result, flush=True)


def compare(name: str, mode: str, precision: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per allocator; both sides of a row have the same."""
    allocators = args.allocators if args.device == "cpu" else ("default",)
    keys = [(allocator, side) for allocator in allocators for side in (0, 1)]
    children = {key: Child(name, key[1], mode, precision, key[0] == "keep", args) for key in keys}
    with ThreadPoolExecutor(len(children)) as pool:  # all processes at the same time
        list(pool.map(lambda child: child.warm_up(args.warmup), children.values()))
    times: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    for _ in range(args.rounds):
        for key, child in children.items():
            times[key].append(child.request("step"))
    speeds = {key: args.batch_size / statistics.median(seconds) for key, seconds in times.items()}
    memory = {key: child.end() for key, child in children.items()}
    rows = []
    for allocator in allocators:
        own, peer = (allocator, 0), (allocator, 1)
        rows.append(
            {
                "ours": network(name, 0)[0],
                "peer": network(name, 1)[0],
                "mode": mode,
                "precision": precision,
                "allocator": allocator,
                "ours_img_s": round(speeds[own], 2),
                "peer_img_s": round(speeds[peer], 2),
                "ratio": round(speeds[own] / speeds[peer], 3),
                "ours_peak_mib": round(memory[own]),
                "peer_peak_mib": round(memory[peer]),
                "batch_size": args.batch_size,
                "rounds": args.rounds,
                "threads": args.threads,
                "device": torch.cuda.get_device_name() if args.device == "cuda" else processor_class(),
                **{package: installed(package) for package in ("torch", "timm", "transformers")},
            }
        )
    return rows


def installed(package: str) -> str:
    """Return the version of a package; '' if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "tf32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--allocators", nargs="+", choices=("default", "keep"), default=["default", "keep"])
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    parser.add_argument("--side", nargs=4, metavar="X", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        torch.set_num_threads(args.threads)
        if args.keep:
            assert keep_memory()
        name, side, mode, precision = args.side
        torch.manual_seed(0)
        try:
            serve(Side(network(name, int(side))[1], mode, precision, args.device, args.batch_size))
        except Exception as error:
            from weft.bench.worker import cause

            traceback.print_exc()
            sys.exit(cause(error))  # the last line of the standard error
        return
    for mode in args.modes:
        for precision in args.precisions:
            for name in args.pairs:
                for row in compare(name, mode, precision, args):
                    print("  ".join(f"{key} {row[key]}" for key in list(row)[:10]), flush=True)
                    if args.csv:  # after the rows of earlier runs
                        write_csv(args.csv, [*read_csv(args.csv), row])


if __name__ == "__main__":
    main()
