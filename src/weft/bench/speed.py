"""How fast models answer on this machine, side by side.

All that is compared runs in turns in one process (A B C A B C ...), on the same random images, so that a busy machine
is busy for all. Told are medians and the 95th percentile of single calls. Speed is judged by the machine's own measured
peak of matrix products in the same number format.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.bench.cost import cost
from weft.bench.peers import peer_of
from weft.checkpoints.model_dir import model_dir
from weft.deploy import ExportedModel, export, fold, open_model
from weft.errors import UsageError
from weft.heap import keep_memory
from weft.hub import create_model
from weft.models.base import Backbone

WAYS = ("eager", "folded", "compiled", "onnx", "openvino")
PRECISIONS = ("fp32", "bf16")
PEAK_SIDE = 2048  # of the square matrices that measure the peak


@dataclass(frozen=True)
class SpeedRow:
    """What one way of running one model came to.

    Attributes:
        model, way, precision, batch_size: what ran.
        p50_ms, p95_ms: of single calls with a whole batch.
        images_per_second: by the median.
        ratio: images per second over those of the first row of this batch size.
        peak_percent: of the measured peak of matrix products; None where the multiply-adds are not known.
        params, macs: of the model, in evaluation; None for an export.
        rounds, threads: of the measurement.
    """

    model: str
    way: str
    precision: str
    batch_size: int
    p50_ms: float
    p95_ms: float
    images_per_second: float
    ratio: float
    peak_percent: float | None
    params: int | None
    macs: int | None
    rounds: int
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class Subject:
    """One way of running one model."""

    model: str
    way: str
    precision: str
    size: tuple[int, ...]
    call: Callable[[Tensor], Any]
    params: int | None = None
    macs: int | None = None


def speed(
    models: Sequence[str | Path],
    *,
    ways: Sequence[str] = ("eager", "folded"),
    precisions: Sequence[str] = ("fp32",),
    batch_sizes: Sequence[int] = (1, 16),
    rounds: int = 30,
    threads: int | None = None,
    peers: bool = False,
) -> list[SpeedRow]:
    """Measures models, runs and exports on the CPU.

    Args:
        models: names of models (random weights), or model directories, of weights or exports.
        ways: of WAYS; an export has only its own.
        precisions: of PRECISIONS; onnx has fp32 alone.
        batch_sizes: images of a call.
        rounds: calls of each.
        threads: of all runtimes; None for as many as torch takes.
        peers: measure the same network of timm or transformers, too (for CeiT, the DeiT of its size).

    Raises:
        UsageError: words that do not fit, or something that is not installed.
        CheckpointError: a directory that cannot be read.
    """
    _check(ways, precisions, batch_sizes, rounds, threads)
    threads = threads or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    keep_memory()
    try:
        with tempfile.TemporaryDirectory() as folder:
            subjects = [
                subject
                for number, model in enumerate(models)
                for subject in _subjects(model, ways, precisions, peers, Path(folder) / str(number))
            ]
            peaks = {precision: matrix_peak(precision) for precision in {subject.precision for subject in subjects}}
            return [row for batch in batch_sizes for row in _measured(subjects, batch, rounds, threads, peaks)]
    finally:
        torch.set_num_threads(before)


def matrix_peak(precision: str = "fp32") -> float:
    """Multiply-adds per second of this machine in large matrix products, the best of ten; nan for int8."""
    if precision not in PRECISIONS:
        return float("nan")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(PEAK_SIDE, PEAK_SIDE).to(dtype) for _ in range(2))
    seconds = min(_timed(lambda: left @ right) for _ in range(10))
    return PEAK_SIDE**3 / seconds


def _check(
    ways: Sequence[str], precisions: Sequence[str], batch_sizes: Sequence[int], rounds: int, threads: int | None
) -> None:
    for what, words, known in (("ways", ways, WAYS), ("precisions", precisions, PRECISIONS)):
        wrong = [word for word in words if word not in known]
        if wrong or not words:
            raise UsageError(f"{what} must be some of {', '.join(known)}; got {', '.join(wrong) or 'none'}.")
    numbers = [("rounds", rounds), ("threads", 1 if threads is None else threads)]
    for what, number in [*(("batch_size", size) for size in batch_sizes), *numbers]:
        if number < 1:
            raise UsageError(f"{what} must be at least 1; got {number}.")


def _subjects(
    what: str | Path, ways: Sequence[str], precisions: Sequence[str], peers: bool, folder: Path
) -> Iterable[Subject]:
    """Every way of running one model."""
    is_path = Path(what).exists() or "/" in str(what)
    model: Any = open_model(model_dir(what))[0] if is_path else create_model(str(what)).eval()
    size = tuple(model.pretrained_cfg["input_size"])
    name = str(what)
    if isinstance(model, ExportedModel):
        yield Subject(name, model.format, model.precision, size, lambda images: model(images))
        return
    counted = cost(model, size[1:], size[0])  # type: ignore[arg-type]
    for precision in precisions:
        for way in ways:
            if way == "onnx" and precision != "fp32":
                continue
            call = _call(model, way, precision, folder / f"{way}-{precision}")
            yield Subject(name, way, precision, size, call, counted.params, counted.macs)
        if peers:
            peer_name, peer = peer_of(name)
            peer_cost = cost(peer, size[1:], size[0])  # type: ignore[arg-type]
            call = _call(peer.eval(), "eager", precision, folder)
            yield Subject(peer_name, "eager", precision, size, call, *peer_cost)


def _call(model: nn.Module, way: str, precision: str, folder: Path) -> Callable[[Tensor], Any]:
    if way in ("onnx", "openvino"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(model, folder, format=way, precision=precision)
        return open_model(folder)[0]
    if way in ("folded", "compiled") and isinstance(model, Backbone):
        model = fold(model)
    run: Any = torch.compile(model) if way == "compiled" else model
    if precision == "fp32":
        return run

    def in_bf16(images: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(images)

    return in_bf16


def _measured(
    subjects: Sequence[Subject], batch_size: int, rounds: int, threads: int, peaks: dict[str, float]
) -> Iterable[SpeedRow]:
    generator = torch.Generator().manual_seed(0)
    times: list[list[float]] = [[] for _ in subjects]
    images = [torch.randn(batch_size, *subject.size, generator=generator) for subject in subjects]
    with torch.inference_mode():
        for number in range(rounds + 2):
            for subject, batch, seconds in zip(subjects, images, times, strict=True):
                taken = _timed(lambda: subject.call(batch))  # noqa: B023  # called at once
                if number >= 2:  # the first two warm up
                    seconds.append(taken)
    medians = [statistics.median(seconds) for seconds in times]
    for subject, seconds, median in zip(subjects, times, medians, strict=True):
        per_second = batch_size / median
        peak = peaks[subject.precision]
        share = None if subject.macs is None or peak != peak else 100 * subject.macs * per_second / peak
        yield SpeedRow(
            model=subject.model,
            way=subject.way,
            precision=subject.precision,
            batch_size=batch_size,
            p50_ms=1000 * median,
            p95_ms=1000 * sorted(seconds)[min(round(0.95 * rounds), rounds - 1)],
            images_per_second=per_second,
            ratio=medians[0] / median,
            peak_percent=share,
            params=subject.params,
            macs=subject.macs,
            rounds=rounds,
            threads=threads,
        )


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
