"""Measure latency and throughput of models on this machine, in alternating runs.

Every way of running a model has a process of its own. The processes take turns (A B C A B C ...) on the same random
images, so that other load on the machine affects all of them equally. The first calls of a turn are warm-up. Results
are the median and the 95th percentile of single calls, and the throughput relative to the measured peak of matrix
multiplication in the same number format. The logits of every way are compared with those of the model. All processes
have the same settings: weft's networks and those of peers run with the same number of threads and the same allocator.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.bench.choices import WAYS, check_choices, check_cold_start
from weft.bench.cold_start import ColdStart, measure_cold_starts
from weft.bench.peers import peers_of
from weft.bench.worker import REFERENCE, Task, is_directory, tf32
from weft.bench.worker_process import OutOfMemoryError, WorkerProcess
from weft.checkpoints.config import read_config
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import model_dir
from weft.deploy.graphs import DTYPES, check_tools
from weft.deploy.verification import relative_difference
from weft.devices import NO_CUDA
from weft.errors import UsageError
from weft.memory import available_gib

IN_TORCH = ("eager", "folded", "compiled")  # ways in which torch allocates the activations, so the allocator matters
WORKER_GIB = 1.0  # memory of a process: PyTorch, a runtime and a model
PEAK_SIDE = 2048  # side of the square matrices that are multiplied to measure the peak
PEAK_SECONDS = 2.0  # after which the peak is measured no longer: emulated bf16 is slow


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one model in one way of running it.

    Attributes:
        model, way, precision, device, batch_size: what was measured.
        allocator: default, or keep (`weft.keep_memory`).
        p50_ms, p95_ms: median and 95th percentile of the latency of a batch, in ms.
        images_per_second: throughput at the median latency.
        ratio: throughput relative to the first row with the same batch size.
        peak_percent: multiply-adds per second, in percent of the measured peak of matrix multiplication; None for int8,
            and where multiply-adds are not known.
        params, macs: parameters and multiply-adds of the model in evaluation mode; None for an export.
        difference: largest difference of the logits from those of the model in float32, relative to the largest logit;
            None for networks with other weights, and where the memory does not suffice for the model in float32.
        calls: number of timed calls.
        threads: number of threads.
        cold_start_s, peak_mb, disk_mb: see `weft.bench.cold_start.ColdStart`; None if not measured.
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
    cold_start_s: float | None = None
    peak_mb: float | None = None
    disk_mb: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary of JSON values."""
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
    cold_start: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> list[SpeedRow]:
    """Measure the speed of models, runs and exports.

    Args:
        models: names of models (with random weights), run directories, model directories or exports.
        ways: of WAYS, which lists the precisions of each; an export has only its own way.
        precisions: of PRECISIONS. int8 is calibrated on noise: its speed is that of `weft export`, its logits are not.
        allocators: of ALLOCATORS. `keep` calls `weft.keep_memory` in the process, as `weft train`, `evaluate`,
            `predict` and `serve` do. With both, every network (weft's and each peer's) is measured with either one.
            Runtimes other than torch, and GPUs, have only `default`.
        batch_sizes: images per call; `best` doubles the batch size until the throughput no longer increases.
        rounds: number of turns of each way; a turn has at least 3 timed calls, and as many as 0.25 s hold.
        threads: number of threads of all runtimes; None for torch's default.
        peers: also measure the same networks of timm, transformers and vit-pytorch in the same ways (for CeiT, the DeiT
            of its size); timm's LeViT with the same weights. Except in eager mode, BatchNorm is merged on both
            sides. A way that fails for a peer is left out with a warning.
        device: cpu or cuda.
        cold_start: also measure new processes that predict an image on the CPU, for the ways that
            `weft.bench.cold_start.WAYS` lists.
        log: called with a line about the memory, about every process that is ready, and about every turn.

    Returns:
        One row per batch size and way of each model.

    Raises:
        UsageError: an invalid argument, or a package that is not installed.
        CheckpointError: a model directory or export that cannot be read.
    """
    check_choices(ways, precisions, allocators, batch_sizes, rounds, threads, device)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(NO_CUDA)
    check_cold_start(cold_start, device)
    threads = threads or torch.get_num_threads()
    tasks = [
        task for model in models for task in _tasks(str(model), ways, precisions, allocators, peers, device, threads)
    ]
    starts = measure_cold_starts([task for task in tasks if task.way != REFERENCE], log) if cold_start else {}
    with contextlib.ExitStack() as stack:
        # a compiler of a worker that was killed may still be writing
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        workers = [stack.enter_context(WorkerProcess(task, folder / f"{i}.npy")) for i, task in enumerate(tasks)]
        log(_memory_text(len(workers)))
        built = []
        for number, worker in enumerate(workers, 1):  # one by one: loading a runtime uses all cores and much memory
            if worker.try_build():
                built.append(worker)
                log(f"{number} of {len(workers)} ready: {worker.name}.")
        workers = built
        measured = {worker.precision for worker in workers if worker.task.way != REFERENCE}
        peaks = {precision: matrix_peak(precision, device, threads) for precision in measured}
        return [row for size in batch_sizes for row in _measured(workers, size, rounds, peaks, starts, log)]


