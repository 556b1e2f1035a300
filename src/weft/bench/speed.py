"""Measure latency and throughput of models on this machine, in alternating runs.

All that is compared runs in turns (A B C A B C ...), each in a process of its own, on the same random images, so that a
busy machine is busy for all; the first calls of a turn warm up. Told are medians and the 95th percentile of
single calls. Speed is judged by the machine's own measured peak of matrix products in the same number format, and every
answer is compared with the model's: nothing is fast that is wrong. All processes of a comparison have the same
settings: weft's networks and those of peers run with the same threads and the same allocator (`allocators`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from weft.bench.peers import peers_of
from weft.bench.worker import ALLOCATORS, REFERENCE, Task, is_directory
from weft.checkpoints.model_dir import model_dir, read_config
from weft.deploy.graphs import DTYPES, check_tools
from weft.errors import UsageError
from weft.hub import create_model

WAYS = {  # and the number formats of each
    "eager": ("fp32", "bf16"),
    "folded": ("fp32", "bf16"),
    "compiled": ("fp32", "bf16"),
    "graphed": ("fp32", "bf16"),  # compiled, and replayed as a CUDA graph
    "onnx": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
PRECISIONS = ("fp32", "bf16", "int8")
IN_TORCH = ("eager", "folded", "compiled")  # the ways whose activations torch allocates: the allocator matters to these
PEAK_SIDE = 2048  # of the square matrices that measure the peak
CALLS, SECONDS = 3, 0.25  # of a turn, at least; as many seconds before them warm up
BEST = "best"
MOST = 512  # images of a call in the search for the best number
GAIN = 1.03  # what doubling the batch must bring to go on


@dataclass(frozen=True)
class SpeedRow:
    """What one way of running one model came to.

    Attributes:
        model, way, precision, device, batch_size: what ran.
        allocator: default, or keep (`weft.keep_memory`).
        p50_ms, p95_ms: of single calls with a whole batch.
        images_per_second: by the median.
        ratio: images per second over those of the first row of this batch size.
        peak_percent: of the measured peak of matrix products; None for int8, and where multiply-adds are not known.
        params, macs: of the model, in evaluation; None for an export.
        difference: largest difference of logits from those of the model in float32, over the largest of these; None
            for networks that do not have the model's weights.
        calls, threads: of the measurement.
    """

    model: str
    way: str
    precision: str
    device: str
    allocator: str
    batch_size: int
    p50_ms: float
    p95_ms: float
    images_per_second: float
    ratio: float
    peak_percent: float | None
    params: int | None
    macs: int | None
    difference: float | None
    calls: int
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def speed(
    models: Sequence[str | Path],
    *,
    ways: Sequence[str] = ("eager", "folded"),
    precisions: Sequence[str] = ("fp32",),
    allocators: Sequence[str] = ("default",),
    batch_sizes: Sequence[int | str] = (1, 16),
    rounds: int = 10,
    threads: int | None = None,
    peers: bool = False,
    device: str = "cpu",
) -> list[SpeedRow]:
    """Measures models, runs and exports.

    Args:
        models: names of models (random weights), or model directories, of weights or exports.
        ways: of WAYS, which says what number formats each has; an export has only its own way.
        precisions: of PRECISIONS. int8 is calibrated on noise here: its speed is that of `weft export`, its answers
            are not.
        allocators: of ALLOCATORS. `keep` calls `weft.keep_memory` in the process, as `weft train`, `evaluate`,
            `predict` and `serve` do; with both, every network (weft's and each peer's) is measured under either.
            Runtimes other than torch, and GPUs, have only `default`.
        batch_sizes: images of a call; `best` doubles them until that brings nothing.
        rounds: turns of each, with CALLS timed calls or as many as SECONDS hold.
        threads: of all runtimes; None for as many as torch takes.
        peers: measure the same networks of timm, transformers and vit-pytorch in the same ways, too (for CeiT, the DeiT
            of its size); timm's LeViT with the same weights. A way that fails for a peer is left out, with a warning.
        device: cpu or cuda.

    Raises:
        UsageError: words that do not fit, or something that is not installed.
        CheckpointError: a directory that cannot be read.
    """
    _check(ways, precisions, allocators, batch_sizes, rounds, threads, device)
    threads = threads or torch.get_num_threads()
    tasks = [
        task for model in models for task in _tasks(str(model), ways, precisions, allocators, peers, device, threads)
    ]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [stack.enter_context(_Worker(task, folder / f"{i}.npy")) for i, task in enumerate(tasks)]
        with ThreadPoolExecutor(threads) as pool:  # most of building is one thread's work
            built = list(pool.map(_Worker.try_build, workers))
        workers = [worker for worker, is_there in zip(workers, built, strict=True) if is_there]
        measured = {worker.precision for worker in workers if worker.task.way != REFERENCE}
        peaks = {precision: matrix_peak(precision, device, threads) for precision in measured}
        return [row for size in batch_sizes for row in _measured(workers, size, rounds, peaks)]


def matrix_peak(precision: str = "fp32", device: str = "cpu", threads: int | None = None) -> float:
    """Multiply-adds per second of this machine in large matrix products, the best of ten; nan for int8."""
    if precision == "int8":
        return math.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    side = PEAK_SIDE if device == "cpu" else 4 * PEAK_SIDE
    left, right = (torch.randn(side, side, device=device).to(DTYPES.get(precision, torch.float32)) for _ in range(2))
    seconds = min(_timed(lambda: left @ right, device) for _ in range(10))
    torch.set_num_threads(before)
    return side**3 / seconds


def _check(
    ways: Sequence[str],
    precisions: Sequence[str],
    allocators: Sequence[str],
    batch_sizes: Sequence[int | str],
    rounds: int,
    threads: int | None,
    device: str,
) -> None:
    asked = (
        ("ways", ways, tuple(WAYS)),
        ("precisions", precisions, PRECISIONS),
        ("allocators", allocators, ALLOCATORS),
    )
    for what, words, known in asked:
        wrong = [word for word in words if word not in known]
        if wrong or not words:
            raise UsageError(f"{what} must be some of {', '.join(known)}; got {', '.join(wrong) or 'none'}.")
    if not any(precision in WAYS[way] for way in ways for precision in precisions):
        offered = "; ".join(f"{way}: {', '.join(WAYS[way])}" for way in ways)
        raise UsageError(f"precisions must be some that these ways have ({offered}); got {', '.join(precisions)}.")
    numbers: list[tuple[str, int | str]] = [("rounds", rounds), ("threads", 1 if threads is None else threads)]
    for what, number in [*(("batch_size", size) for size in batch_sizes if size != BEST), *numbers]:
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{what} must be at least 1; got {number}.")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda; got {device}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda needs a GPU that this torch can use; it finds none. See weft doctor.")
    elsewhere = ("onnx", "openvino") if device == "cuda" else ("graphed",)
    wrong = [way for way in ways if way in elsewhere]
    if wrong:
        raise UsageError(f"{wrong[0]} is not measured on {device}; take another device, or another way.")


def _tasks(
    what: str,
    ways: Sequence[str],
    precisions: Sequence[str],
    allocators: Sequence[str],
    peers: bool,
    device: str,
    threads: int,
) -> Iterator[Task]:
    """Every way of running one model, the one to compare with, and its peers. Complains before anything is started."""
    is_path = is_directory(what)
    if is_path and "artefact" in read_config(model_dir(what)):
        yield Task(what, None, False, "eager", "fp32", device, threads)
        return
    if not is_path:
        with torch.device("meta"):
            create_model(what, device="meta")
    count = len(peers_of(what)) if peers else 0
    pairs = [(way, precision) for precision in precisions for way in ways if precision in WAYS[way]]
    for way, precision in pairs:
        check_tools(way, precision)
    yield Task(what, None, peers, REFERENCE, "fp32", device, threads)
    for peer in (None, *range(count)):
        for way, precision in pairs:
            if peer is None or way != "folded":
                for allocator in allocators if device == "cpu" and way in IN_TORCH else ("default",):
                    yield Task(what, peer, peers, way, precision, device, threads, allocator)


class _Worker:
    """A process that runs one way of running one model, and waits in between."""

    def __init__(self, task: Task, answer: Path) -> None:
        self.task, self.answer = task, answer
        self.process: Any = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def try_build(self) -> bool:
        """Builds; of a peer, whether that went well: that theirs fails in a runtime is no reason to measure nothing."""
        if self.task.peer is None:
            self.build()
            return True
        try:
            self.build()
        except UsageError as error:
            warnings.warn(f"One way of a peer is left out. {error}", stacklevel=2)
            return False
        return True

    def build(self) -> None:
        """Starts the process, and waits until its model is there."""
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        # torch.compile's pool of compilers would go on asking for work, at the cost of a fifth for everyone
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "weft.bench.worker"], env=environment, **pipes)
        self.facts = self._ask(asdict(self.task))

    @property
    def precision(self) -> str:
        """Of an export, its own."""
        return str(self.facts["precision"])

    def turn(self, batch_size: int) -> list[float]:
        """Seconds of every call that counts."""
        return self._ask({"batch_size": batch_size, "calls": CALLS, "seconds": SECONDS, "answer": None})["seconds"]

    def logits(self, batch_size: int) -> np.ndarray:
        """What it answers."""
        self._ask({"batch_size": batch_size, "calls": 1, "seconds": 0, "answer": str(self.answer)})
        return np.load(self.answer)

    def best_batch(self) -> int:
        """The number of images at which doubling it brings nothing."""
        best, batch_size = 0.0, 1
        while True:
            per_second = batch_size / statistics.median(self.turn(batch_size))
            if per_second < GAIN * best:
                return batch_size // 2
            if batch_size == MOST:
                return MOST
            best, batch_size = per_second, 2 * batch_size

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
        except BrokenPipeError:
            self._died()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else self._died()
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer

    def _died(self) -> NoReturn:
        code = self.process.wait()
        whose = "" if self.task.peer is None else f" of peer {self.task.peer + 1}"
        raise UsageError(
            f"{self.task.what}{whose} {self.task.way} {self.task.precision} must run to be measured; its process ended"
            f" with {code}, and what it said is above. Leave it out, or take smaller batches if memory ran out (-9)."
        )


def _measured(
    workers: Sequence[_Worker], batch_size: int | str, rounds: int, peaks: dict[str, float]
) -> Iterator[SpeedRow]:
    measured = [worker for worker in workers if worker.task.way != REFERENCE]
    sizes = [batch_size if isinstance(batch_size, int) else worker.best_batch() for worker in measured]
    differences = [_difference(worker, workers, size) for worker, size in zip(measured, sizes, strict=True)]
    times: list[list[float]] = [[] for _ in measured]
    for _ in range(rounds):
        for worker, size, seconds in zip(measured, sizes, times, strict=True):
            seconds.extend(worker.turn(size))
    first = 0.0
    for worker, size, seconds, difference in zip(measured, sizes, times, differences, strict=True):
        median = statistics.median(seconds)
        per_second = size / median
        first = first or per_second
        peak, macs = peaks[worker.precision], worker.facts["macs"]
        yield SpeedRow(
            model=worker.facts["model"],
            way=worker.facts["way"],
            precision=worker.precision,
            device=worker.task.device,
            allocator=worker.task.allocator,
            batch_size=size,
            p50_ms=1000 * median,
            p95_ms=1000 * sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
            images_per_second=per_second,
            ratio=per_second / first,
            peak_percent=None if macs is None or math.isnan(peak) else 100 * macs * per_second / peak,
            params=worker.facts["params"],
            macs=macs,
            difference=difference,
            calls=len(seconds),
            threads=worker.task.threads,
        )


def _difference(worker: _Worker, workers: Sequence[_Worker], batch_size: int) -> float | None:
    """Of what a worker answers from what the model answers; runs it, in any case."""
    found = worker.logits(batch_size)
    task = worker.task
    if task.peer is not None and (task.peer > 0 or not peers_of(task.what)[0].same_weights):
        return None
    reference = next((one for one in workers if one.task.way == REFERENCE and one.task.what == task.what), None)
    if reference is None:
        return None
    expected = reference.logits(batch_size)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _timed(call: Callable[[], Any], device: str) -> float:
    begun = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
