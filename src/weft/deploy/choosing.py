"""Choose the fastest way to run a model by measurement, and remember the choice per machine.

A directory of `weft export --format auto` holds the chosen export, the other exports that passed their verification in
`candidates/`, and `chosen.json`: the machine, and the time of every candidate on it. Another machine measures again
and stores its choice in the cache directory, since the directory may be read-only. `weft serve RUN` also
stores there which of a model and its exports is the fastest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from weft.checkpoints.config import CONFIG, read_config
from weft.errors import CheckpointError, StorageError, UsageError, WeftError
from weft.files import cache_file, sha256_of, write_file
from weft.processor import cpu_flags, cpu_name, has_bf16, has_int8, limits, num_threads, onednn_flags, processor_class
from weft.reading import read_json
from weft.text import reason_of

FILE, FOLDER = "chosen.json", "candidates"
VARIABLE = "WEFT_CHOICE"  # prefix of environment variables with choices that are not stored in the cache directory
_for_children: set[str] = set()  # those that this process has set
Format = Literal["openvino", "onnx"]
Precision = Literal["fp32", "bf16", "int8"]
KINDS: tuple[tuple[Format, Precision], ...] = (
    *(("openvino", "fp32"), ("openvino", "bf16"), ("openvino", "int8")),
    *(("onnx", "fp32"), ("onnx", "int8")),
)
PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime"}
DISTRIBUTIONS = ("openvino", "onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
BATCH_SIZES = (1, 16)
MAX_BATCH, MAX_SIZES = 4096, 64
ROUNDS = 9  # turns per batch size
MIN_ROUNDS, SECONDS = 3, 2.0  # after this time, no more than so many turns are started
MAX_SECONDS = 30.0  # of a measurement on another machine; batch sizes that would take longer are left out
MAX_BYTES = 1 << 20  # of chosen.json

Text = Annotated[str, Field(max_length=2000)]
Short = Annotated[str, Field(max_length=200)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _batch_size(text: str) -> str:
    if not re.fullmatch("[1-9][0-9]{0,3}", text) or int(text) > MAX_BATCH:
        raise ValueError(f"a batch size must be from 1 to {MAX_BATCH}")
    return text


BatchSize = Annotated[str, AfterValidator(_batch_size)]


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that decide which candidate is the fastest.

    Attributes:
        processor: name of the processor; None where it is not known.
        processor_class: see `weft.processor.processor_class`.
        flags: instruction sets.
        limits: environment variables that limit the instruction set.
        versions: of the inference runtimes; one that is not installed is absent.
        threads: number of threads of the runtimes; None in files of earlier versions.
    """

    processor: Short | None
    processor_class: Short
    flags: Annotated[tuple[Short, ...], Field(max_length=64)]
    limits: Annotated[dict[Short, Short], Field(max_length=16)]
    versions: Annotated[dict[Short, Short], Field(max_length=16)]
    threads: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class ConsideredExport:
    """An export that was considered.

    Attributes:
        format, precision: of the export.
        refused: reason why it was not built, or failed its verification; None if it passed.
        seconds: median time of a batch, by batch size; empty if it was refused.
        difference: largest difference of logits from the model, relative to the largest logit; None if refused.
        top1: accuracy on the held-out images in percent; None without labelled images.
    """

    format: Format
    precision: Precision
    refused: Text | None = None
    seconds: Annotated[dict[BatchSize, Seconds], Field(max_length=64)] = Field(default_factory=dict)
    difference: Number | None = None
    top1: Number | None = None

    @property
    def name(self) -> str:
        """Name of the directory in `candidates/`."""
        return f"{self.format}-{self.precision}"


