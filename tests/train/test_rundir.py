"""A run directory takes nothing that is not its own, and a file in it is whole or not there."""

from __future__ import annotations

import csv
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.data.prepare import prepare_data
from weft.errors import CheckpointError, StorageError, UsageError
from weft.files import new_directory, write_file, writing
from weft.runs import directory as rundir
from weft.runs.directory import (
    CONTENTS,
    PROBE,
    REPLACEABLE,
    EpochRow,
    StepLog,
    make_dir,
    read_metrics,
    write_metrics,
)
from weft.train.state import newest_step

HEX = "0a1b2c3d"  # part of a temporary name
ROW = EpochRow(1, 22, 1e-6, 2.2279612, 18.3949, 1.5, 40.39, 84.67, 89.8, 3.1, 16.2)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_process_had_moved_away(is_there: bool, tmp_path: Path) -> None:
    """It is restored if its place is empty; otherwise it is removed."""
    old = tmp_path / f".out.{HEX}.old"
    old.mkdir()
    (old / "config.json").write_text("old")
    (tmp_path / f".other.{HEX}.old").mkdir()
    if is_there:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("present")
    with pytest.raises(UsageError, match="must be new"), new_directory(tmp_path / "out", (), force=False):
        pass
    assert (tmp_path / "out" / "config.json").read_text() == ("present" if is_there else "old")
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f".other.{HEX}.old", "out"]
    with new_directory(tmp_path / "out", ("config.json",), force=True) as folder:
        (folder / "config.json").write_text("new")
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_a_new_directory_with_its_parents(tmp_path: Path) -> None:
    make_dir(tmp_path / "a" / "b", REPLACEABLE, force=False)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    make_dir(tmp_path / "a" / "b", REPLACEABLE, force=False)  # empty is as good as new


@pytest.mark.parametrize("path", [".", "/", "..", "a/.."])
def test_what_is_replaced_as_a_whole_has_a_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = re.escape(f"must end in a name, since it is replaced as a whole; got '{path}'")
    with pytest.raises(UsageError, match=message):
        prepare_data("digits", path, 16, force=True)
    with pytest.raises(UsageError, match=message):
        write_file(Path(path), "")
    with pytest.raises(UsageError, match=message), new_directory(Path(path), (), force=True):
        pass


def test_two_threads_that_write_one_directory(tmp_path: Path) -> None:
    """The second one fails, and leaves what the first one has written."""
    with new_directory(tmp_path / "out", (), force=False) as folder:
        (folder / "file").write_text("first")
        with (
            pytest.raises(UsageError, match=r"Only one process at a time can write .*/out;"),
            new_directory(tmp_path / "out", (), force=False),
        ):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("precious")
    with pytest.raises(UsageError, match=r"must be new or empty; .* is neither\. Pass --force"):
        make_dir(tmp_path, REPLACEABLE, force=False)
    assert (tmp_path / "metrics.csv").read_text() == "precious"


def test_force_replaces_a_run(tmp_path: Path) -> None:
    for name in CONTENTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    make_dir(tmp_path, REPLACEABLE, force=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_force_removes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"also holds 'thesis\.tex'"):
        make_dir(tmp_path, REPLACEABLE, force=True)
    assert (tmp_path / "best").is_dir()
    file = tmp_path / "thesis.tex"
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        make_dir(file, REPLACEABLE, force=True)
    assert file.read_text() == "years of work"


def test_force_removes_a_link_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").symlink_to(tmp_path / "elsewhere")
    make_dir(tmp_path / "run", REPLACEABLE, force=True)
    assert (tmp_path / "elsewhere" / "model").read_text() == "kept"
    assert not (tmp_path / "run" / "best").exists()


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        make_dir(tmp_path / "file" / "run", REPLACEABLE, force=False)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    write_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"metrics\.csv must be writable; No space left on device"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_obey_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "x", "text\n")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_other_errors_pass_through() -> None:
    with pytest.raises(ValueError, match="mine"), writing(Path("x")):
        raise ValueError("mine")
    inner = StorageError("inner")
    with pytest.raises(StorageError, match=r"^inner$"), writing(Path("x")):
        raise inner


