"""Measure latency and throughput of models on this machine, in alternating runs. Checks come before torch.

Every way of running a model has a process of its own. The processes take turns (A B C A B C ...) on the same random
images, so that other load on the machine affects all of them equally. The first calls of a turn are warm-up. Results
are the median and the 95th percentile of single calls. The logits of every way are compared with those of the model.
All processes have the same number of threads, and keep freed memory as `weft predict` and `weft serve` do.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.checkpoints.resolve import is_path, model_dir
from weft.deploy.choosing import exports_in
from weft.deploy.formats import check_tools
from weft.errors import UsageError
from weft.machine.memory import available_gib
from weft.machine.processor import bf16_note, has_bf16, num_threads
from weft.models.families import check_name
from weft.progress import loading, obeys_quiet, say
from weft.recipes.checks import check_argument, image_size
from weft.recipes.schema import Positive, Threads

if TYPE_CHECKING:
    from weft.bench.worker_process import WorkerProcess

WAYS = {  # way of running a model -> its precisions; the last two run on the CPU
    "eager": ("fp32", "bf16"),
    "folded": ("fp32", "bf16"),
    "compiled": ("fp32", "bf16"),
    "onnx": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
PRECISIONS = ("fp32", "bf16", "int8")
ON_CPU = ("onnx", "openvino", "int8")
BEST = "best"
WORKER_GIB = 1.0  # memory of a process: PyTorch, a runtime and a model


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one model in one way of running it.

    Attributes:
        model, way, precision, device, batch_size: what was measured.
        p50_ms, p95_ms: median and 95th percentile of the latency of a batch, in ms.
        images_per_second: throughput at the median latency.
        ratio: throughput relative to the first row with the same batch size.
        memory_mb: memory in use after a batch, in MB (10^6 bytes): of the process, with its libraries and weights; on a
            GPU the largest that the process has allocated there.
        difference: largest difference of the logits from those of the model in float32, relative to the largest logit;
            None for exports, and where the memory does not suffice for the model in float32.
        calls: number of timed calls.
        threads: number of threads.
    """

    model: str
    way: str
    precision: str
    device: str
    batch_size: int
    p50_ms: float
    p95_ms: float
    images_per_second: float
    ratio: float
    memory_mb: float
    difference: float | None
    calls: int
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary of JSON values."""
        return asdict(self)


@obeys_quiet
def speed(
    models: Sequence[str | Path],
    *,
    backends: Sequence[str] = ("eager", "folded"),
    precisions: Sequence[str] = ("fp32",),
    batch_sizes: Sequence[int | str] = (1, 16),
    rounds: int = 10,
    img_size: int | tuple[int, int] | str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    quiet: bool = False,
) -> list[SpeedRow]:
    """Measure the speed of models, runs and exports.

    Args:
        models: names of models (with random weights), run directories, model directories or exports.
        backends: of WAYS, which lists the precisions of each; an export has only its own way. In all ways but eager,
            weft's networks are folded.
        precisions: of PRECISIONS. int8 is calibrated on noise: its speed is that of `weft export`, its logits are not.
        batch_sizes: images per call; `best` doubles the batch size until the throughput no longer increases.
        rounds: number of turns of each way; a turn has at least 3 timed calls, and as many as 0.25 s hold.
        img_size: input size in pixels, or (height, width); None for that of each model, as an export has it.
        threads: number of threads of all runtimes; None for torch's default.
        device: cpu or cuda.
        quiet: print no notes.

    Returns:
        One row per batch size and way of each model.

    Raises:
        UsageError: an invalid argument, or a package that is not installed.
        CheckpointError: a model directory or export that cannot be read.
    """
    _check_choices(backends, precisions, batch_sizes, rounds, threads, device)
    size = None if img_size is None else image_size(img_size)
    names = [str(model) for model in models]
    exports = {name for name in names if is_path(name) and exports_in(model_dir(name))}
    if exports and device == "cuda":
        raise UsageError(f"Exports run on the CPU; got {min(exports)} with device cuda. Measure it with --device cpu.")
    if exports and size is not None:
        raise UsageError(f"img_size must be that of each export; got {img_size} for {min(exports)}. Leave it out.")
    for name in names:
        if not is_path(name):
            check_name(name)
    with loading():
        import torch

        from weft.bench.worker_process import WorkerProcess
        from weft.machine.runtime import NO_CUDA

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(NO_CUDA)
    if "bf16" in precisions and (emulated := bf16_note(device, "bf16")) is not None:
        say(emulated)
    pairs = [(way, precision) for precision in precisions for way in backends if precision in WAYS[way]]
    for pair in pairs if len(exports) < len(names) else []:
        check_tools(*pair)
    measured = [(name, *pair) for name in names for pair in ([("export", "")] if name in exports else pairs)]
    references = [(name, "eager", "fp32") for name in names if name not in exports]
    with contextlib.ExitStack() as stack:
        # a compiler of a worker that was killed may still be writing
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        options: dict[str, Any] = dict(folder=folder, threads=threads or num_threads(), device=device, img_size=size)
        workers = {
            task: stack.enter_context(WorkerProcess(*task, **options, is_compiled=task[1] == "compiled"))
            for task in dict.fromkeys((*references, *measured))
        }
        say(_memory_text(len(workers)))
        for number, worker in enumerate(workers.values(), 1):  # one by one: loading a runtime uses all cores
            worker.build()
            say(f"{number} of {len(workers)} ready: {worker.name}.")
        compared = [(workers[task], workers.get((task[0], "eager", "fp32"))) for task in measured]
        return [row for size in batch_sizes for row in measure(compared, size, rounds)]


def _check_choices(
    backends: Sequence[str],
    precisions: Sequence[str],
    batch_sizes: Sequence[int | str],
    rounds: int,
    threads: int | None,
    device: str,
) -> None:
    check_argument("rounds", rounds, Positive)
    check_argument("threads", threads, Threads | None)
    check_argument("device", device, Literal["cpu", "cuda"])
    for size in batch_sizes:
        check_argument("batch_size", 1 if size == BEST else size, Positive)
    for name, values, known in (("backends", backends, tuple(WAYS)), ("precisions", precisions, PRECISIONS)):
        wrong = [value for value in values if value not in known]
        if wrong or not values:
            raise UsageError(f"{name} must be one or more of {', '.join(known)}; got {', '.join(wrong) or 'none'}.")
    if not any(precision in WAYS[way] for way in backends for precision in precisions):
        supported = "; ".join(f"{way}: {', '.join(WAYS[way])}" for way in backends)
        raise UsageError(
            f"precisions must include one that these backends support ({supported}); got {', '.join(precisions)}."
        )
    wrong = [choice for choice in (*backends, *precisions) if choice in ON_CPU]
    if device == "cuda" and wrong:
        raise UsageError(f"{wrong[0]} is not supported on cuda; choose another device, backend or precision.")
    if "openvino" in backends and "bf16" in precisions and not has_bf16():
        raise UsageError(
            "openvino in bf16 needs a processor with AVX-512 bf16 or AMX; this processor emulates bf16, and OpenVINO"
            " would compute in fp32. Leave out bf16 or openvino."
        )


def _memory_text(processes: int) -> str:
    """State the memory that the processes of a measurement need, and what is available."""
    text = f"{processes} processes take turns; they need about {processes * WORKER_GIB:.0f} GiB of memory"
    available = available_gib()
    advice = " Fewer --backends or --precision need less." if processes * WORKER_GIB > available else ""
    return f"{text}; {available:.0f} GiB are available.{advice}"


def measure(
    processes: Sequence[tuple[WorkerProcess, WorkerProcess | None]], batch_size: int | str, rounds: int
) -> list[SpeedRow]:
    """Measure processes in alternating turns with one batch size.

    Args:
        processes: those that have built their models, each with the one whose logits it is compared with, or None.
        batch_size: images per call, or `best`.
        rounds: number of turns of each process.

    Returns:
        One row per process.
    """
    measured: list[tuple[WorkerProcess, int, float | None, float, list[float]]] = []
    for process, reference in processes:
        size = batch_size if isinstance(batch_size, int) else process.best_batch()
        difference = _difference(process, reference, size)
        measured.append((process, size, difference, process.memory(size), []))
    for number in range(1, rounds + 1):
        for process, size, _, _, seconds in measured:
            seconds.extend(process.turn(size))
            if number == 1:
                say(f"batch {size}, {process.name}: {1000 * statistics.median(seconds):.1f} ms in the first turn.")
        say(f"batch {batch_size}: {number} of {rounds} turns measured.")
    rows: list[SpeedRow] = []
    for process, size, difference, memory, seconds in measured:
        median = statistics.median(seconds)
        row = SpeedRow(
            model=process.label,
            way=process.subject.way,
            precision=process.subject.precision,
            device=process.device,
            batch_size=size,
            p50_ms=1000 * median,
            p95_ms=1000 * sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
            images_per_second=size / median,
            ratio=size / median / rows[0].images_per_second if rows else 1.0,
            memory_mb=memory,
            difference=difference,
            calls=len(seconds),
            threads=process.threads,
        )
        rows.append(row)
    return rows


def _difference(process: WorkerProcess, reference: WorkerProcess | None, batch_size: int) -> float | None:
    """Return the difference between the logits of a process and of its reference; None without these."""
    from weft.bench.worker import OutOfMemoryError
    from weft.deploy.verification import relative_difference

    actual = process.logits(batch_size)  # also without a reference: it warms the process up
    if reference is None:
        return None
    try:
        return relative_difference(actual, reference.logits(batch_size))
    except OutOfMemoryError:  # it computes in float32, and may need more memory
        return None