@dataclass(frozen=True)
class Choice:
    """Contents of chosen.json.

    Attributes:
        version: of the format, 1.
        machine: the machine that measured.
        candidates: all that were considered.
        chosen: name of the fastest, which is the export in the directory itself.
    """

    version: Literal[1]
    machine: Machine
    candidates: Annotated[tuple[ConsideredExport, ...], Field(max_length=len(KINDS))]
    chosen: Short

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes at which the candidates were timed, ascending."""
        return tuple(sorted({int(size) for one in self.candidates for size in one.seconds})) or BATCH_SIZES


@dataclass(frozen=True)
class _Remembered:
    chosen: Annotated[str, Field(max_length=5000)]


def machine(threads: int | None = None) -> Machine:
    """Return this machine.

    Args:
        threads: number of threads of the runtimes; None for `weft.processor.num_threads`.
    """
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(cpu_name(), processor_class(), cpu_flags(), limits(), versions, threads or num_threads())


def check_batch_sizes(batch_sizes: Sequence[int]) -> None:
    """Check the batch sizes at which candidates are timed.

    Raises:
        UsageError: there is none, there are more than MAX_SIZES, or one is not from 1 to MAX_BATCH.
    """
    if len(set(batch_sizes)) > MAX_SIZES:
        raise UsageError(f"batch_sizes must be at most {MAX_SIZES} numbers; got {len(set(batch_sizes))}.")
    wrong = [size for size in batch_sizes if type(size) is not int or not 1 <= size <= MAX_BATCH]
    if wrong or not batch_sizes:
        raise UsageError(f"batch_sizes must be whole numbers from 1 to {MAX_BATCH}; got {wrong or 'none'}.")


def check_runtimes() -> None:
    """Check that an inference runtime is installed.

    Raises:
        UsageError: none is.
    """
    if all(importlib.util.find_spec(package) is None for package in PACKAGES.values()):
        raise UsageError(
            "format auto needs an inference runtime, openvino or onnxruntime; none is installed. Run: pip install"
            " 'weft-vision[deploy]'"
        )


def unsuitable(format: str, precision: str, *, has_data: bool) -> str | None:
    """Return why an export cannot be built or cannot be fast here; None if it can."""
    if importlib.util.find_spec(PACKAGES[format]) is None:
        return f"{PACKAGES[format]} is not installed"
    if precision == "bf16" and not has_bf16():
        return "this processor emulates bf16" if cpu_flags() else "whether this processor has bf16 is not known"
    if precision == "int8" and not has_data:
        return "int8 is calibrated on images; none were given"
    return None


def precision_note(format: str, precision: str, time_to_fp32: float | None = None) -> str | None:
    """Return a note on an export in a precision for which this processor has no instructions; None if it has them.

    Args:
        format, precision: of the export, which OpenVINO or ONNX Runtime runs.
        time_to_fp32: measured time of an image relative to the same export in fp32; None if it was not measured.
    """
    if precision == "bf16" and cpu_flags() and not has_bf16():
        return (
            "This processor has no bf16 instructions: OpenVINO computes this export in fp32 here, so its verification"
            " shows no error of bf16."
        )
    if precision == "int8" and cpu_flags() and not _has_int8(format):
        text = "can be slower than fp32"
        if time_to_fp32 is not None:
            text = f"takes {time_to_fp32:.2f} times as long as fp32 here. --format auto chooses the faster one"
        return f"This processor has no int8 instructions (VNNI): int8 {text}."
    return None


def saturation_note(config: dict[str, Any]) -> str | None:
    """Return a warning if an int8 export has sums that saturate on this processor; None otherwise.

    Args:
        config: config.json of the export, or of a model.
    """
    artefact = config.get("artefact", {})
    if artefact.get("precision") != "int8" or artefact.get("weight_bits", 8) < 8:
        return None
    is_x86 = "avx2" in cpu_flags() or "avx512f" in cpu_flags()
    if not is_x86 or _has_int8(artefact.get("format", "")):
        return None
    return (
        "This int8 export has weights of 8 bits, whose sums saturate on processors without VNNI, such as this one:"
        " its predictions are less accurate than they were when it was made. Export the model again."
    )


def expected_order() -> list[tuple[str, str]]:
    """Return formats and precisions by the speed that this class of processors leads to expect; ties go by it."""

    def rank(format: str, precision: str) -> int:
        if precision == "int8":
            return 0 if _has_int8(format) else 3
        return 1 if precision == "bf16" and has_bf16() else 2

    kinds = itertools.product(("openvino", "onnx"), ("fp32", "bf16", "fp16", "int8"))
    return sorted(kinds, key=lambda kind: rank(*kind))


def _has_int8(format: str) -> bool:
    return has_int8(cpu_flags() if format == "onnx" else onednn_flags())


def time_calls(
    calls: Mapping[str, Callable[[int], object]], batch_sizes: Sequence[int] = BATCH_SIZES
) -> dict[str, dict[int, float]]:
    """Return the median time of a batch in seconds, by name and batch size.

    Args:
        calls: functions that compute a batch of the given size; they take turns, so that other load on the machine
            slows all of them. The first call of a turn is not timed: it follows another function, whose data are in
            the caches, and whose threads may still wait actively.
        batch_sizes: numbers of images.
    """
    medians: dict[str, dict[int, float]] = {name: {} for name in calls}
    for size in batch_sizes:
        for call in calls.values():
            call(size)  # compiles the graph for this size
        times: dict[str, list[float]] = {name: [] for name in calls}
        start = time.perf_counter()
        for turn in range(ROUNDS):
            if turn >= MIN_ROUNDS and time.perf_counter() - start > SECONDS:
                break
            for name, call in calls.items():
                call(size)
                begin = time.perf_counter()
                call(size)
                times[name].append(max(time.perf_counter() - begin, 1e-9))
        for name, values in times.items():
            medians[name][size] = median(values)
    return medians


def time_sizes(
    calls: Mapping[str, Callable[[int], object]],
    batch_sizes: Iterable[int],
    left_out: Callable[[int, str], None],
    max_seconds: float = math.inf,
) -> dict[str, dict[int, float]]:
    """Return the times of `time_calls` at all batch sizes, ascending, except those that cannot be timed.

    Args:
        calls, batch_sizes: as for `time_calls`.
        left_out: called with a batch size that is left out, and the reason.
        max_seconds: batch sizes that would take longer in total are left out.
    """
    seconds: dict[str, dict[int, float]] = {name: {} for name in calls}
    begin, per_image = time.perf_counter(), 0.0 if math.isinf(max_seconds) else _seconds_per_image(calls.values())
    for size in sorted(set(batch_sizes)):
        expected = size * per_image * (2 * MIN_ROUNDS + 1)  # the first call of each turn is not timed
        if time.perf_counter() - begin + expected > max_seconds:
            left_out(size, "its measurement would take too long")
            continue
        try:
            times = time_calls(calls, (size,))
        except WeftError:
            raise
        except Exception as error:  # too little memory; each runtime has its own exception types
            left_out(size, reason_of(error))
            continue
        for name, row in times.items():
            seconds[name] |= row
        per_image = sum(row[size] for row in seconds.values()) / size
    return seconds


def _seconds_per_image(calls: Iterable[Callable[[int], object]]) -> float:
    """Return the time of one image in all functions; 0 if one of them fails."""
    begin = 0.0
    try:
        for _ in range(2):  # the first compiles the graph for one image
            begin = time.perf_counter()
            for call in calls:
                call(1)
    except Exception:  # the measurement that follows reports it
        return 0.0
    return time.perf_counter() - begin


def fastest(seconds: Mapping[str, Mapping[int, float]]) -> str:
    """Return the name with the least geometric mean of the times over the batch sizes; of equal ones the first."""
    return min(seconds, key=lambda name: sum(math.log(value) for value in seconds[name].values()))


def speeds_text(seconds: Mapping[str, Mapping[int, float]]) -> str:
    """Return the throughput of each candidate, as part of a sentence."""
    rates = {name: " and ".join(f"{size / value:.0f}" for size, value in row.items()) for name, row in seconds.items()}
    sizes = " and ".join(str(size) for size in next(iter(seconds.values())))
    return f"{', '.join(f'{name} {rate}' for name, rate in rates.items())} images/s at batch size {sizes}"


def read_choice(folder: Path) -> Choice:
    """Read chosen.json, which is untrusted.

    Raises:
        CheckpointError: it is missing, too large or not in the format that weft writes.
    """
    try:
        return read_json(folder / FILE, Choice, max_bytes=MAX_BYTES)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Export the model again, or delete {FILE} to use the export in the directory itself."
        ) from error


def write_choice(folder: Path, choice: Choice) -> None:
    """Write chosen.json."""
    write_file(folder / FILE, TypeAdapter(Choice).dump_json(choice, indent=2).decode() + "\n")


def exports_in(folder: Path, choice: Choice) -> dict[str, Path]:
    """Return the exports that passed their verification, by name; the chosen one is in the directory itself.

    A directory in `candidates/` is used if it has the same weights, classes and preprocessing as the chosen export.
    """
    config = read_config(folder)
    exports = {kind_of(config): folder}
    for candidate in choice.candidates:
        path = folder / FOLDER / candidate.name
        try:
            if candidate.refused is not None or not (path / CONFIG).is_file():
                continue
            other = read_config(path)
        except (CheckpointError, OSError):  # damaged, or not readable: the others remain
            continue
        if "artefact" in other and kind_of(other) == candidate.name and is_same_model(other, config):
            exports.setdefault(candidate.name, path)
    return {name: exports[name] for kind in expected_order() if (name := "-".join(kind)) in exports} or exports


def is_same_model(export: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two exports were made from the same weights, with the same classes and preprocessing."""
    keys = ("architecture", "model_args", "num_classes", "label_names", "pretrained_cfg")
    weights = [config["artefact"].get("weights_sha256") for config in (export, other)]
    return weights[0] == weights[1] and all(export.get(key) == other.get(key) for key in keys)


