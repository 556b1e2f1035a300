"""Choose the fastest of several models by measurement, and remember the choice per machine.

A directory of `weft export --format auto` holds an export per format and precision, and `chosen.json`: the fastest one,
the machine that measured, and its times. Another machine measures again, and stores its choice in the cache directory,
since the directory may be read-only. The exports in or next to a model directory are chosen from in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from weft.checkpoints.config import CHOICE, CONFIG, PREPROCESSING, WEIGHTS, read_config
from weft.deploy.formats import MAX_BATCH, MAX_SIZES, PACKAGES, runs_int8
from weft.deploy.model import Model
from weft.errors import CheckpointError, StorageError, UsageError, WeftError
from weft.files import cache_file, sha256_of, write_file
from weft.machine.processor import cpu_flags, cpu_name, has_bf16, limits, num_threads, processor_class
from weft.models.contract import preprocessing
from weft.progress import Work, say
from weft.reading import read_json
from weft.text import printable, reason_of

M = TypeVar("M", bound=Model)
DISTRIBUTIONS = ("openvino", "onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
ROUNDS = 9  # turns per batch size
MIN_ROUNDS, SECONDS = 3, 2.0  # after this time, no more than so many turns are started
MAX_SECONDS = 30.0  # of a measurement that the user did not request; batch sizes that would take longer are left out
MAX_BYTES = 1 << 20  # of chosen.json

Short = Annotated[str, Field(max_length=2000)]
Name = Annotated[str, Field(pattern="^(openvino|onnx)-(fp32|bf16|int8)$")]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Choice(TypedDict):
    """Contents of chosen.json: directory of the fastest export, `machine()` of the machine that measured, and the
    median time of a batch in seconds, by export and batch size."""

    chosen: Name
    machine: Short
    seconds: dict[Name, Annotated[dict[BatchSize, Seconds], Field(max_length=MAX_SIZES)]]


@dataclass(frozen=True)
class Candidate:
    """A model or an export to choose from.

    Attributes:
        path: its directory.
        runtime: `torch`, `onnx` or `openvino`.
        precision: number format.
    """

    path: Path
    runtime: str
    precision: str

    @property
    def name(self) -> str:
        """Runtime and precision, as in the name of the directory of an export of format auto."""
        return f"{self.runtime}-{self.precision}"


class BatchError(UsageError):
    """A model cannot run a batch, mostly for lack of memory at this time."""


def machine(threads: int | None = None) -> str:
    """Describe all of this machine that decides which export is the fastest: processor, runtimes, number of threads.

    Args:
        threads: number of threads of the runtimes; None for `weft.machine.processor.num_threads`.
    """
    versions = []
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    limited = [f"{name}={value[:200]}" for name, value in limits().items()]
    processor = [str(cpu_name()), processor_class(), " ".join(cpu_flags())]
    return printable("; ".join([*processor, *limited, *versions, f"{threads or num_threads()} threads"]))


def exports_in(folder: Path) -> list[Candidate]:
    """Return the exports of a directory: itself, or those of a directory of format auto; none of another directory.

    Args:
        folder: a directory.

    Raises:
        CheckpointError: config.json or chosen.json is damaged, or no export that chosen.json describes can be read.
    """
    if not (folder / CHOICE).exists():
        artefact = read_config(folder).get("artefact")
        return [] if artefact is None else [Candidate(folder, artefact["format"], artefact["precision"])]
    for path in (folder / read_choice(folder)["chosen"], *_folders([folder])):  # one that is damaged is skipped
        with contextlib.suppress(CheckpointError, OSError):
            if "artefact" in read_config(path) and (exports := _exports_of(path, [folder])):
                return exports
    raise CheckpointError(f"{folder} must have an export that can be read; it has none. Export the model again.")


def exports_of(model: Path) -> list[Candidate]:
    """Return the exports in or next to a model directory that can replace the model, as expected of their speed.

    An export is taken if it was made from the same weights, has the same architecture, classes and preprocessing, and
    belongs to the same user.

    Args:
        model: a model directory.

    Raises:
        CheckpointError: config.json of the model is damaged.
    """
    parent = model.parent if model.name not in ("", "..") else Path(os.path.abspath(model)).parent
    return _exports_of(model, [model, parent, parent / "exports"])


def _exports_of(model: Path, places: Sequence[Path]) -> list[Candidate]:
    """Return the exports below `places` of the weights of `model`, which is a model directory or an export."""
    config, exports, weights = read_config(model), dict[str, Candidate](), None
    for path in _folders(places):
        name = printable(str(path))
        try:
            if not (path / CONFIG).is_file() or "artefact" not in (other := read_config(path)):
                continue
            if _identity(other) != _identity(config):
                continue  # of another model
            if (path / CONFIG).stat().st_uid != (model / CONFIG).stat().st_uid:
                say(f"the export {name} is skipped: it belongs to another user than the model.")
                continue
        except OSError:  # not readable, as /root next to /model in a container
            continue
        except CheckpointError as error:
            say(f"the directory {name} is skipped: {error}")
            continue
        weights, artefact = weights or _weights_hash(model, config), other["artefact"]
        if artefact.get("weights_sha256") != weights:
            say(
                f"the export {name} is skipped: it does not record that it was made from these weights. Export the"
                " model again, or serve the export by its own path."
            )
            continue
        candidate = Candidate(path, artefact["format"], artefact["precision"])
        exports[candidate.name] = candidate
    return [exports[name] for name in expected_order() if name in exports]


def _folders(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories in which an export may be: those in `places`, and in directories of format auto there."""
    for folder in sorted({folder for place in places for folder in place.glob("*/")}):
        with contextlib.suppress(OSError):  # not readable
            if folder.name.startswith("."):  # .NAME.PID.part is not verified yet
                continue
            yield from sorted(folder.glob("*/")) if (folder / CHOICE).is_file() else [folder]


