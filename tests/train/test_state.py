"""States: complete or absent, checked to the bit, and the one before where the newest is damaged."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from tests.killpoints import Killed, killed_at, killpoints
from tests.train import tiny
from weft.errors import CheckpointError, StorageError
from weft.reading import MAX_BYTES
from weft.runs.directory import PROBE, EpochRow, sweep
from weft.train import state
from weft.train.environment import MachineRecord
from weft.train.loop import Meter
from weft.train.state import RunState, load_state, newest_step, save_state, sha256_of_tensors

TENSORS = {"model.weight": torch.arange(12.0).view(3, 4), "optimizer.weight.step": torch.tensor(3.0)}
CALLS = 8  # kill points of one save: a file, and the oldest state


def at(step: int, **values: Any) -> RunState:
    """The record of a run with an epoch of two steps and one that is not evaluated."""
    history = [EpochRow(one, 2 * one, 0.1, *[math.nan] * 8) for one in range(1, step // 2 + 1)]
    record = RunState(
        step,
        Meter(step % 2),
        history,
        unimproved=0,
        seconds=0.5,
        optimizer={"weight.use_muon": True},
        recipe={"seed": "0"},
        machine=cast(MachineRecord, {"threads": 2, "processes": 1, "torch": "2.0"}),
        teacher=None,
    )
    return dataclasses.replace(record, **values)


def save(folder: Path, step: int) -> Path:
    return save_state(folder, {name: tensor + step for name, tensor in TENSORS.items()}, at(step), keep=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the states of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_loaded_and_the_oldest_are_removed(saved: Path) -> None:
    path = save(saved, 3)
    found, tensors, skipped = load_state(saved)
    assert skipped == {}
    assert repr(found) == repr(at(3))  # nan is not equal to itself
    assert all(torch.equal(tensors[name], tensor + 3) for name, tensor in TENSORS.items())
    assert names(saved) == [f"step-000000000{number}.safetensors" for number in (2, 3)]
    assert path.read_bytes()[8:9] == b"{"  # tensors without a pickle, the record as JSON
    assert tiny.record_of(path)["step"] == 3


def test_a_long_history_is_loaded(tmp_path: Path) -> None:
    """Of many epochs, beyond the limit on other files."""
    record = at(1, recipe={"name": "x" * (MAX_BYTES + 1)})
    save_state(tmp_path, TENSORS, record, 2)
    assert load_state(tmp_path)[0].recipe == record.recipe


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"cut at {size}": lambda path, size=size: os.truncate(path, size) for size in (0, 1, 40)},
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another file": lambda path: path.write_bytes(b"PK\x03\x04 something else altogether"),
    "a folder": _folder,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_skipped_with_a_reason(damage: str, saved: Path) -> None:
    newest = save(saved, 3)
    DAMAGES[damage](newest)
    found, _, skipped = load_state(saved)
    assert found.step == 2
    assert list(skipped) == ([] if damage == "gone" else [newest])
    assert all(skipped.values())


def test_no_bit_may_flip(saved: Path) -> None:
    path = saved / "step-0000000002.safetensors"
    good, chance = path.read_bytes(), random.Random(0)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        found, _, skipped = load_state(saved)
        assert (found.step, len(skipped)) == (1, 1), place
    path.write_bytes(good)
    assert load_state(saved)[0].step == 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"step": 3}, "it is of step 3, not of the step in its name"),
        ({"history": [(1, 3, *[0.5] * 10)]}, "the steps of its history must ascend to step 2; got [0, 3]"),
        ({"history": [(-1, 1, *[0.5] * 10)]}, "the epochs of its history must ascend to step 2; got [0, -1]"),
        ({"machine": {"threads": 0, "processes": 1}}, "machine.threads: it must be greater than or equal to 1; got 0"),
        ({"meter": {"step": 0.5}}, "meter.step: it must be a valid integer"),
        ({"optimizer": {"weight.step": None}}, "optimizer.weight.step"),
    ],
)
def test_a_record_that_contradicts_itself_is_passed_over(values: dict[str, Any], reason: str, saved: Path) -> None:
    path = saved / "step-0000000002.safetensors"
    tiny.reseal(path, {**tiny.record_of(path), **values})
    found, _, skipped = load_state(saved)
    assert found.step == 1
    assert reason in skipped[path]


def test_without_a_valid_state_each_one_is_named_with_its_reason(saved, tmp_path, monkeypatch):
    """One that is damaged, one of an earlier version of weft, and one of a later version."""
    os.truncate(saved / "step-0000000001.safetensors", 10)
    save_file(TENSORS, saved / "step-0000000002.safetensors")
    monkeypatch.setattr(state, "FORMAT", "99")
    save_state(saved, TENSORS, at(3), keep=3)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has none") as caught:
        load_state(saved)
    for reason in (
        "step-0000000001: it is damaged (",
        "step-0000000002: it must have format 2; it has none, as states of earlier versions of weft",
        "step-0000000003: it must have format 2; it has 99",
    ):
        assert reason in str(caught.value)
    with pytest.raises(CheckpointError, match="has none"):
        load_state(tmp_path / "empty")


def test_a_file_left_by_a_process_killed_while_it_reserved_the_directory_is_no_state(tmp_path: Path) -> None:
    """Else the run of a fold would be resumed from it."""
    assert len(PROBE.name) == len("step-0000000001.safetensors")  # it stands for the longest path
    (tmp_path / PROBE).parent.mkdir()
    (tmp_path / PROBE).write_bytes(b"")
    assert newest_step(tmp_path / PROBE.parent) is None


# Kills, and what reaches the disk


def test_the_number_of_kill_points(saved: Path) -> None:
    passed: list[str] = []
    with killpoints(passed.append):
        save(saved, 3)
    assert set(passed) == {"open", "write", "fsync", "replace", "unlink"}
    assert len(passed) == CALLS


@pytest.mark.parametrize("number", range(CALLS))
def test_a_kill_at_every_point_leaves_the_old_or_the_new(number: int, saved: Path) -> None:
    assert killed_at(number, lambda: save(saved, 3))
    found, _, skipped = load_state(saved)
    assert found.step in (2, 3)
    assert skipped == {}
    sweep(saved)
    assert not [name for name in names(saved) if name.startswith(".")]
    assert load_state(saved)[0].step == found.step


def test_a_writer_in_place_would_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: written over what is there, a kill half-way leaves neither."""
    save(tmp_path, 1)

    def in_place(target: Path, data: bytes) -> str:
        target.write_bytes(data[: len(data) // 2])
        raise Killed

    monkeypatch.setattr(state, "write_verified", in_place)
    with pytest.raises(Killed):
        save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has none"):
        load_state(tmp_path)


def test_the_order_of_what_reaches_the_disk(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed, read back from the device, and moved; its folder is flushed; then the oldest state goes."""
    calls: list[str] = []

    def recorded(owner: Any, name: str, text: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def record(*args: Any, **more: Any) -> Any:
            calls.append(text(*args))
            return call(*args, **more)

        monkeypatch.setattr(owner, name, record)

    def is_folder(descriptor: int) -> bool:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")) == saved

    recorded(os, "fsync", lambda descriptor: f"flush the {'folder' if is_folder(descriptor) else 'file'}")
    recorded(os, "posix_fadvise", lambda *_: "empty the cache")
    recorded(state, "sha256_of", lambda _: "read")
    recorded(os, "replace", lambda *_: "move")
    recorded(Path, "unlink", lambda path: "" if path.name.startswith(".") else "remove")
    save(saved, 3)
    assert [call for call in calls if call] == [
        *("flush the file", "empty the cache", "read", "move", "flush the folder"),
        *("remove", "flush the folder"),
    ]


@pytest.mark.parametrize("cause", ["a quota", "a full disk"])
def test_a_state_that_does_not_fit_leaves_those_before(cause, saved, monkeypatch):
    before, limits = names(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    message = r"step-0000000003\.safetensors must be writable; .* for [\d,]+ bytes\. Free some space"
    try:
        if cause == "a quota":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        else:
            monkeypatch.setattr(os, "fsync", tiny.raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(StorageError, match=message):
            save_state(saved, {"big": torch.zeros(10_000)}, at(3), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(saved) == before
    assert load_state(saved)[0].step == 2


def test_what_the_disk_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"gone/state must be writable; No such file or directory"):
        save(tmp_path / "gone" / "state", 1)
    monkeypatch.setattr(state, "sha256_of", lambda path: "0" * 64)
    with pytest.raises(StorageError, match="must read back as it was written; it does not"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_the_hash_of_weights_is_of_names_dtypes_shapes_and_bytes() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.ones(2, dtype=torch.bfloat16)}
    others = [
        {**weights, "a": weights["a"].reshape(3, 2)},
        {**weights, "a": weights["a"].view(torch.int32)},
        {**weights, "a": weights["a"] + 0.5},
        {("d" if name == "a" else name): tensor for name, tensor in weights.items()},
        {name: tensor for name, tensor in weights.items() if name != "c"},
    ]
    assert len({sha256_of_tensors(one) for one in [weights, *others]}) == 6
    assert sha256_of_tensors(dict(reversed(weights.items()))) == sha256_of_tensors(weights)
    assert sha256_of_tensors({**weights, "a": weights["a"].t().contiguous().t()}) == sha256_of_tensors(weights)
