"""A run directory holds nothing but its own files, is used by one process, and repairs its tables."""

from __future__ import annotations

import csv
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import CheckpointError, StorageError, UsageError
from weft.runs import directory
from weft.runs.directory import CONTENTS, LOCK, EpochRow, StepLog, make_dir, read_metrics, write_metrics

ROW = EpochRow(1, 22, 1e-6, 2.2279612, 18.3949, 1.5, 40.39, 84.67, 89.8, 3.1, 16.2)


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    for _ in range(2):  # empty is as good as new
        make_dir(tmp_path / "a" / "b", force=False)
        assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_run_is_replaced_only_by_force(tmp_path: Path) -> None:
    for name in CONTENTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    with pytest.raises(UsageError, match=r"must be new or empty; .* is neither\. Pass --force"):
        make_dir(tmp_path, force=False)
    assert all((tmp_path / name / "old").exists() for name in CONTENTS)
    make_dir(tmp_path, force=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_force_removes_nothing_of_others(tmp_path: Path) -> None:
    """Neither other files beside the run, nor what a link in it points to."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "best").symlink_to(tmp_path / "elsewhere")
    thesis = run / "thesis.tex"
    thesis.write_text("years of work")
    for path in (run, thesis):
        with pytest.raises(UsageError, match=r"thesis\.tex"):
            make_dir(path, force=True)
    with pytest.raises(StorageError, match="Not a directory"):
        make_dir(thesis / "run", force=False)
    assert thesis.read_text() == "years of work"
    assert (run / "best").exists()
    thesis.unlink()
    make_dir(run, force=True)
    assert list(run.iterdir()) == []
    assert (tmp_path / "elsewhere" / "model").read_text() == "kept"


# Tables


def test_metrics_are_rounded_and_read_again(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.csv", [ROW, ROW._replace(epoch=2)])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(EpochRow._fields)
    assert (rows[0]["lr"], rows[0]["train_loss"]) == ("1e-06", "2.22796")
    assert [row.epoch for row in read_metrics(tmp_path / "metrics.csv")] == [1, 2]


@pytest.mark.parametrize(
    "torn",
    [b"3", b"3,1,0.1,2.5,", b"3,1,0.1,2.5,0", b"3,1,,,", b",,,,", b"x,1,1,1,1\n", b"\0\0\0\0,,,,\n", b"\xff,1,1,1,1\n"],
    ids=str,
)
def test_a_row_of_steps_that_is_incomplete_or_will_be_repeated_is_removed(torn: bytes, tmp_path: Path) -> None:
    rows = b"step,epoch,lr,loss,grad_norm\n1,1,0.1,2.5,nan\n2,1,0.1,inf,0.5\n"
    file = tmp_path / "steps.csv"
    file.write_bytes(rows + b"9,1,0.1,2.5,0.5\n" + torn)
    StepLog(file, 3).close()
    assert file.read_bytes() == rows


@pytest.mark.parametrize("torn", [b"\xff\xfe", b"2,44", b"2,44," + b"x," * 9, b"\r\0", b'"' + b"a" * 200_000], ids=len)
def test_damaged_metrics_are_refused_with_the_command_that_repairs_them(torn: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    write_metrics(file, [ROW])
    file.write_bytes(file.read_bytes() + torn)
    with pytest.raises(CheckpointError, match=r"metrics.csv must have .* weft train --resume"):
        read_metrics(file)


# The lock


def test_a_lock_that_is_a_link_opens_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock = tmp_path / "run" / LOCK
    lock.parent.mkdir(parents=True)
    for target in (precious, tmp_path / "not there"):
        lock.unlink(missing_ok=True)
        lock.symlink_to(target)
        with pytest.raises(StorageError, match="must be writable"), directory.locked(tmp_path / "run"):
            pass
    assert precious.read_text() == "mine"
    assert not (tmp_path / "not there").exists()


HOLDER = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(sys.argv[2].replace("own", str(os.getpid())), file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("content", ["own", "4194305", ""])
def test_a_directory_in_use_is_refused_with_the_number_of_its_process(content: str, tmp_path: Path) -> None:
    """It is unknown while the lock file has that of a killed process, or none. The lock ends with its process."""
    lock = tmp_path / "run" / LOCK
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, str(lock), content]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        number = holder.pid if content == "own" else "unknown"
        message = rf"is in use by process {number}\. Wait for it"
        with pytest.raises(UsageError, match=message), directory.locked(tmp_path / "run"):
            pass
        holder.kill()
    with directory.locked(tmp_path / "run"):
        assert lock.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_a_directory_in_use(code, tmp_path, monkeypatch):
    def lockf(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("weft.machine.system.fcntl.lockf", lockf)
    message = rf"must support locks; that of \S+ does not \({os.strerror(code)}\)\. Choose another --out"
    with pytest.raises(StorageError, match=message), directory.reserved_numbered(tmp_path / "runs" / "photos"):
        pass
    assert list(tmp_path.iterdir()) == []
