"""Training states: tensors and a sealed manifest, the newest few of a run.

state/step-0000000120.safetensors   weights, their average, moments of the optimiser
state/step-0000000120.json          sha256 of that file, place in the run, history, and its own sha256 in the first line

The second is written last: a state without it does not exist. A state that fails its check is passed over for the one
before. Safetensors holds no code, so reading a state runs none.
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

from weft.durable import flush_folder, reached, sha256_of, sweep, write_whole, writing
from weft.errors import CheckpointError
from weft.processor import MAX_THREADS
from weft.reading import parse_json, read_bytes

FORMAT = 1


MAX_MANIFEST = 256 << 20  # a line of history per epoch, a number per parameter
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]


@with_config(extra="allow")
class Sealed(TypedDict):
    """What every state says about its file of tensors."""

    format: Count
    step: Count
    sha256: str
    bytes: Count


class MeterFacts(TypedDict):
    """As `weft.train.loop.Meter`."""

    step: Count
    steps: Count
    count: Count
    loss_sum: float
    hits: float
    seconds: NotRequired[float]
    waiting: NotRequired[float]
    seen: NotRequired[Count]


class BestFacts(TypedDict):
    """As `weft.train.session.Best`."""

    epoch: Count
    loss: float
    top1: float
    top5: float
    count: Count


@with_config(extra="allow")
class MachineFacts(TypedDict):
    """As `weft.train.build.machine`; versions and names beside."""

    threads: Threads
    processes: NotRequired[Annotated[int, Field(ge=1, le=1 << 20)]]


class TeacherFacts(TypedDict):
    """As `weft.train.distillation.Teacher.record`."""

    architecture: str
    preprocessing: dict[str, list[float] | None]
    weights_sha256: str


@with_config(extra="allow")
class RunFacts(Sealed):
    """What a state of a run says beside: where it is, what came out so far, what it ran on."""

    epoch: Annotated[int, Field(ge=0, le=1_000_000)]
    skipped: Count
    meter: MeterFacts
    history: list[tuple[Count, Count, float, float, float, float, float, float, float, float, float]]
    best: BestFacts | None
    without_better: Count
    seconds: Annotated[float, Field(ge=0)]
    machine: MachineFacts
    optimizer: dict[str, bool | int | float | None]
    groups: list[dict[str, Count]]
    recipe: NotRequired[dict[str, str]]
    teacher: NotRequired[TeacherFacts | None]


class State(NamedTuple):
    """One state, as read.

    Attributes:
        tensors: by name.
        facts: plain values: where in the run, what came out so far, what it ran on.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Skipped(NamedTuple):
    """A state that cannot be used, and why."""

    path: Path
    reason: str


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], keep: int) -> Path:
    """Writes a state, and then removes all but the newest `keep`.

    Returns:
        The file of tensors.

    Raises:
        StorageError: the disk did not take it; the states before are as they were.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:010}.safetensors"
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = write_whole(path, data)
    reached("before manifest")
    body = json.dumps({**facts, "format": FORMAT, "step": step, "sha256": digest, "bytes": len(data)})
    write_whole(path.with_suffix(".json"), f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode())
    reached("before rotate")
    with writing(folder):
        for manifest in _manifests(folder)[keep:]:
            manifest.unlink(missing_ok=True)
            reached("in rotate")
            manifest.with_suffix(".safetensors").unlink(missing_ok=True)
        flush_folder(folder)
    reached("after rotate")
    return path


def load_state(folder: Path, kind: Any = Sealed) -> tuple[State, list[Skipped]]:
    """The newest state that passes its check, and the newer ones that do not.

    Args:
        folder: the states.
        kind: what their facts must have beside what `save_state` adds; a TypedDict that extends `Sealed`.

    Raises:
        CheckpointError: there is none.
    """
    skipped: list[Skipped] = []
    for manifest in _manifests(folder):
        try:
            return _checked(manifest, kind), skipped
        except (ValueError, OSError) as error:
            skipped.append(Skipped(manifest.with_suffix(""), _sentence(error)))
    tried = f" {told(skipped)}" if skipped else ""
    raise CheckpointError(
        f"A run that goes on must have a state to go on from; {folder} holds none that can be used.{tried}"
        " Start again with weft train --config, or copy the folder back from where it is whole."
    )


def newest_step(folder: Path) -> int | None:
    """Step of the newest state that has a manifest; None where there is none."""
    newest = next(iter(_manifests(folder)), None)
    return None if newest is None else int(newest.stem.rpartition("-")[2])


def told(skipped: Iterable[Skipped]) -> str:
    """What was passed over and why, as text."""
    return " ".join(f"{item.path.name}: {item.reason}." for item in skipped)


def tidy(folder: Path) -> None:
    """Removes what killed processes left half written, and tensors that no manifest vouches for."""
    with writing(folder):
        sweep(folder, lambda path: path.unlink(missing_ok=True))
        for path in folder.glob("step-*.safetensors"):
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)


def _manifests(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def _checked(manifest: Path, kind: Any) -> State:
    """A state that is what was written, or a ValueError or OSError that says why not."""
    seal, _, body = read_bytes(manifest, max_bytes=MAX_MANIFEST).partition(b"\n")
    body = body.removesuffix(b"\n")
    if seal.decode("ascii", "replace") != hashlib.sha256(body).hexdigest():
        raise ValueError(f"{manifest.name} is damaged")
    facts = parse_json(body, kind, manifest.name)
    if facts["format"] != FORMAT:
        raise ValueError(f"it has format {facts['format']}, of another version of weft; this one reads {FORMAT}")
    path = manifest.with_suffix(".safetensors")
    if f"step-{facts['step']:010}" != path.stem:
        raise ValueError(f"it says that it is of step {facts['step']}")
    size = os.stat(path).st_size
    if size != facts["bytes"]:
        raise ValueError(f"{path.name} should have {facts['bytes']:,} bytes and has {size:,}")
    if sha256_of(path) != facts["sha256"]:
        raise ValueError(f"{path.name} is damaged: its sha256 is not the one that was written")
    try:
        return State(load(path.read_bytes()), facts)
    except SafetensorError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    return str(error)
