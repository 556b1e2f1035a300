"""States: whole or not there, checked to the bit, and the one before where the newest is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from tests.killpoints import killpoints
from tests.train import tiny
from weft import files
from weft.errors import CheckpointError, StorageError, UsageError
from weft.files import check_output, new_directory
from weft.reading import MAX_BYTES
from weft.runs.directory import EpochRow, sweep
from weft.train import state
from weft.train.environment import MachineRecord
from weft.train.meter import Meter
from weft.train.state import RunState, load_state, save_state

TENSORS = {"model.weight": torch.arange(12.0).view(3, 4), "optimizer.weight.step": torch.tensor(3.0)}


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


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_state(folder, {name: tensor + step for name, tensor in TENSORS.items()}, at(step), keep)


def saved(folder: Path, steps: int = 3, keep: int = 2) -> Path:
    for step in range(1, steps + 1):
        save(folder, step, keep)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_comes_back_and_the_oldest_go(tmp_path: Path) -> None:
    found, tensors, skipped = load_state(saved(tmp_path))
    assert skipped == {}
    assert repr(found) == repr(at(3))  # nan is not equal to itself
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor + 3)
    assert names(tmp_path) == [f"step-000000000{n}.safetensors" for n in (2, 3)]


def test_it_is_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(tmp_path / "state", 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def _cut(path: Path, where: int) -> None:
    os.truncate(path, where)


def _nul(path: Path, where: int) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def _foreign(path: Path, where: int) -> None:
    path.write_bytes(b"PK\x03\x04 something else altogether")


def _folder(path: Path, where: int) -> None:
    path.unlink()
    path.mkdir()


def _gone(path: Path, where: int) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_cut, _nul, _foreign, _folder, _gone])
@pytest.mark.parametrize("where", [0, 1, 40])
def test_a_damaged_state_is_passed_over(damage: Callable[[Path, int], None], where: int, tmp_path: Path) -> None:
    newest = saved(tmp_path) / "step-0000000003.safetensors"
    damage(newest, where)
    found, _, skipped = load_state(tmp_path)
    assert found.step == 2
    assert list(skipped) == ([] if damage is _gone else [newest])
    assert all(skipped.values())


def test_no_bit_may_flip(tmp_path: Path) -> None:
    path = saved(tmp_path, 2) / "step-0000000002.safetensors"
    good, chance = path.read_bytes(), random.Random(0)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        found, _, skipped = load_state(tmp_path)
        assert (found.step, len(skipped)) == (1, 1), place
    path.write_bytes(good)
    assert load_state(tmp_path)[0].step == 2


def test_where_none_is_good_all_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        _cut(path, 10)
    with pytest.raises(CheckpointError, match=r"has none") as caught:
        load_state(tmp_path)
    for step in (2, 3):
        assert f"step-000000000{step}: it is damaged (" in str(caught.value)
    with pytest.raises(CheckpointError, match="has none"):
        load_state(tmp_path / "empty")


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FORMAT", "99")
    saved(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="step-0000000001: it must have format 2; it has 99"):
        load_state(tmp_path)


def test_a_state_of_the_old_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """Two files, of which the tensors have no record."""
    save_file(TENSORS, tmp_path / "step-0000000005.safetensors")
    (tmp_path / "step-0000000005.json").write_text("0\n{}\n")
    with pytest.raises(
        CheckpointError,
        match=r"step-0000000005: it must have format 2; it has none, as states of earlier versions of weft\. Start",
    ):
        load_state(tmp_path)


def test_a_long_history_comes_back(tmp_path: Path) -> None:
    """Of many epochs, beyond the limit on other files."""
    record = at(1, recipe={"name": "x" * (MAX_BYTES + 1)})
    save_state(tmp_path, TENSORS, record, 2)
    assert load_state(tmp_path)[0].recipe == record.recipe


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
def test_a_record_that_contradicts_itself_is_passed_over(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = saved(tmp_path, 2) / "step-0000000002.safetensors"
    tiny.reseal(path, {**tiny.record_of(path), **values})
    found, _, skipped = load_state(tmp_path)
    assert found.step == 1
    assert reason in skipped[path]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


CALLS = 8  # kill points of one save: a file, and the oldest state


def test_the_number_of_kill_points(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    passed: list[str] = []
    with killpoints(passed.append):
        save(tmp_path, 3)
    assert set(passed) == {"open", "write", "fsync", "replace", "unlink"}
    assert len(passed) == CALLS


@pytest.mark.parametrize("number", range(CALLS))
def test_a_kill_at_every_point_leaves_the_old_or_the_new(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2)
    passed: list[str] = []

    def fatal(name: str) -> None:
        passed.append(name)
        if len(passed) > number:  # also later calls: a dead process cleans nothing up
            raise Killed

    with killpoints(fatal), pytest.raises(Killed):
        save(tmp_path, 3)
    found, _, skipped = load_state(tmp_path)
    assert found.step in (2, 3)
    assert skipped == {}
    sweep(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert load_state(tmp_path)[0].step == found.step


def test_a_writer_in_place_would_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: written over what is there, a kill half-way leaves neither."""
    saved(tmp_path, 1)
    path = tmp_path / "step-0000000001.safetensors"

    def in_place(target: Path, data: bytes) -> str:
        target.write_bytes(data[: len(data) // 2])
        raise Killed

    monkeypatch.setattr(state, "write_verified", in_place)
    with pytest.raises(Killed):
        save(tmp_path, 1)
    assert path.stat().st_size > 0
    with pytest.raises(CheckpointError, match="has none"):
        load_state(tmp_path)


def test_the_order_of_what_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed before it is moved, its folder after; then the oldest state goes."""
    saved(tmp_path, 2)
    calls: list[str] = []
    names_of: dict[int, str] = {}
    real = {"fsync": os.fsync, "replace": os.replace, "open": os.open, "unlink": Path.unlink}

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(f"fsync {'folder' if Path(path) == tmp_path else Path(path).name.split('.')[2]}")
        real["fsync"](descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(f"replace {Path(target).suffix[1:]}")
        real["replace"](source, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith("."):
            calls.append(f"unlink {path.suffix[1:]}")
        real["unlink"](path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink)
    save(tmp_path, 3)
    assert names_of == {}
    assert calls == [
        *("fsync safetensors", "replace safetensors", "fsync folder"),
        *("unlink safetensors", "fsync folder"),
    ]


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real limit on the size of files, as a quota sets one."""
    import resource
    import signal

    saved(tmp_path, 2)
    before = names(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(StorageError, match=r"step-0000000003\.safetensors must be writable; .* for [\d,]+ bytes"):
            save_state(tmp_path, {"big": torch.zeros(10_000)}, at(3), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == before
    assert load_state(tmp_path)[0].step == 2


def test_no_space_left_is_said_with_what_was_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 2)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device for [\d,]+ bytes\. Free some space"):
        save(tmp_path, 3)
    assert load_state(tmp_path)[0].step == 2


def test_a_folder_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone/state must be writable; No such file or directory"):
        save(tmp_path / "gone" / "state", 1)


def test_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "sha256_of", lambda path: "0" * 64)
    with pytest.raises(StorageError, match="must read back as it was written; it does not"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_no_code_is_in_a_state(tmp_path: Path) -> None:
    """Tensors without a pickle, facts as JSON."""
    path = saved(tmp_path, 1) / "step-0000000001.safetensors"
    assert tiny.record_of(path)["step"] == 1
    assert re.match(rb".{8}\{", path.read_bytes(), re.S)


def test_what_stands_where_a_file_is_written_first_is_never_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that somebody prepared in the directory of a run."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr("weft.files.secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / ".x.00000000.part").symlink_to(precious)
    with pytest.raises(StorageError, match="File exists"):
        files.write_file(tmp_path / "x", b"new")
    assert precious.read_text() == "mine"
    files.write_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    (tmp_path / "y").symlink_to(precious)
    files.write_file(tmp_path / "y", b"new")
    assert not (tmp_path / "y").is_symlink()
    assert precious.read_text() == "mine"


def test_without_locks_what_was_moved_away_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows and some network file systems; a process was killed between the two renames."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    old, half = tmp_path / ".out.01234567.old", tmp_path / ".out.89abcdef.part"
    for folder in (old, half):
        folder.mkdir()
        (folder / "result.json").write_text(folder.name)
    with pytest.raises(UsageError, match="must be new or empty"):
        check_output(tmp_path / "out", ("result.json",), force=False)
    assert (tmp_path / "out" / "result.json").read_text() == old.name
    assert half.exists()  # another process may be writing it


def test_writers_of_one_directory_get_a_sentence(tmp_path: Path) -> None:
    wrong: list[BaseException] = []

    def write() -> None:
        for _ in range(25):
            try:
                with new_directory(tmp_path / "out", ("x",), force=True) as folder:
                    (folder / "x").write_text("whole")
            except (UsageError, StorageError):
                continue
            except BaseException as error:
                wrong.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert wrong == []
    assert (tmp_path / "out" / "x").read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_another_process_writes_is_no_leftover(tmp_path: Path) -> None:
    """The lock tells, not the number of its process: every main process of a container has number 1, and on a shared
    disk it may be that of another host."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "out")], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(UsageError, match="another one does"), files.new_directory(tmp_path / "out", force=False):
            pass
        (temporary,) = tmp_path.iterdir()
        assert [path.name for path in temporary.iterdir()] == ["half"]
        writer.kill()
    with files.new_directory(tmp_path / "out", force=False) as folder:
        (folder / "whole").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/whole"]


WRITER = """
import pathlib, sys, time
from weft.files import new_directory
with new_directory(pathlib.Path(sys.argv[1]), force=False) as folder:
    (folder / "half").touch()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", range(8))
def test_a_kill_while_a_directory_is_replaced_leaves_the_old_or_the_new(number: int, tmp_path: Path) -> None:
    """Before every rename, removal and flush."""

    def write(content: str) -> None:
        with files.new_directory(tmp_path / "out", ("file",), force=True) as folder:
            (folder / "file").write_text(content)

    write("old")
    passed: list[str] = []

    def fatal(name: str) -> None:
        passed.append(name)
        if len(passed) > number:
            raise Killed

    with killpoints(fatal), contextlib.suppress(Killed):
        write("new")
    with pytest.raises(UsageError, match="must be new or empty"), files.new_directory(tmp_path / "out", force=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() in ("old", "new")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such call")
def test_what_is_read_back_is_out_of_the_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the flush and the check."""
    order: list[str] = []
    real_sync, real_advise, real_sum = os.fsync, os.posix_fadvise, state.sha256_of
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), real_sync(fd))[1])
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (order.append("forget"), real_advise(*args))[1])
    monkeypatch.setattr(state, "sha256_of", lambda path: (order.append("read"), real_sum(path))[1])
    state.write_verified(tmp_path / "x", b"new")
    assert order[:3] == ["fsync", "forget", "read"]