def _weights_hash(model: Path, config: dict[str, Any]) -> str:
    """Return the hash that an export of this model records for its weights."""
    if "artefact" in config:
        return str(config["artefact"].get("weights_sha256"))
    known = config.get("weights_sha256")
    try:
        sha256 = sha256_of(model / WEIGHTS)
    except FileNotFoundError:  # a run that was copied with its exports alone
        return str(known)
    if sha256 == known:
        return sha256
    from weft.checkpoints.model_dir import load_model_dir, weights_sha256  # imports torch

    return weights_sha256(load_model_dir(model)[0])


def _identity(config: dict[str, Any]) -> str:
    """Return the settings that an export must share with its model, as text."""
    cfg = {key: config["pretrained_cfg"].get(key) for key in PREPROCESSING}
    parts = [config["architecture"], config["model_args"], config["num_classes"], config["label_names"], cfg]
    return json.dumps(parts, sort_keys=True)


def expected_order() -> list[str]:
    """Return the names of exports by the speed that this class of processors leads to expect; ties go by it."""

    def rank(name: str) -> int:
        format, _, precision = name.partition("-")
        if precision == "int8":
            return 0 if runs_int8(format) else 3
        return 1 if precision == "bf16" and has_bf16() else 2

    names = (f"{format}-{precision}" for format in PACKAGES for precision in ("fp32", "bf16", "fp16", "int8"))
    return sorted(names, key=rank)


def fastest(
    candidates: Sequence[Candidate],
    open: Callable[[Candidate], M],
    batch_sizes: Sequence[int],
    *,
    settings: Sequence[object] = (),
    known: str | None = None,
) -> M:
    """Open the fastest of several models. The first call on a machine times them; the choice is stored in the cache.

    Args:
        candidates: at least one, as expected of their speed.
        open: loads one.
        batch_sizes: numbers of images.
        settings: anything else that the choice depends on, such as the number of threads. Read that once for all: torch
            can change it when it is imported.
        known: name of the candidate that is known to be the fastest here.

    Raises:
        WeftError: no candidate can be opened.
    """
    if len(candidates) == 1:
        return open(candidates[0])
    key = _key(candidates, batch_sizes, settings)
    by_name = {candidate.name: candidate for candidate in candidates}
    if (known := known or recall(key)) in by_name:
        with contextlib.suppress(WeftError):  # damaged since then: measured again
            return open(by_name[known])
    opened: dict[str, M] = {}
    errors: list[WeftError] = []
    for candidate in candidates:
        try:
            opened[candidate.name] = open(candidate)
        except WeftError as error:  # its runtime is not installed here, or it is damaged
            errors.append(error)
            say(f"{printable(str(candidate.path))} is skipped: {error}")
    if not opened:
        raise errors[0]
    chosen = next(iter(opened))
    if len(opened) > 1:
        seconds, reasons = time_in_turns(opened, batch_sizes, MAX_SECONDS)
        if not all(seconds.values()):
            say(f"the models cannot be timed here ({next(iter(reasons.values()))}); {chosen} is used.")
            return opened[chosen]
        chosen = quickest(seconds)
        say(f"measured on this machine: {speeds_text(seconds)}. {chosen} is used.")
    if not any(isinstance(error, (CheckpointError, BatchError)) for error in errors):  # which may pass
        remember(key, chosen)
    return opened[chosen]


