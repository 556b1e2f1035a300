"""Atomic writes: after a crash at any moment, a file or directory is complete or absent.

A file is written under a temporary name in the same folder, flushed to the disk, read back and renamed; then the folder
is flushed. Temporary names hold the number of the process, so that `sweep` can remove those of processes that ended.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from weft.errors import StorageError, UsageError
from weft.system import is_alive, rename, start_time


def cache_dir() -> Path:
    """Return the cache directory: WEFT_CACHE, or `weft` in the user's cache directory.

    Raises:
        UsageError: the user has no home directory.
    """
    if own := os.environ.get("WEFT_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    except RuntimeError as error:
        raise UsageError(
            "The cache must have a directory; HOME is not set, and this user has no home directory. Set WEFT_CACHE."
        ) from error


def cache_file(*parts: str) -> Path | None:
    """Return a file in the cache directory; None if the user has none, so that nothing is cached."""
    try:
        return cache_dir().joinpath(*parts)
    except UsageError:
        return None


class TakenError(UsageError):
    """An output directory that another process uses, or that holds files already."""


LOCK = Path("state") / "lock"  # in a directory that a process has reserved; it does not count as content

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk or quota

FILES = (".csv", ".tsv", ".parquet", ".json", ".html", ".md", ".png")  # suffixes of what is in such a directory

_CHUNK = 1 << 22
_OURS = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(part|old)")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, and read it back to verify it.

    On Linux its pages are dropped from the page cache first, so that the file system reads the device. Elsewhere, and
    on file systems in memory, the check only shows that the file has the expected bytes.

    Raises:
        UsageError: the path does not end in a name.
        StorageError: the file cannot be written, or reads back differently. An existing file is unchanged.
    """
    refuse_nameless(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path, len(data)):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb", opener=no_follow) as file:
                for start in range(0, len(data), _CHUNK):
                    file.write(data[start : start + _CHUNK])
                    file.flush()
                os.fsync(file.fileno())
                _forget_pages(file.fileno())
            if sha256_of(temporary) != hashlib.sha256(data).hexdigest():
                raise StorageError(f"{path} must read back as it was written; it does not. Check the disk for errors.")
            rename(temporary, path)
            flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the block as a `StorageError` that names the path and the number of bytes to write."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        needs = f" for {num_bytes:,} bytes" if num_bytes and error.errno in FULL else ""
        advice = "Free some space or choose another --out." if error.errno in FULL else "Choose another --out."
        raise StorageError(f"{path} must be writable; {error.strerror or error}{needs}. {advice}") from error


def no_follow(path: str, flags: int) -> int:
    """Open a file without following symbolic links; an `opener` for `open`. Windows follows them."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _forget_pages(descriptor: int) -> None:
    """Drop a flushed file from the page cache, where the system supports it."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def flush_file(path: Path) -> None:
    """Flush a file that another library wrote to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush a folder to the disk, and with it the renames in it. Does nothing on Windows."""
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path, remove: Callable[[Path], None], name: str | None = None) -> None:
    """Remove temporary files of processes that have ended, and restore what such a process had moved away.

    Args:
        folder: in which they are; it may be missing.
        remove: removes a file or directory.
        name: only those of the file or directory with this name.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _OURS.fullmatch(entry.name)
        if match is None or name not in (None, match["name"]) or not is_leftover(entry):
            continue
        place = folder / match["name"]
        if entry.name.endswith(".old") and not place.exists():
            rename(entry, place)
        else:
            remove(entry)


def is_leftover(path: Path) -> bool:
    """Return whether a path is the temporary file of a process that has ended."""
    match = _OURS.fullmatch(path.name)
    if match is None:
        return False
    pid = int(match["pid"])
    return not is_alive(pid) or _began_later(pid, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    # backslashreplace: names of files and classes may hold bytes that are not valid text
    write_whole(path, text.encode("utf-8", "backslashreplace"))


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically, in UTF-8. Names of files that are not UTF-8 keep their bytes, so that they are
    found again."""
    text, lines = io.StringIO(newline=""), [header, *rows]
    has_returns = any("\r" in str(cell) for line in lines for cell in line)  # which csv does not quote by itself
    quoting = csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(lines)
    write_whole(path, text.getvalue().encode("utf-8", "surrogateescape"))


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with its contents; nothing happens where none exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def entries_of(path: Path) -> list[Path]:
    """Return the entries of a directory (or the file itself) without a lock that is alone in its folder."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [entry for entry in path.iterdir() if entry != path / LOCK.parent or set(entry.iterdir()) - {path / LOCK}]


def refuse_taken(path: Path, contents: Sequence[str], *, force: bool) -> None:
    """Check that an output directory is new, empty or replaceable.

    Args:
        path: the directory.
        contents: names of entries that `force` may replace.
        force: allow an existing directory, if it holds nothing but `contents` and temporary files.

    Raises:
        UsageError: the directory holds other entries, or any without `force`.
    """
    with writing(path):
        entries = entries_of(path)
    if entries and not force:
        raise TakenError(
            f"The output directory must be new or empty; {path} is neither. Pass --force or another --out."
        )
    own = {path / name for name in contents}
    if foreign := sorted(entry for entry in entries if entry not in own and not is_leftover(entry)):
        raise UsageError(
            f"--force replaces only files that weft writes; {path} also holds '{foreign[0].name}'."
            " Choose another --out."
        )


def check_out_dir(path: Path, contents: Sequence[str], *, force: bool) -> None:
    """Check that results can be written to an output directory: as `refuse_taken`, and by its name.

    Raises:
        UsageError: as in `refuse_taken`, or it has the name of a file, such as x.csv.
        StorageError: it cannot be written to.
    """
    if path.suffix.lower() in FILES and not path.is_dir():
        raise UsageError(
            f"--out must name a directory; '{path}' is the name of a file. For example: --out {path.stem}."
        )
    refuse_taken(path, contents, force=force)
    check_writable(path)


def refuse_nameless(path: Path) -> None:
    """Check that a path that is replaced as a whole ends in a name.

    Raises:
        UsageError: it does not, as `.`, `/` or `runs/..`.
    """
    if path.name in ("", ".."):
        raise UsageError(f"The output must end in a name, since it is replaced as a whole; got '{path}'. Pass a name.")


def check_writable(path: Path) -> None:
    """Check that a directory can be created and written to, before hours of work; leaves no file behind.

    Raises:
        StorageError: it cannot.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_dir(path: Path, contents: Sequence[str], *, force: bool) -> None:
    """Make an empty directory for `contents`; a lock in it stays.

    Args:
        path: the directory; parents are made.
        contents: names of entries that are removed under `force`; nothing else is ever removed.
        force: replace an existing directory.

    Raises:
        UsageError: the directory is taken.
        StorageError: it cannot be made or written to.
    """
    refuse_taken(path, contents, force=force)
    check_writable(path)
    with writing(path):
        clear(path, contents)
        path.mkdir(parents=True, exist_ok=True)


