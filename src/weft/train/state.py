"""Training states: save, verify and load tensors with a checksummed manifest.

state/step-0000000120.safetensors   weights, weight average (EMA), optimizer state
state/step-0000000120.json          first line: sha256 of the rest; then metadata: sha256 of the tensors, step, history

The manifest is written last; tensors without one are ignored. If a state fails verification, the previous one is
loaded. Loading executes no code: safetensors files contain none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import Field, with_config
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import TypedDict

from weft.errors import CheckpointError
from weft.files import flush_folder, sha256_of, sweep, write_whole, writing
from weft.processor import MAX_THREADS
from weft.reading import parse_json, read_bytes
from weft.text import reason_of

FORMAT = 1
MAX_MANIFEST = 256 << 20  # bytes: a row of history per epoch, a number per parameter
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]


@with_config(extra="allow")
class StateMetadata(TypedDict):
    """Metadata that `save_state` adds to every state: format, step, and checksum and size of the tensors."""

    format: Count
    step: Count
    sha256: str
    bytes: Count


class MeterMetadata(TypedDict):
    """Fields of `weft.train.loop.Meter.as_dict`."""

    step: Count
    count: Count
    loss_sum: float
    hits: float


@with_config(extra="allow")
class MachineMetadata(TypedDict):
    """Fields of `weft.train.environment.machine` that are used; it also has versions and names."""

    threads: Threads
    processes: NotRequired[Annotated[int, Field(ge=1, le=1 << 20)]]


class TeacherMetadata(TypedDict):
    """Fields of `weft.train.distillation.Teacher.record`."""

    architecture: str
    preprocessing: dict[str, list[float] | None]
    weights_sha256: str


@with_config(extra="allow")
class RunMetadata(StateMetadata):
    """Metadata of the state of a training run: metrics so far, machine, settings, teacher."""

    meter: MeterMetadata
    history: list[tuple[Count, Count, float, float, float, float, float, float, float, float, float, float]]
    without_better: Count
    seconds: Annotated[float, Field(ge=0)]
    machine: MachineMetadata
    optimizer: dict[str, bool | int | float | None]
    groups: list[dict[str, Count]]
    recipe: NotRequired[dict[str, str]]
    teacher: NotRequired[TeacherMetadata | None]


class State(NamedTuple):
    """A loaded state.

    Attributes:
        tensors: tensors by name.
        metadata: the other values, from the manifest; see `RunMetadata`.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


class SkippedState(NamedTuple):
    """A state that cannot be loaded: its path without suffix, and the reason."""

    path: Path
    reason: str


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], metadata: dict[str, Any], keep: int) -> Path:
    """Write a state atomically, then remove all but the newest `keep` states.

    Returns:
        The path of the tensors.

    Raises:
        StorageError: the state cannot be written; earlier states are unchanged.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:010}.safetensors"
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = write_whole(path, data)
    body = json.dumps({**metadata, "format": FORMAT, "step": step, "sha256": digest, "bytes": len(data)})
    write_whole(path.with_suffix(".json"), f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode())
    with writing(folder):
        for manifest in _manifests(folder)[keep:]:
            manifest.unlink(missing_ok=True)
            manifest.with_suffix(".safetensors").unlink(missing_ok=True)
        flush_folder(folder)
    return path


def load_state(folder: Path, schema: Any = StateMetadata) -> tuple[State, list[SkippedState]]:
    """Load the newest valid state; also return the newer ones that are not valid.

    Args:
        folder: the folder of states.
        schema: type of the metadata, a TypedDict that extends `StateMetadata`.

    Raises:
        CheckpointError: there is no valid state.
    """
    skipped: list[SkippedState] = []
    for manifest in _manifests(folder):
        try:
            return _load_verified(manifest, schema), skipped
        except (ValueError, OSError) as error:
            skipped.append(SkippedState(manifest.with_suffix(""), _reason_of(error)))
    reasons = f" {skipped_text(skipped)}" if skipped else ""
    raise CheckpointError(
        f"A run can only be resumed from a valid saved state; {folder} has none.{reasons}"
        " Start the run again with weft train --config, or restore the folder from a copy."
    )


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest state with a manifest; None if there is none."""
    newest = next(iter(_manifests(folder)), None)
    return None if newest is None else int(newest.stem.rpartition("-")[2])


def newest_text(out: Path, whole: Path) -> str:
    """Return a sentence that names the newest saved state of a run, and how to resume from it.

    Args:
        out: the run directory.
        whole: the run directory to resume: `out`, or that of the cross-validation.
    """
    newest = newest_step(out / "state")
    if newest is None:
        return "No state was saved yet: start the run again."
    return f"The newest saved state is of step {newest}; resume with: weft train --resume {whole}"


def skipped_text(skipped: Iterable[SkippedState]) -> str:
    """Format skipped states with their reasons, one sentence each."""
    return " ".join(f"{item.path.name}: {item.reason}." for item in skipped)


def remove_incomplete(folder: Path) -> None:
    """Remove temporary files of ended processes, and tensors without a manifest."""
    with writing(folder):
        sweep(folder, lambda path: path.unlink(missing_ok=True))
        for path in folder.glob("step-*.safetensors"):
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)


def _manifests(folder: Path) -> list[Path]:
    """Return the manifests of a folder, newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def _load_verified(manifest: Path, schema: Any) -> State:
    """Load a state and verify its checksums.

    Raises:
        ValueError, OSError: the state is damaged or cannot be read.
    """
    digest, _, body = read_bytes(manifest, max_bytes=MAX_MANIFEST).partition(b"\n")
    body = body.removesuffix(b"\n")
    if digest.decode("ascii", "replace") != hashlib.sha256(body).hexdigest():
        raise ValueError(f"{manifest.name} is damaged: its sha256 differs from the first line")
    metadata = parse_json(body, schema, manifest.name)
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is {metadata['format']}, but this version of weft reads format {FORMAT}")
    path = manifest.with_suffix(".safetensors")
    if f"step-{metadata['step']:010}" != path.stem:
        raise ValueError(f"its manifest is of step {metadata['step']}")
    size = os.stat(path).st_size
    if size != metadata["bytes"]:
        raise ValueError(f"{path.name} must have {metadata['bytes']:,} bytes; it has {size:,}")
    if sha256_of(path) != metadata["sha256"]:
        raise ValueError(f"{path.name} is damaged: its sha256 differs from the manifest")
    try:
        return State(load(path.read_bytes()), metadata)
    except SafetensorError as error:
        raise ValueError(f"{path.name} cannot be read: {reason_of(error)}") from error


def _reason_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    return str(error)
