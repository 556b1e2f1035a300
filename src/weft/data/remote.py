"""Files on servers and in object stores, read through fsspec: fetched whole into a bounded cache on disk.

A file that cannot be fetched is tried again for some minutes, so that a server may stop and come back. Processes share
the cache: one fetches a file, the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from weft.errors import DataError, UsageError, install_command
from weft.files import FULL, cache_dir
from weft.machine.system import lock_file
from weft.progress import say
from weft.text import printable, reason_of

FOLDER = "remote"  # in the cache directory
WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 60.0, 60.0, 60.0)  # before another attempt to fetch a file
FIRST_WAITS_S = (1.0, 2.0)  # when data is opened
PATIENCE_S = 900.0  # for a batch whose files may have to be fetched
TAGS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "mtime", "created")
OWN = "of one start: "  # tag of a file of which a server tells nothing but the size
LOOK_S = 0.1  # between two attempts to lock a file that another process fetches
Result = TypeVar("Result")
_TOKEN = secrets.token_hex(4)  # processes of other hosts and containers may have the same number
_LOCKS = defaultdict[str, threading.Lock](threading.Lock)  # of files: a lock of the system excludes no threads


class RemoteFile(NamedTuple):
    """A file at a URL: its size in bytes, and a text that changes with its content, or with every start."""

    url: str
    size: int
    tag: str

    @property
    def number(self) -> int:
        """A number of 56 bits that represents all of it."""
        return int.from_bytes(hashlib.blake2b(repr(tuple(self)).encode(), digest_size=7).digest())


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def remote_file(url: str) -> RemoteFile:
    """Return the size and the tag of a file.

    Raises:
        UsageError: a library for the protocol is not installed, or there is none.
        DataError: the file does not exist or cannot be reached.
    """
    file = _retried(url, lambda system, path: _described(url, system.info(path)), FIRST_WAITS_S)
    return file if file.tag else file._replace(tag=f"{OWN}{secrets.token_hex(16)}")


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    tag = next((info[key] for key in TAGS if info.get(key)), "")
    if not isinstance(info.get("size"), int):
        raise DataError(f"The server must say how large a file is; it does not for {printable(url)}. Download it.")
    return RemoteFile(url, info["size"], str(tag))


class RemoteCache:
    """Files that were fetched, in the cache directory of weft.

    Args:
        most: bytes that they take together; the ones that were not used for the longest time are removed first.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def open(self, file: RemoteFile) -> BinaryIO:
        """Open a file for reading.

        Raises:
            DataError: it cannot be fetched.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it since
                return open(self.local(file), "rb")

    def local(self, file: RemoteFile) -> Path:
        """Return the path of a file, which is fetched if it is not there.

        Raises:
            DataError: it cannot be fetched, or not written.
        """
        name = hashlib.sha256(repr(file).encode()).hexdigest()[:32]
        path = cache_dir() / FOLDER / name
        if self._is_there(path):
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                if not self._is_there(path):
                    self._make_room(path.parent, file.size)
                    part = path.with_suffix(f".{_process()}.part")
                    try:
                        _retried(file.url, lambda system, remote: _fetch(file, system, remote, part), WAITS_S)
                        part.replace(path)
                    finally:
                        part.unlink(missing_ok=True)
        except OSError as error:  # not of the server; as such, it would be taken for one of the image
            raise DataError(
                f"{printable(file.url)} needs a place in the cache; {path.parent} cannot be written"
                f" ({error.strerror or error}). Free some space, or set WEFT_CACHE."
            ) from error
        return path

    def _is_there(self, path: Path) -> bool:
        """Return whether a file is in the cache; if so, it is used now."""
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _make_room(self, folder: Path, size: int) -> None:
        """Remove what killed processes have left, and files until another one of a size fits."""
        for part in folder.glob("*.part"):
            name, process, _ = part.name.split(".")
            # closing a lock file also ends the lock of another thread of this process, so not its own parts
            if process != _process():
                with contextlib.suppress(OSError), open(folder / f"{name}.lock", "wb") as lock:
                    if lock_file(lock.fileno()):
                        part.unlink(missing_ok=True)
        files = []
        for path in folder.glob("[0-9a-f]*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files += [(status.st_mtime_ns, status.st_size, path)] if not path.suffix else []
        total = size + sum(number for _, number, _ in files)
        for _, number, path in sorted(files):
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= number


def _fetch(file: RemoteFile, system: Any, remote: str, path: Path) -> None:
    """Fetch a file from a file system."""
    now = _described(file.url, system.info(remote))
    if now.size != file.size or (not file.tag.startswith(OWN) and now.tag != file.tag):
        raise DataError(
            f"{printable(file.url)} must be as it was when the data was opened; it has changed since. Restore it, or"
            " start again."
        )
    system.get_file(remote, os.fspath(path))
    if (got := path.stat().st_size) != file.size:
        raise OSError(f"{got:,} of {file.size:,} bytes arrived")


def _process() -> str:
    """Return a name of this process, also among those of other hosts and containers."""
    return f"{os.getpid()}-{_TOKEN}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other thread or process holds a lock, and hold it. Without locks of the system, each fetches."""
    with _LOCKS[path.name], contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = stack.enter_context(open(path, "wb")).fileno()
            while not lock_file(descriptor):
                time.sleep(LOOK_S)
        yield


def _retried(url: str, work: Callable[[Any, str], Result], waits: Sequence[float]) -> Result:
    """Call `work` with the file system of a URL and the path there; while it fails, again after some seconds each."""
    from fsspec.core import url_to_fs  # installed with torch

    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{printable(url)} must be a URL that fsspec reads; {reason_of(error)}. For https: run"
            f" {install_command('remote')}."
        ) from error
    for wait in (*waits, None):
        try:
            return work(system, path)
        except DataError:
            raise
        except Exception as error:  # of many libraries
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            reason = reason_of(error.__cause__ or error) or type(error).__name__
            if wait is None or (isinstance(error, FileNotFoundError) and not _is_of_network(error)):
                raise DataError(
                    f"{printable(url)} must be reachable; {reason}. Check the address and the server; a run can be"
                    " resumed."
                ) from error
            say(f"{printable(url)} cannot be read ({reason}); again in {wait:g} s.")
            time.sleep(wait)
    raise AssertionError


def _is_of_network(error: Exception) -> bool:
    """Return whether it helps to try again: fsspec says of a server that is not found what it says of a file."""
    cause = error.__cause__
    is_ours = getattr(error, "filename", None) is not None  # another process has removed the part
    return is_ours or (cause is not None and getattr(cause, "status", None) not in (404, 410))