def clear(path: Path, contents: Sequence[str]) -> None:
    """Remove `contents` and temporary files of ended processes from a directory; the lock stays."""
    for inside in written(path, contents):
        remove(inside)


def written(path: Path, contents: Sequence[str]) -> Iterator[Path]:
    """Yield the entries of a directory that are in `contents` or are temporary files of ended processes."""
    for entry in entries_of(path):
        if entry.name in contents or is_leftover(entry):
            yield from (
                inside
                for inside in (entry.iterdir() if entry == path / LOCK.parent else (entry,))
                if inside != path / LOCK
            )


@contextlib.contextmanager
def new_directory(path: Path, contents: Sequence[str], *, force: bool) -> Iterator[Path]:
    """Write a directory atomically: fill the one that is yielded; it takes its place if no error occurs.

    Args:
        path: the directory to make.
        contents: names of entries that an existing directory may hold in order to be replaced.
        force: replace an existing directory.

    Raises:
        UsageError: `path` is taken, or does not end in a name.
        StorageError: the directory cannot be written.
    """
    refuse_nameless(path)
    with writing(path):
        sweep(path.parent, remove, path.name)  # of a process that was killed
    refuse_existing(path, contents, force=force)
    temporary, before = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    with writing(path):
        temporary.mkdir(parents=True)
    try:
        with writing(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    flush_file(file)
            swap(temporary, path, before)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: Path, contents: Sequence[str] = (), *, force: bool) -> None:
    """Check that an output directory is new, or replaceable, as `new_directory` does.

    Raises:
        UsageError: `path` is taken, or does not end in a name.
    """
    refuse_nameless(path)
    if not path.exists():
        return
    if not force:
        raise UsageError(f"The output directory must be new; {path} exists already. Pass --force or another path.")
    if not path.is_dir():
        raise UsageError(f"force replaces only directories that weft writes; {path} is a file.")
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in contents)
    if foreign:
        raise UsageError(f"force replaces only directories that weft writes; {path} also holds {foreign[0]!r}.")


def swap(temporary: Path, path: Path, before: Path) -> None:
    """Rename a finished directory to its place; the existing one is removed afterwards, or restored on failure."""
    if path.exists():
        rename(path, before)
    try:
        rename(temporary, path)
    except OSError:
        if before.exists():
            rename(before, path)
        raise
    flush_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _began_later(pid: int, path: Path) -> bool:
    """Return whether a process started after a file was written, so that it only reuses the number of the writer.

    In a container, for example, every main process has number 1.
    """
    began = start_time(pid)
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        began is not None and began > max(status.st_mtime, status.st_ctime) + 2
    )  # seconds: the boot's is a whole number


def folder_size(folder: Path) -> int:
    """Return the size of all files below a folder in bytes; links count nothing."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