def run_blank(model: Model, count: int) -> None:
    """Run a batch of blank images.

    Raises:
        BatchError: the model fails.
    """
    try:
        model.run(np.zeros((count, *preprocessing(model.info)["input_size"]), np.float32))
    except WeftError:
        raise
    except Exception as error:  # mostly too little memory; each runtime has its own exception types
        raise BatchError(
            f"The model must run with batches of {count} images; it fails ({type(error).__name__}: {reason_of(error)})."
            " Lower --max-batch."
        ) from error


def time_in_turns(
    models: Mapping[str, Model], batch_sizes: Sequence[int], max_seconds: float = math.inf
) -> tuple[dict[str, dict[int, float]], dict[int, str]]:
    """Time batches of blank images.

    Args:
        models: by name; they take turns, so that other load on the machine slows all of them.
        batch_sizes: numbers of images, timed in ascending order.
        max_seconds: batch sizes that would take longer in total are left out, before a batch of them runs.

    Returns:
        seconds: median time of a batch, by name and batch size.
        reasons: why a batch size is left out.
    """
    seconds: dict[str, dict[int, float]] = {name: {} for name in models}
    reasons: dict[int, str] = {}
    begin, per_image = time.perf_counter(), 0.0
    with Work("timing the models"):
        if not math.isinf(max_seconds):
            with contextlib.suppress(BatchError):  # the measurement that follows reports it
                for _ in range(2):  # the first pass also compiles
                    per_image = sum(_seconds(model, 1) for model in models.values())
        for size in sorted(set(batch_sizes)):
            expected = size * per_image * (2 * MIN_ROUNDS + 1)
            if time.perf_counter() - begin + expected > max_seconds:
                reasons[size] = "its measurement would take too long"
                continue
            try:
                medians = _medians(models, size)
            except BatchError as error:
                reasons[size] = reason_of(error.__cause__ or error)
                continue
            for name, value in medians.items():
                seconds[name][size] = value
            per_image = sum(medians.values()) / size
    return seconds, reasons


def _medians(models: Mapping[str, Model], size: int) -> dict[str, float]:
    """Return the median time of a batch of each model."""
    for model in models.values():
        run_blank(model, size)  # compiles the graph for this size
    times: dict[str, list[float]] = {name: [] for name in models}
    start = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() - start > SECONDS:
            break
        for name, model in models.items():
            run_blank(model, size)  # not timed: the caches have the data of another model, whose threads may still spin
            times[name].append(max(_seconds(model, size), 1e-9))
    return {name: median(values) for name, values in times.items()}


def _seconds(model: Model, count: int) -> float:
    begin = time.perf_counter()
    run_blank(model, count)
    return time.perf_counter() - begin


def quickest(seconds: Mapping[str, Mapping[int, float]]) -> str:
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
        return read_json(folder / CHOICE, Choice, max_bytes=MAX_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Export the model again, or pass one of the exports in {folder}.") from error


def write_choice(folder: Path, choice: Choice) -> None:
    """Write chosen.json."""
    write_file(folder / CHOICE, TypeAdapter(Choice).dump_json(choice, indent=2).decode() + "\n")


def recall(key: str) -> str | None:
    """Return the name of the candidate that this machine chose; None if it has not measured."""
    file = cache_file("choices", f"{key}.json")
    try:
        return None if file is None else read_json(file, dict[str, Short], max_bytes=MAX_BYTES).get("chosen")
    except CheckpointError:  # missing or damaged: measured again
        return None


def remember(key: str, chosen: str) -> None:
    """Store the choice of this machine for `recall`, where the cache directory can be written."""
    file = cache_file("choices", f"{key}.json")
    with contextlib.suppress(OSError, StorageError):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps({"chosen": chosen}) + "\n")


def _key(candidates: Sequence[Candidate], batch_sizes: Sequence[int], settings: Sequence[object]) -> str:
    """Return a name for a choice, by the contents of the candidates, not by their paths."""
    hashes = sorted((candidate.name, sha256_of(candidate.path / CONFIG)) for candidate in candidates)
    parts = (machine(1), hashes, sorted(set(batch_sizes)), tuple(settings))  # the number of threads is a setting
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
