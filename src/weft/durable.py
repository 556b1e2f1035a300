"""Atomic writes: after a crash at any moment, a file is complete or absent.

A file is written beside its place, flushed to the disk, read back, moved into its place, and its folder flushed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.errors import StorageError

_CHUNK = 1 << 22
_OURS = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(part|old)")


def reached(point: str) -> None:
    """Called at every point where a kill could matter; does nothing. Tests put something here that kills."""


def write_whole(path: Path, data: bytes) -> str:
    """Writes a file.

    Returns:
        The sha256 of what was read back, in hexadecimal digits. On Linux the pages that were written are taken out of
        the page cache first, so that the file system reads its device; where that cannot be done (other systems, file
        systems in memory), the check only shows that the file has the bytes that it should have.

    Raises:
        StorageError: the disk did not take it, or gave back something else. What stood there before stands there still.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path, len(data)):
        try:
            beside.unlink(missing_ok=True)
            with open(beside, "xb", opener=no_follow) as file:
                reached("opened")
                for start in range(0, len(data), _CHUNK):
                    file.write(data[start : start + _CHUNK])
                    file.flush()
                    reached("half written")
                reached("before fsync")
                os.fsync(file.fileno())
                _forget_pages(file.fileno())
            reached("after fsync")
            digest = sha256_of(beside)
            if digest != hashlib.sha256(data).hexdigest():
                raise StorageError(
                    f"{path} must come back from the disk as it was written; it does not. Is it failing?"
                )
            reached("before replace")
            os.replace(beside, path)
            reached("after replace")
            flush_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)
    return digest


@contextlib.contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns what the disk says into a `StorageError` that names the path, and how much was to be written."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        needs = (
            f" for {num_bytes:,} bytes"
            if num_bytes and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else ""
        )
        raise StorageError(
            f"{path} must be writable; {reason}{needs}. Free some space or choose another --out."
        ) from error


def no_follow(path: str, flags: int) -> int:
    """An `opener` for `open`: where a symbolic link stands, no file is opened, made or emptied."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _forget_pages(descriptor: int) -> None:
    """Takes a file that is on the disk out of the page cache, where the system offers that."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def flush_file(path: Path) -> None:
    """What another library wrote is on the disk, too."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """A rename is on the disk once its folder is; Windows cannot flush one."""
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path: Path) -> str:
    """In hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path, remove: Callable[[Path], None]) -> None:
    """Removes what processes that are no more left half done in a folder; what they had moved aside comes back."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _OURS.fullmatch(entry.name)
        if match is None or not is_leftover(entry):
            continue
        place = folder / match["name"]
        if entry.name.endswith(".old") and not place.exists():
            os.replace(entry, place)
        else:
            remove(entry)


def is_leftover(path: Path) -> bool:
    """Whether a process that is no more left this half done."""
    match = _OURS.fullmatch(path.name)
    if match is None:
        return False
    pid = int(match["pid"])
    return not _is_alive(pid) or _began_later(pid, path)


def _began_later(pid: int, path: Path) -> bool:
    """Whether a process is younger than a file: it has the number of one before it, as in a container, where every main
    process is number 1. Linux alone says so."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        status = path.lstat()
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    began = int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return began > max(status.st_mtime, status.st_ctime) + 2  # seconds: the boot's is a whole number


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; a number that no process can have is not ours to touch
        return True
    return True
