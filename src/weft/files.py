"""Output files and directories: after a crash at any moment, each is complete or as it was before.

A file is written under a temporary name in the same folder, flushed to the disk and renamed; then the folder is
flushed. A directory is filled under a temporary name in the same way, and locked meanwhile, so that the next process
to write there can remove or restore what one that was killed has left. Directories of runs and studies grow in place:
see `weft.runs.directory`.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from weft.errors import StorageError, UsageError
from weft.machine.system import lock_directory, rename


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


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk or quota
SUFFIXES = (".csv", ".tsv", ".parquet", ".json", ".html", ".md", ".png")  # of files in an output directory
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(part|old)")


def write_file(path: Path, data: bytes | str, check: Callable[[Path], None] | None = None) -> None:
    """Write a file atomically; text in UTF-8.

    Args:
        path: the file; it may exist.
        data: its content.
        check: called with the path of the file on the disk before it takes its place.

    Raises:
        UsageError: the path does not end in a name.
        StorageError: the file cannot be written. An existing file is unchanged.
    """
    refuse_nameless(path)
    data = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    temporary = temporary_path(path)
    with writing(path, len(data)):
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(temporary)
            rename(temporary, path)
            flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically, in UTF-8. Names of files that are not UTF-8 keep their bytes, so that they are
    found again."""
    text, lines = io.StringIO(newline=""), [header, *rows]
    has_returns = any("\r" in str(cell) for line in lines for cell in line)  # which csv does not quote by itself
    quoting = csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(lines)
    write_file(path, text.getvalue().encode("utf-8", "surrogateescape"))


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


def temporary_path(path: Path, suffix: str = "part") -> Path:
    """Return a new name next to a file or directory, under which it is written before it takes its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def is_temporary(path: Path) -> bool:
    """Return whether a path has the name under which weft writes a file or directory, or moves one away."""
    return _TEMPORARY.fullmatch(path.name) is not None


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


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with its contents; nothing happens where none exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_size(folder: Path) -> int:
    """Return the size of all files below a folder in bytes; links count nothing."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def check_output(path: Path, owned: Sequence[str] = (), *, force: bool) -> None:
    """Check that an output directory can be made, or replaced as a whole, before hours of work; leaves no file behind.

    Args:
        path: the directory.
        owned: names of the entries that it may hold in order to be replaced; `cats/1.jpg` is that file alone, not all
            of its folder.
        force: replace an existing directory.

    Raises:
        UsageError: the path has no name or that of a file such as x.csv, is a mount point, is taken, or is written by
            another process.
        StorageError: it cannot be written to.
    """
    refuse_nameless(path)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        raise UsageError(
            f"The output must be a directory; '{path}' is the name of a file. Choose, for example, {path.stem}."
        )
    with writing(path):
        _settle_leftovers(Path(os.path.realpath(path)))
    refuse_taken(path, owned, force=force)
    if path.is_mount():
        raise UsageError(
            f"The output directory is replaced as a whole; {path} is a mount point, which cannot be. Choose a directory"
            f" in it, such as {path / 'out'}."
        )
    check_writable(path.parent)


def refuse_taken(path: Path, owned: Sequence[str], *, force: bool, entries: Sequence[Path] | None = None) -> None:
    """Check that an output directory is new, empty or replaceable.

    Args:
        path: the directory.
        owned, force: as in `check_output`.
        entries: those of the directory that count; None for all.

    Raises:
        UsageError: the directory holds other entries, or any without `force`.
    """
    if entries is None:
        with writing(path):
            entries = list(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    if entries and not force:
        raise TakenError(f"The output directory must be new or empty; {path} is neither. Pass --force or another path.")
    if entries == [path]:
        raise UsageError(f"--force replaces only directories; {path} is a file. Choose another path.")
    own = {path / name for name in owned}
    with writing(path):
        foreign = next(_foreign(sorted(entries), own, {folder for file in own for folder in file.parents}), None)
    if foreign is not None:
        raise UsageError(
            f"--force replaces only files that weft writes; {path} also holds '{foreign.relative_to(path).as_posix()}'."
            " Choose another path."
        )


def _foreign(entries: Iterable[Path], own: Collection[Path], folders: Collection[Path]) -> Iterator[Path]:
    """Yield those of some entries that are not weft's own, also from within folders of own files."""
    for entry in entries:
        if entry in own or is_temporary(entry):
            continue
        if entry in folders and entry.is_dir() and not entry.is_symlink():
            yield from _foreign(sorted(entry.iterdir()), own, folders)
        else:
            yield entry


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


@contextlib.contextmanager
def new_directory(path: Path, owned: Sequence[str] = (), *, force: bool) -> Iterator[Path]:
    """Write a directory atomically: fill the one that is yielded; it takes its place if no error occurs.

    Args:
        path, owned, force: as in `check_output`.

    Raises:
        UsageError, StorageError: as in `check_output`.
    """
    check_output(path, owned, force=force)
    path = Path(os.path.realpath(path))  # a link stays
    temporary = temporary_path(path)
    with writing(path):
        temporary.mkdir(parents=True)
    try:
        with _locked(temporary, path), writing(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    flush_file(file)
            refuse_taken(path, owned, force=force)
            _swap(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(temporary: Path, path: Path) -> Iterator[None]:
    """Lock the directory that becomes `path`, unless another process has settled it as a leftover just before."""
    with contextlib.ExitStack() as stack:
        try:
            is_locked = stack.enter_context(lock_directory(temporary))
        except FileNotFoundError:
            is_locked = False
        if is_locked is False or not temporary.exists():
            raise _taken(path)
        yield


def _taken(path: Path) -> TakenError:
    return TakenError(f"Only one process at a time can write {path}; another one does. Wait for it.")


def _swap(temporary: Path, path: Path) -> None:
    """Rename a finished directory to its place; the existing one is removed afterwards, or restored on failure."""
    before = temporary.with_suffix(".old")
    with lock_directory(path) if path.exists() else contextlib.nullcontext():
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


def _settle_leftovers(path: Path) -> None:
    """Settle what processes that were killed while they wrote a directory have left, unless one writes it now."""
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or match["name"] != path.name or not entry.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError), lock_directory(entry) as is_locked:
            if is_locked is False:
                raise _taken(path)
            # where directories have no locks, what a process writes now looks like what a killed one has left
            if is_locked or entry.suffix == ".old":
                settle(entry)


def settle(entry: Path) -> None:
    """Remove what a killed process has left under a temporary name, or put back what it had moved away."""
    match = _TEMPORARY.fullmatch(entry.name)
    assert match is not None
    place = entry.with_name(match["name"])
    if entry.suffix == ".old" and not place.exists():
        rename(entry, place)
    else:
        remove(entry)
