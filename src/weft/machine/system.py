"""Differences between Linux, macOS and Windows: file locks, renames, file names, processes and memory."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

IS_WINDOWS = sys.platform == "win32"
RENAME_S = 2.0  # time to repeat a rename that Windows refuses
MAX_NAME_BYTES = 100  # of a file name; a number and a suffix are added to it, and file systems accept 255
_TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # errors of a lock that another process has
_LOCKED_BYTE = 1 << 30  # beyond the content of a lock file, which stays readable: Windows locks are mandatory
_RESERVED = re.compile(r"(con|prn|aux|nul|conin|conout|clock|(com|lpt)[0-9¹²³])(?![^.])", re.IGNORECASE)  # of Windows


def file_name(text: str) -> str:
    """Return a text as a file name that Linux, macOS and Windows accept and store unchanged.

    Letters and digits of all scripts, `-`, `_` and `.` stay; every other character becomes `_`. The name is in Unicode
    form NFC, has 1 to `MAX_NAME_BYTES` bytes in UTF-8, no dot at either end, and is no device of Windows (CON, NUL,
    COM1 ...). Different texts can give the same name, and names that differ in case only are one file on macOS and
    Windows.
    """
    composed = unicodedata.normalize("NFC", text)
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in composed).lstrip(".")
    safe = safe if _RESERVED.match(safe) is None else f"_{safe}"
    return safe.encode()[:MAX_NAME_BYTES].decode(errors="ignore").rstrip(".") or "unnamed"


def unused_name(stem: str, used: set[str]) -> str:
    """Return a text as a file name that is not in `used`, also not in another case, and add it."""
    stem = file_name(stem)
    name, number = stem, 1
    while name.lower() in used:
        number += 1
        name = f"{stem}-{number}"
    used.add(name.lower())
    return name


def lock_file(descriptor: int) -> bool:
    """Lock an open file for this process, until the file is closed.

    Returns:
        Whether the file is locked now; False if another process has locked it.

    Raises:
        OSError: the file cannot be locked, such as on a file system without locks.
    """
    try:
        if fcntl is None:
            _lock_on_windows(descriptor)
        else:
            # lockf, not flock: forked data loader workers would inherit a flock and keep it after the run is killed
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


@contextlib.contextmanager
def lock_directory(path: Path) -> Iterator[bool | None]:
    """Lock a directory against other processes and threads, until the block or the process ends.

    Yields:
        Whether it is locked now; None where directories have no locks (Windows, some network file systems).

    Raises:
        OSError: there is no such directory.
    """
    if fcntl is None:
        yield None
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        is_locked: bool | None = True
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_locked = False if error.errno in _TAKEN else None
        yield is_locked
    finally:
        os.close(folder)


def _lock_on_windows(descriptor: int) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def rename(source: Path, target: Path) -> None:
    """Rename a file, over an existing one if there is one, or a directory.

    On Windows, a virus scanner or an indexer may have a new file open for a moment, and an open file cannot be renamed:
    the rename is repeated for `RENAME_S`.

    Raises:
        OSError: the system refuses.
    """
    deadline = time.monotonic() + RENAME_S
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if not IS_WINDOWS or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def hide_wandb() -> None:
    """Keep timm from importing wandb, which takes a second and opens a socket; only `--track wandb` needs it."""
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # the documented way to make an import fail


def is_alive(pid: int) -> bool:
    """Return whether a process with this number runs."""
    import psutil

    return psutil.pid_exists(pid)


def peak_mib() -> int:
    """Return the largest memory that this process has used so far, in MiB."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory: Any = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss)) >> 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)  # in bytes on macOS, in KiB on Linux
