"""Training states: one file of named tensors and one record, verified by a checksum.

state/step-0000000120.safetensors
    model.NAME, ema.NAME, optimizer.PARAMETER.FIELD   weights, their average, state of the optimizer
    __metadata__                                      format, `RunState` as JSON, sha256 of tensors and `RunState`

A file is complete or absent. If one is damaged, the state before it is loaded. Loading executes no code: safetensors
files contain none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, uint8

from weft.errors import CheckpointError, StorageError
from weft.files import flush_folder, sha256_of, write_file, writing
from weft.reading import parse_json
from weft.runs.directory import EpochRow
from weft.text import reason_of
from weft.train.environment import MachineRecord
from weft.train.loop import Count, Meter

FORMAT = "2"


@dataclass
class RunState:
    """Values besides tensors with which a run continues as if it had not been interrupted.

    Attributes:
        step: number of completed steps.
        meter: metrics of the epoch in progress.
        history: a row for each epoch that has ended.
        unimproved: evaluations since the best one.
        seconds: duration of training and evaluation.
        optimizer: values of the optimizer that are not tensors, by PARAMETER.FIELD; those of all parameters by FIELD.
        recipe: settings that affect the result, as JSON by dotted key.
        machine: software and hardware that the last bits depend on.
        teacher: `Teacher.record`; None without distillation.
        damaged: keys of the training images in place of which others were used.
        by_files: whether images of some files at a time are shuffled, as of shards on a server.
    """

    step: Count
    meter: Meter
    history: list[EpochRow]
    unimproved: Count
    seconds: Annotated[float, Field(ge=0)]
    optimizer: dict[str, bool | int | float]
    recipe: dict[str, str]
    machine: MachineRecord
    teacher: dict[str, Any] | None
    damaged: list[str] = field(default_factory=list)
    by_files: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if the epochs of the history do not end in order, or after the step."""
        for number in ("epoch", "step"):
            values = [0, *(getattr(row, number) for row in self.history), self.step]
            if values != sorted(values):
                raise ValueError(f"the {number}s of its history must ascend to step {self.step}; got {values[-4:-1]}")


def save_state(folder: Path, tensors: Mapping[str, Tensor], state: RunState, keep: int) -> Path:
    """Write a state atomically, then remove all but the newest `keep` states.

    Returns:
        The path of the file.

    Raises:
        StorageError: the state cannot be written; earlier states are unchanged.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
    path = folder / _name(state.step)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = json.dumps(asdict(state))
    write_verified(path, save(own, {"format": FORMAT, "state": record, "sha256": _sha256(own, record)}))
    with writing(folder):
        for old in _states(folder)[keep:]:
            old.unlink(missing_ok=True)
        flush_folder(folder)
    return path


def write_verified(path: Path, data: bytes) -> None:
    """Write a file atomically, and read it back to verify it before it takes its place.

    On Linux its pages are dropped from the page cache first, so that the file system reads the device. Elsewhere, and
    on file systems in memory, the check only shows that the file has the expected bytes.

    Raises:
        StorageError: the file cannot be written, or reads back differently. An existing file is unchanged.
    """

    def check(written: Path) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), written.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if sha256_of(written) != hashlib.sha256(data).hexdigest():
            raise StorageError(f"{path} must read back as it was written; it does not. Check the disk for errors.")

    write_file(path, data, check)


def load_state(folder: Path) -> tuple[RunState, dict[str, Tensor], dict[Path, str]]:
    """Load the newest valid state; also return the newer ones that are not valid, with reasons.

    Raises:
        CheckpointError: there is no valid state.
    """
    skipped: dict[Path, str] = {}
    for path in _states(folder):
        try:
            return *_load_verified(path), skipped
        except OSError as error:
            skipped[path] = f"it cannot be read ({error.strerror})"
        except ValueError as error:
            skipped[path] = str(error)
    raise CheckpointError(
        f"A run can only be resumed from a valid saved state; {folder} has none.{skipped_text(skipped)}"
        f" Start the run again with weft train --config {folder.parent / 'recipe.yaml'}, or restore a copy of {folder}."
    )


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest state; None if there is none."""
    newest = next(iter(_states(folder)), None)
    return None if newest is None else int(newest.stem.rpartition("-")[2])


def skipped_text(skipped: Mapping[Path, str]) -> str:
    """Format states that are not valid with their reasons, a sentence each, each after a space."""
    return "".join(f" {path.stem}: {reason.rstrip('.')}." for path, reason in skipped.items())


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes of tensors, sorted by name, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def _sha256(tensors: Mapping[str, Tensor], record: str) -> str:
    return hashlib.sha256(f"{sha256_of_tensors(tensors)} {record}".encode()).hexdigest()


def _name(step: int) -> str:
    return f"step-{step:010}.safetensors"


def _states(folder: Path) -> list[Path]:
    """Return the states in a folder, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def _load_verified(path: Path) -> tuple[RunState, dict[str, Tensor]]:
    """Load a state and verify its checksum; raise ValueError or OSError if it is damaged or cannot be read."""
    data = path.read_bytes()
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"it is damaged ({reason_of(error)})") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header.get("__metadata__", {})
    found = metadata.get("format")
    if found != FORMAT:
        found = "none, as states of earlier versions of weft" if found is None else found
        raise ValueError(f"it must have format {FORMAT}; it has {found}")
    record = metadata.get("state", "")
    if metadata.get("sha256") != _sha256(tensors, record):
        raise ValueError("it is damaged: its sha256 differs from the recorded one")
    state = parse_json(record.encode(), RunState, "its record")
    if path.name != _name(state.step):
        raise ValueError(f"it is of step {state.step}, not of the step in its name")
    return state, tensors
