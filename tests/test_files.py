"""Output files and directories: complete or as they were before, and nothing else is replaced."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.killpoints import killed_at
from weft.data.prepare import prepare_data
from weft.errors import StorageError, UsageError
from weft.files import check_output, new_directory, write_file, writing

HEX = "0a1b2c3d"  # part of a temporary name


def write(out: Path, content: str) -> None:
    with new_directory(out, ("file",), force=True) as folder:
        (folder / "file").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_while_a_directory_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Before every rename, removal and flush."""
    number = 0
    write(tmp_path / "out", "old")
    while killed_at(number, lambda: write(tmp_path / "out", "new")):
        with pytest.raises(UsageError, match="must be new or empty"):
            check_output(tmp_path / "out", force=False)
        assert names(tmp_path) == ["out"], number
        assert (tmp_path / "out" / "file").read_text() in ("old", "new")
        write(tmp_path / "out", "old")
        number += 1
    assert number == 5
    assert (tmp_path / "out" / "file").read_text() == "new"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_moved_away_by_a_killed_process_is_restored_if_its_place_is_empty(is_there, tmp_path):
    for name in (f".out.{HEX}.old", f".other.{HEX}.old", *(["out"] if is_there else [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(UsageError, match="must be new"):
        check_output(tmp_path / "out", force=False)
    assert (tmp_path / "out" / "file").read_text() == ("out" if is_there else f".out.{HEX}.old")
    assert names(tmp_path) == [f".other.{HEX}.old", "out"]


def test_without_locks_a_directory_that_a_process_may_be_writing_stays(tmp_path, monkeypatch):
    """On Windows and some network file systems. What was moved away is restored."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    for suffix in ("old", "part"):
        (tmp_path / f".out.{HEX}.{suffix}").mkdir()
        (tmp_path / f".out.{HEX}.{suffix}" / "file").write_text(suffix)
    with pytest.raises(UsageError, match="must be new or empty"):
        check_output(tmp_path / "out", ("file",), force=False)
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == [f".out.{HEX}.part", "out"]


WRITER = """
import pathlib, sys
from weft.files import new_directory
with new_directory(pathlib.Path(sys.argv[1]), force=False) as folder:
    (folder / "half").touch()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_directory_that_another_process_writes_is_left_alone_until_that_process_has_ended(tmp_path: Path) -> None:
    """The lock tells, not the number of its process: every main process of a container has number 1, and on a shared
    disk it may be that of another host."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(UsageError, match="another one does"):
            write(tmp_path / "out", "ours")
        (temporary,) = tmp_path.iterdir()
        assert names(temporary) == ["half"]
        writer.kill()
    write(tmp_path / "out", "ours")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/file"]


def test_of_several_threads_that_write_one_directory_each_succeeds_or_is_refused(tmp_path: Path) -> None:
    wrong: list[BaseException] = []

    def repeat() -> None:
        for _ in range(25):
            try:
                write(tmp_path / "out", "whole")
            except (UsageError, StorageError):
                continue
            except BaseException as error:
                wrong.append(error)

    writers = [threading.Thread(target=repeat) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert wrong == []
    assert (tmp_path / "out" / "file").read_text() == "whole"
    with new_directory(tmp_path / "new", force=False) as folder:
        (folder / "file").write_text("first")
        with pytest.raises(UsageError, match=r"Only one process at a time can write .*/new;"):
            write(tmp_path / "new", "second")
    assert names(tmp_path) == ["new", "out"]
    assert (tmp_path / "new" / "file").read_text() == "first"


@pytest.mark.parametrize("path", [".", "/", "..", "a/.."])
def test_what_is_replaced_as_a_whole_has_a_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = re.escape(f"must end in a name, since it is replaced as a whole; got '{path}'")
    for replace in (
        lambda: prepare_data("digits", path, 16, force=True),
        lambda: write_file(Path(path), ""),
        lambda: write(Path(path), ""),
    ):
        with pytest.raises(UsageError, match=message):
            replace()


def test_a_link_is_replaced_and_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody prepared at the place of a file, or of its temporary file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr("weft.files.secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / ".x.00000000.part").symlink_to(precious)
    with pytest.raises(StorageError, match="File exists"):
        write_file(tmp_path / "x", b"new")
    (tmp_path / "y").symlink_to(precious)
    for name in ("x", "y"):
        write_file(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"
        assert not (tmp_path / name).is_symlink()
    assert precious.read_text() == "mine"


def test_permissions_obey_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "x", "text\n")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_the_old_directory_stays_if_it_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        if source.suffix == ".part":
            raise OSError(errno.EIO, "Input/output error")
        os.rename(source, target)

    write(tmp_path / "out", "old")
    monkeypatch.setattr("weft.files.rename", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError("mine"), StorageError("mine")])
def test_errors_that_are_not_of_the_system_pass_through(error: Exception) -> None:
    with pytest.raises(type(error), match=r"^mine$"), writing(Path("x")):
        raise error