def recall(paths: Iterable[Path], *settings: object) -> str | None:
    """Return the choice of this machine among models or exports, by its name; None if it has not measured them.

    Args:
        paths: their directories, in any order.
        settings: anything else that the choice depends on, such as the number of threads.
    """
    key = _key(paths, settings)
    file = cache_file("choices", f"{key}.json")
    try:
        if file is not None:
            return read_json(file, _Remembered, max_bytes=MAX_BYTES).chosen
    except CheckpointError:  # missing or damaged: measured again
        pass
    variable = f"{VARIABLE}_{key}"
    return None if variable in _for_children else os.environ.pop(variable, None)


def remember(chosen: str, paths: Iterable[Path], *settings: object, is_final: bool = True) -> None:
    """Store the choice of this machine for `recall`.

    Args:
        chosen, paths, settings: as for `recall`. Read a number of threads once for both: torch can change it when it is
            imported.
        is_final: store it in the cache directory. Otherwise, and where that cannot be written, the processes that this
            one starts get it through the environment, for their first `recall`: all workers of a service begin alike.
    """
    key = _key(paths, settings)
    file = cache_file("choices", f"{key}.json") if is_final else None
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, TypeAdapter(_Remembered).dump_json(_Remembered(chosen)).decode() + "\n")
            return
    except (OSError, StorageError):
        pass
    variable = f"{VARIABLE}_{key}"
    _for_children.add(variable)
    os.environ[variable] = chosen


def _key(paths: Iterable[Path], settings: tuple[object, ...]) -> str:
    parts = (replace(machine(), threads=None), sorted(sha256_of(path / CONFIG) for path in paths), settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def kind_of(config: dict[str, Any]) -> str:
    """Return format and precision of an export, as in the name of its directory in `candidates/`."""
    return f"{config['artefact']['format']}-{config['artefact']['precision']}"
