"""Measured speed of this machine: matrix multiplications and convolutions in fp32 and bf16, the former also in int8.

Convolutions in int8 exist only in PyTorch's quantized models, which weft does not use.

Measured once per processor, instruction set, version of PyTorch and number of threads; the result is a file in the
cache directory. `--precision auto` chooses by it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor

from weft.errors import CheckpointError, StorageError
from weft.files import cache_file, write_file
from weft.processor import cpu_flags, cpu_name, has_bf16, limits, processor_class
from weft.reading import read_json
from weft.system import lock_file

ROUNDS, MIN_SECONDS = 5, 0.02  # timings per operation, and duration of one
SIDE = 512  # of the square matrices
IMAGES, CHANNELS, PIXELS = 2, 64, 56  # of the 3x3 convolution
GAIN = 1.2  # of bf16 over fp32 in matrix multiplication, from which `auto` chooses bf16
MAX_BYTES = 1 << 20  # of a stored measurement
MAX_WAIT = 60.0  # seconds for the measurement of another process


@dataclass(frozen=True)
class Speed:
    """Measured speed of an operation.

    Attributes:
        operation: `matmul` or `conv`.
        precision: fp32, bf16 or int8.
        threads: number of CPU threads.
        gflops: billions of additions and multiplications per second.
    """

    operation: str
    precision: str
    threads: int
    gflops: Annotated[float, Field(ge=1e-3, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True)
class Capabilities:
    """Measured speeds, and the machine that they are of.

    Attributes:
        processor: name of the processor; None where it is not known.
        processor_class: see `weft.processor.processor_class`.
        limits: environment variables that limit the instruction set.
        torch: version.
        speeds: a row per operation, precision and number of threads. int8 is of matrix multiplications alone, and
            absent where PyTorch does not have it.
        flags: instruction sets, see `weft.processor.cpu_flags`.
    """

    processor: str | None
    processor_class: str
    limits: dict[str, str]
    torch: str
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1)]
    flags: tuple[str, ...] = ()

    def gain(self, precision: str, operation: str = "matmul") -> float | None:
        """Return the speed of a precision relative to fp32, on one thread; None if it was not measured."""
        rows = {row.precision: row.gflops for row in self.speeds if (row.operation, row.threads) == (operation, 1)}
        return rows[precision] / rows["fp32"] if {precision, "fp32"} <= rows.keys() else None


def capabilities(*, measure: bool = False) -> Capabilities:
    """Return the stored measurement of this machine; measure now if there is none.

    Args:
        measure: measure in any case.
    """
    known = None if measure else _known()
    if known is not None:
        return known
    with _alone():
        known = None if measure else _known()  # another process may have measured in the meantime
        return known or _measured()


@functools.cache
def fastest_precision(device: str) -> str:
    """Return the precision for training on a type of device: bf16 if it is faster than fp32 there, else fp32."""
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device != "cpu" or not has_bf16():
        return "fp32"
    gains = [capabilities().gain("bf16", operation) or 0.0 for operation in ("matmul", "conv")]
    return "bf16" if gains[0] >= GAIN and gains[1] >= 1 else "fp32"


def bf16_note(device: str, precision: str) -> str | None:
    """Return a warning if bf16 is emulated on a type of device, with the measured factor; None otherwise."""
    is_limited = bool(limits())
    if precision != "bf16" or device != "cpu" or (has_bf16() and not is_limited):
        return None
    gain = capabilities().gain("bf16")
    if gain is None or gain >= 1:
        return None
    given = " ".join(f"{name}={value}" for name, value in limits().items())
    subject = f"With {given}, this processor" if is_limited else "This processor"
    return (
        f"{subject} emulates bf16: a matrix multiplication takes {1 / gain:.3g} times as long as in fp32 (measured"
        " as by `weft doctor --measure`). --precision fp32 is faster."
    )


def _measured() -> Capabilities:
    """Measure every operation with one thread and with all, and store the result."""
    threads, rows = torch.get_num_threads(), []
    try:
        for count in dict.fromkeys((1, threads)):
            torch.set_num_threads(count)
            for operation, operations in (("matmul", _matmuls()), ("conv", _convs())):
                flops = 2.0 * SIDE**3 if operation == "matmul" else 2.0 * IMAGES * (PIXELS * CHANNELS * 3) ** 2
                for precision, seconds in _seconds(operations).items():
                    rows.append(Speed(operation, precision, count, float(f"{flops / seconds / 1e9:.4g}")))
    finally:
        torch.set_num_threads(threads)
    measured = Capabilities(cpu_name(), processor_class(), limits(), torch.__version__, tuple(rows), cpu_flags())
    file = _file()
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, _ADAPTER.dump_json(measured, indent=1).decode() + "\n")
            return measured
    except (OSError, StorageError):
        pass
    _not_stored[_key()] = measured  # measured again by the next process
    return measured


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of this user measures; without a cache directory, do not wait."""
    file = cache_file("measuring.lock")
    with contextlib.ExitStack() as stack:
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(file.open("a"))
                deadline = time.monotonic() + MAX_WAIT
                while not lock_file(lock.fileno()) and time.monotonic() < deadline:
                    time.sleep(0.05)
        except OSError:  # a directory that cannot be written, or has no locks
            pass
        yield


def _seconds(operations: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest time of each operation, which other processes disturb least; the operations alternate.

    An operation that PyTorch does not have is left out.
    """
    counts: dict[str, int] = {}
    for name, operation in operations.items():
        try:
            operation()
        except RuntimeError:  # NotImplementedError is one: PyTorch has no such kernel for this processor
            continue
        counts[name] = max(1, round(MIN_SECONDS / _time(operation, 1)))
    times: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(ROUNDS):
        for name, count in counts.items():
            times[name].append(_time(operations[name], count))
    return {name: min(values) for name, values in times.items()}


def _time(operation: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        operation()
    return max((time.perf_counter() - start) / count, 1e-9)


def _matmuls() -> dict[str, Callable[[], Tensor]]:
    values = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    half, whole = values.bfloat16(), (values * 20).to(torch.int8)
    return {"fp32": lambda: values @ values, "bf16": lambda: half @ half, "int8": lambda: torch._int_mm(whole, whole)}


def _convs() -> dict[str, Callable[[], Tensor]]:
    random = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, CHANNELS, PIXELS, PIXELS, generator=random)
    kernel = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=random)
    half = images.bfloat16(), kernel.bfloat16()
    return {
        "fp32": lambda: torch.conv2d(images, kernel, padding=1),
        "bf16": lambda: torch.conv2d(*half, padding=1),
    }


def _key() -> str:
    """Return the name of a measurement on this machine, under these versions and limits."""
    parts = (cpu_name(), cpu_flags(), limits(), torch.__version__, torch.get_num_threads())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _file() -> Path | None:
    """Return the file of a measurement; None without a cache directory."""
    return cache_file("machines", f"{_key()}.json")


def _known() -> Capabilities | None:
    file = _file()
    stored = None if file is None else _read(file)
    return stored or _not_stored.get(_key())


def _read(file: Path) -> Capabilities | None:
    try:
        return read_json(file, Capabilities, max_bytes=MAX_BYTES)
    except CheckpointError:  # missing or damaged: measured again
        return None


_ADAPTER = TypeAdapter(Capabilities)
_not_stored: dict[str, Capabilities] = {}  # measurements of this process that could not be stored