def test_metrics(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.csv", [ROW, ROW._replace(epoch=2)])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(EpochRow._fields)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[0]["train_loss"]) == pytest.approx(ROW.train_loss, rel=1e-5)
    assert rows[0]["lr"] == "1e-06"


TORN = [
    b"3",
    b"3,1,0.1,2.5,",
    b"3,1,0.1,2.5,0",
    b"3,1,,,",
    b",,,,",
    b"x,1,1,1,1\n",
    b"\0\0\0\0,,,,\n",
    b"\xff\xfe,1,1,1,1\n",
]


@pytest.mark.parametrize("torn", TORN, ids=str)
def test_a_row_of_steps_that_is_not_whole_is_removed(torn: bytes, tmp_path: Path) -> None:
    """And those of steps that will be repeated; the others stay as they are."""
    rows = b"step,epoch,lr,loss,grad_norm\n1,1,0.1,2.5,nan\n2,1,0.1,inf,0.5\n"
    file = tmp_path / "steps.csv"
    file.write_bytes(rows + b"9,1,0.1,2.5,0.5\n" + torn)
    StepLog(file, 3).close()
    assert file.read_bytes() == rows


@pytest.mark.parametrize("torn", [b"\xff\xfe", b"2,44", b"2,44," + b"x," * 9, b"\r\0", b'"' + b"a" * 200_000], ids=len)
def test_damaged_metrics_are_one_sentence(torn: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    write_metrics(file, [ROW])
    file.write_bytes(file.read_bytes() + torn)
    with pytest.raises(CheckpointError, match=r"metrics.csv must have the columns and values that the run wrote"):
        read_metrics(file)


def test_a_lock_that_is_a_link_opens_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock = tmp_path / "run" / rundir.LOCK
    lock.parent.mkdir(parents=True)
    for target in (precious, tmp_path / "not there"):
        lock.unlink(missing_ok=True)
        lock.symlink_to(target)
        with pytest.raises(StorageError, match="must be writable"), rundir.locked(tmp_path / "run"):
            pass
    assert precious.read_text() == "mine"
    assert not (tmp_path / "not there").exists()


HOLDER = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
for line in sys.stdin:
    file.truncate(0)
    file.write(f"{os.getpid()}\\n")
    file.flush()
    print("written", flush=True)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked a run directory; it writes its number for every line that it receives."""
    lock = tmp_path / "run" / rundir.LOCK
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process


@pytest.mark.parametrize("content", ["", "dead"])
def test_a_lock_without_a_process_number_is_read_again(
    content: str, holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that holds the lock may not have written its number yet; that of a killed process is not shown."""
    if content:
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            pass
        (tmp_path / "run" / rundir.LOCK).write_text(f"{ended.pid}\n")
    naps: list[float] = []

    def write_meanwhile(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write("write\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "written\n"

    monkeypatch.setattr(rundir.time, "sleep", write_meanwhile)
    monkeypatch.setattr(rundir, "RETRY_S", 60.0)
    with (
        pytest.raises(UsageError, match=rf"is in use by process {holder.pid}\. Wait for it"),
        rundir.locked(tmp_path / "run"),
    ):
        pass
    assert len(naps) == 2


def test_a_lock_that_stays_without_a_process_number_is_of_an_unknown_process(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "RETRY_S", 0.02)
    with pytest.raises(UsageError, match=r"is in use by process unknown\."), rundir.locked(tmp_path / "run"):
        pass
    assert holder.poll() is None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_a_directory_in_use(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("weft.machine.system.fcntl.lockf", lockf)
    message = rf"must support locks; that of \S+ does not \({os.strerror(code)}\)\. Choose another --out"
    with pytest.raises(StorageError, match=message), rundir.reserved_numbered(tmp_path / "runs" / "photos"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_that_was_killed_while_it_reserved_a_directory_left_is_no_state(tmp_path: Path) -> None:
    """Else the run of a fold would be resumed from it."""
    assert len(PROBE.name) == len("step-0000000001.safetensors")  # it stands for the longest path
    (tmp_path / PROBE).parent.mkdir()
    (tmp_path / PROBE).write_bytes(b"")
    assert newest_step(tmp_path / PROBE.parent) is None