def _memory_text(processes: int) -> str:
    """State the memory that the processes of a measurement need, and what is available."""
    text = f"{processes} processes take turns; they need about {processes * WORKER_GIB:.0f} GiB of memory"
    available = available_gib()
    if available is None:
        return f"{text}."
    advice = " Fewer --ways or --precision need less." if processes * WORKER_GIB > available else ""
    return f"{text}; {available:.0f} GiB are available.{advice}"


def matrix_peak(precision: str = "fp32", device: str = "cpu", threads: int | None = None) -> float:
    """Return this machine's multiply-adds per second in a large matrix multiplication; nan for int8.

    It is the best of ten multiplications, or of fewer if they take PEAK_SECONDS.
    """
    if precision == "int8":
        return math.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    side = PEAK_SIDE if device == "cpu" else 4 * PEAK_SIDE
    left, right = (torch.randn(side, side, device=device).to(DTYPES.get(precision, torch.float32)) for _ in range(2))
    with tf32(precision == "tf32"):
        times = [_timed(lambda: left @ right, device)]
        while len(times) < 10 and sum(times) < PEAK_SECONDS:
            times.append(_timed(lambda: left @ right, device))
    torch.set_num_threads(before)
    return side**3 / min(times)


def _tasks(
    model: str,
    ways: Sequence[str],
    precisions: Sequence[str],
    allocators: Sequence[str],
    peers: bool,
    device: str,
    threads: int,
) -> Iterator[Task]:
    """Yield the tasks of one model: its reference, every way of running it, and its peers; check them first."""
    is_path = is_directory(model)
    if is_path and "artefact" in read_config(model_dir(model)):
        if device == "cuda":
            raise UsageError(f"Exports run on the CPU; got {model} with device cuda. Measure it with --device cpu.")
        yield Task(model, None, False, "eager", "fp32", device, threads)
        return
    if not is_path:
        with torch.device("meta"):
            create_model(model, device="meta")
    count = len(peers_of(model)) if peers else 0
    pairs = [(way, precision) for precision in precisions for way in ways if precision in WAYS[way]]
    for way, precision in pairs:
        check_tools(way, precision)
    yield Task(model, None, peers, REFERENCE, "fp32", device, threads)
    for peer in (None, *range(count)):
        for way, precision in pairs:
            if peer is None or way != "folded":
                for allocator in allocators if device == "cpu" and way in IN_TORCH else ("default",):
                    yield Task(model, peer, peers, way, precision, device, threads, allocator)


def _measured(
    workers: Sequence[WorkerProcess],
    batch_size: int | str,
    rounds: int,
    peaks: dict[str, float],
    starts: Mapping[Task, ColdStart],
    log: Callable[[str], None],
) -> Iterator[SpeedRow]:
    measured = [worker for worker in workers if worker.task.way != REFERENCE]
    sizes = [batch_size if isinstance(batch_size, int) else worker.best_batch() for worker in measured]
    differences = [_difference(worker, workers, size) for worker, size in zip(measured, sizes, strict=True)]
    times: list[list[float]] = [[] for _ in measured]
    for number in range(1, rounds + 1):
        for worker, size, seconds in zip(measured, sizes, times, strict=True):
            seconds.extend(worker.turn(size))
            if number == 1:
                log(f"batch {size}, {worker.name}: {1000 * statistics.median(seconds):.1f} ms in the first turn.")
        log(f"batch {batch_size}: {number} of {rounds} turns measured.")
    first = 0.0
    for worker, size, seconds, difference in zip(measured, sizes, times, differences, strict=True):
        median = statistics.median(seconds)
        per_second = size / median
        first = first or per_second
        peak, macs = peaks[worker.precision], worker.info["macs"]
        yield SpeedRow(
            model=worker.info["model"],
            way=worker.info["way"],
            precision=worker.precision,
            device=worker.task.device,
            allocator=worker.task.allocator,
            batch_size=size,
            p50_ms=1000 * median,
            p95_ms=1000 * sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
            images_per_second=per_second,
            ratio=per_second / first,
            peak_percent=None if macs is None or math.isnan(peak) else 100 * macs * per_second / peak,
            params=worker.info["params"],
            macs=macs,
            difference=difference,
            calls=len(seconds),
            threads=worker.task.threads,
            **(asdict(starts[worker.task]) if worker.task in starts else {}),
        )


def _difference(worker: WorkerProcess, workers: Sequence[WorkerProcess], batch_size: int) -> float | None:
    """Return the difference between the logits of a worker and of its reference; None without these.

    The worker runs in any case, which warms it up.
    """
    actual = worker.logits(batch_size)
    task = worker.task
    if task.peer is not None and (task.peer > 0 or not peers_of(task.model)[0].same_weights):
        return None
    reference = next((one for one in workers if one.task.way == REFERENCE and one.task.model == task.model), None)
    if reference is None:
        return None
    try:
        return relative_difference(actual, reference.logits(batch_size))
    except OutOfMemoryError:  # it computes in float32, and may need more memory than the worker
        return None


def _timed(call: Callable[[], Any], device: str) -> float:
    begun = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
