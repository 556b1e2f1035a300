"""Differences between operating systems, with the calls of the others simulated on Linux."""

from __future__ import annotations

import errno
import os
import sys
import types
import unicodedata
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from weft import files
from weft.errors import UsageError
from weft.machine import system
from weft.machine.system import MAX_NAME_BYTES, file_name
from weft.runs import directory
from weft.study.plan import slug

PORTS = {f"{name}{i}" for name in ("com", "lpt") for i in "0123456789¹²³"}
DEVICES = PORTS | {"con", "prn", "aux", "nul", "conin$", "conout$"}
REFUSED = set('<>:"/\\|?*') | {chr(code) for code in range(32)}


def assert_is_safe(name: str) -> None:
    assert not REFUSED & set(name)
    assert name not in ("", ".", "..")
    assert name[0] not in ". "
    assert name[-1] not in ". "
    assert name.partition(".")[0].lower() not in DEVICES
    assert len(name.encode()) <= MAX_NAME_BYTES
    assert unicodedata.is_normalized("NFC", name)
    assert PureWindowsPath(name).parts == (name,)


NAMES = st.text() | st.sampled_from(sorted(DEVICES)) | st.from_regex(r"(?i)(con|nul|com1|lpt²)[. ].*", fullmatch=True)


@given(NAMES)
@settings(max_examples=examples(4000), deadline=None)
@example("CON")
@example("nul.tar.gz")
@example("com¹.png")
@example("a" * 99 + "é")
@example("a" * 99 + ".b")
@example("\ud800")
@example("e\u0301" * 200)
@example("..")
def test_file_names_that_every_system_accepts(text: str) -> None:
    for function in (file_name, slug):
        name = function(text)
        assert_is_safe(name)
        assert function(name) == name
    if unicodedata.is_normalized("NFC", text):
        assert file_name(unicodedata.normalize("NFD", text)) == file_name(text)


@pytest.mark.parametrize(
    ("function", "text", "name"),
    [
        (file_name, "levit_256.fb_dist_in1k-photos 2", "levit_256.fb_dist_in1k-photos_2"),
        (file_name, "사진 é 猫.v2", "사진_é_猫.v2"),
        (file_name, "C:\\photos", "C__photos"),
        (file_name, "NUL", "_NUL"),
        (file_name, "console", "console"),
        (file_name, " . ", "_._"),
        (file_name, "...", "unnamed"),
        (slug, "3x3 conv, no BN", "3x3-conv-no-bn"),
        (slug, "con", "_con"),
        (slug, "사진", "사진"),
        (slug, "猫 1", "猫-1"),
    ],
)
def test_names_stay_readable(function, text, name):
    assert function(text) == name


def simulate_windows_locks(setattr_: object) -> None:
    """Replace `fcntl` of weft by a module with the interface of `msvcrt`: it locks bytes from the file's position."""
    import fcntl

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        assert mode == msvcrt.LK_NBLCK
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, 0, os.SEEK_CUR)

    msvcrt = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
    sys.modules["msvcrt"] = msvcrt  # type: ignore[assignment]
    setattr_(system, "fcntl", None)  # type: ignore[operator]


@pytest.fixture
def windows_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msvcrt", None)  # type: ignore[arg-type]  # restored at the end
    simulate_windows_locks(monkeypatch.setattr)


@pytest.mark.usefixtures("windows_locks")
def test_a_run_directory_is_locked_by_msvcrt(tmp_path):
    """By a child process, since a process does not lock itself out."""
    run = tmp_path / "run"
    (locked, say_locked), (end, say_end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(say_end)
        try:
            with directory.locked(run):
                os.write(say_locked, b"locked")
                os.read(end, 1)  # until the other side is closed
        finally:
            os._exit(0)
    os.close(say_locked)
    try:
        assert os.read(locked, 6) == b"locked"
        with pytest.raises(UsageError, match=f"in use by process {child}"), directory.locked(run):
            pass
    finally:
        os.close(say_end)
        os.waitpid(child, 0)
    with directory.locked(run):
        assert (run / directory.LOCK).read_text() == f"{os.getpid()}\n"  # the locked byte is beyond the content


@pytest.mark.parametrize("code", [errno.EACCES, errno.EAGAIN, errno.EDEADLK])
def test_only_some_errors_mean_that_a_file_is_locked(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.lockf", lockf)
    assert not system.lock_file(0)
    code = errno.ENOLCK
    with pytest.raises(OSError, match=os.strerror(code)):
        system.lock_file(0)


@pytest.mark.usefixtures("windows_locks")
def test_a_refused_run_leaves_nothing_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows removes no open file, so the lock goes after it has been closed."""
    monkeypatch.setattr(directory, "IS_WINDOWS", True)

    unlink = Path.unlink

    def refuse(path: Path, **options: Any) -> None:
        if (tmp_path / "a" / "run").resolve() in directory._LOCKED and path.name == directory.LOCK.name:
            raise PermissionError(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UsageError, match="refused"), directory.reserved(tmp_path / "a" / "run", force=False):
        raise UsageError("refused")
    assert list(tmp_path.iterdir()) == []


def test_renames_are_repeated_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = os.replace, [PermissionError("in use")] * 3

    def replace(source: Path, target: Path) -> None:
        if failures:
            raise failures.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "a").write_text("x")
    with pytest.raises(PermissionError):
        system.rename(tmp_path / "a", tmp_path / "b")
    assert len(failures) == 2
    monkeypatch.setattr(system, "IS_WINDOWS", True)
    files.write_file(tmp_path / "b", "y")
    assert (tmp_path / "b").read_text() == "y"
    monkeypatch.setattr(system, "RENAME_S", 0)
    failures.append(PermissionError("in use"))
    with pytest.raises(PermissionError):
        system.rename(tmp_path / "a", tmp_path / "b")


def test_memory_without_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = system.peak_mib()
    monkeypatch.setitem(sys.modules, "resource", None)  # type: ignore[arg-type]
    assert 0 < system.peak_mib() <= peak + 50  # psutil has no peak on Linux: the memory in use
