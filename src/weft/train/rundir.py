"""The run directory: its files, and atomic writes to them.

recipe.yaml    everything that was decided, and what it ran on; repeats the run
metrics.csv    one line per epoch
steps.csv      one line per step
best/ last/    model directories
state/         what a run that was killed goes on from
images.tsv.gz  what it learns from, with size and hash of every image
report/        pictures and tables
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO, get_type_hints

from weft.data.index.inventory import VAL_NAMES
from weft.durable import is_leftover, no_follow, write_whole, writing
from weft.errors import CheckpointError, UsageError

try:
    import fcntl
except ImportError:  # Windows has none, and there runs are not locked
    fcntl = None

CONTENTS = ("recipe.yaml", "metrics.csv", "steps.csv", "best", "last", "state", "images.tsv.gz", "report")
DATA = "images.tsv.gz"
REPLACEABLE = (*CONTENTS, "tensorboard", "wandb")  # by --force
SPLITS = ("train", *VAL_NAMES)
LOCK = Path("state") / "lock"
PROBE = LOCK.with_name("step-0000000000.safetensors")  # no other path in a run directory is longer
_HELD: set[Path] = set()  # run directories of this process
PATIENCE_S = 0.5  # for a directory that another process makes and removes


class EpochRow(NamedTuple):
    """One line of `metrics.csv`.

    Steps are counted over the whole run, the learning rate is that of the epoch's first step, losses are in nats and
    accuracies in percent, `images_per_second` is of training alone, `data_wait` the percentage of that time in which no
    batch was ready, and `seconds` of the epoch with its evaluation. Without an evaluation its results are nan.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    train_top1: float
    val_loss: float
    val_top1: float
    val_top5: float
    images_per_second: float
    data_wait: float
    seconds: float


def refuse_taken(path: Path, contents: Sequence[str] = REPLACEABLE, *, force: bool) -> None:
    """Refuses a directory that holds something, unless `force` allows to replace it and all in it is in `contents`.

    Raises:
        UsageError: it is taken.
    """
    with writing(path):
        entries = _entries(path)
    if entries and not force:
        raise UsageError(
            f"The output directory must be new or empty; {path} is neither. Pass --force or another --out."
        )
    own = {path / name for name in contents}
    if foreign := sorted(entry for entry in entries if entry not in own and not is_leftover(entry)):
        raise UsageError(
            f"--force replaces what weft wrote and nothing else; {path} also holds '{foreign[0].name}'."
            " Choose another --out."
        )


def check_place(path: Path, source: str) -> None:
    """Refuses a path that no run directory can have.

    Args:
        path: of the run directory.
        source: the data.

    Raises:
        UsageError: it is no text, or in the folder of the data, where a later run would take it for a class. Beside
            folders `train` and `val` it may be.
    """
    try:
        is_text = "\0" not in str(path) and bool(str(path).encode())
    except UnicodeEncodeError:  # safetensors opens files by names in UTF-8 only
        is_text = False
    if not is_text:
        raise UsageError(f"--out must be a path in UTF-8 without NUL; got {str(path)!r}. Choose another --out.")
    root, place = Path(source).resolve(), path.resolve()
    if not root.is_dir() or not place.is_relative_to(root):
        return
    first = (*place.relative_to(root).parts, "train")[0]
    if first in SPLITS or not (root / "train").is_dir():
        raise UsageError(
            f"A run directory must be outside of the data, where it would be taken for a class; {path} is in {source}."
            " Choose another --out."
        )


def _entries(path: Path) -> list[Path]:
    """What is in a directory (or the file itself), a lock that nobody need hold aside."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [entry for entry in path.iterdir() if entry != path / LOCK.parent or set(entry.iterdir()) - {path / LOCK}]


def make_dir(path: Path, contents: Sequence[str] = REPLACEABLE, *, force: bool) -> None:
    """Makes an empty directory for `contents`, but for the lock in it.

    Args:
        path: where; parents are made.
        contents: names that may be removed from it under `force`; nothing else is ever removed.
        force: take the place of what is there.

    Raises:
        UsageError: it is taken.
        StorageError: it cannot be made or written to.
    """
    refuse_taken(path, contents, force=force)
    check_writable(path)
    with writing(path):
        _clear(path, contents)
        path.mkdir(parents=True, exist_ok=True)


def check_writable(path: Path) -> None:
    """Makes a directory and a file in it, and removes what it made: whether both can be, before hours of work.

    Raises:
        StorageError: they cannot.
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


def _clear(path: Path, contents: Sequence[str]) -> None:
    """Removes `contents` from a directory, but for the lock."""
    for inside in _written(path, contents):
        remove(inside)


def _written(path: Path, contents: Sequence[str]) -> Iterator[Path]:
    """What is in a directory of `contents`, and what dead processes left there, but for the lock."""
    for entry in _entries(path):
        if entry.name in contents or is_leftover(entry):
            yield from (
                inside
                for inside in (entry.iterdir() if entry == path / LOCK.parent else (entry,))
                if inside != path / LOCK
            )


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    # backslashreplace: names of files and classes may hold bytes that are no text
    write_whole(path, text.encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a run directory for this process. The lock of a process that is dead is no lock.

    Raises:
        UsageError: another process holds it.
        StorageError: it cannot be made or written to.
    """
    place = path.resolve()
    if place in _HELD:  # by a thread of this process, which the lock of a file does not keep out
        raise _in_use(path, str(os.getpid()))
    _HELD.add(place)
    try:
        with _lock_of(path) as file:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            with writing(path):
                file.flush()
            yield
    finally:
        _HELD.discard(place)


def _in_use(path: Path, holder: str) -> UsageError:
    return UsageError(
        f"A run directory belongs to one run at a time; {path} is in use by process {holder}."
        " Wait for it, stop it, or choose another --out."
    )


def _lock_of(path: Path) -> TextIO:
    """The lock of a run directory, which is made where it is missing: opened, and held until it is closed."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with writing(path):
            try:
                (path / LOCK).parent.mkdir(parents=True, exist_ok=True)
                file = open(path / LOCK, "a+", opener=no_follow)
            except FileNotFoundError:  # a run that was refused has just removed its directory
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
                continue
        if fcntl is None:
            return file
        try:
            # lockf, not flock: processes that read images are forked, and would hold it on after a kill
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "unknown"
            raise _in_use(path, holder) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (path / LOCK).stat()):
                return file
        file.close()  # of a directory that has just been removed


class Reservation:
    """A run directory that is locked for a run to come.

    Attributes:
        path: the directory.
        is_kept: whether it stays when the lock is given back.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path, self.force, self.is_kept, self._is_filled = path, force, False, False
        self._aside = path / f".replaced.{os.getpid()}.part"  # a name that is swept, should this process be killed

    def fill(self) -> None:
        """Moves aside what `force` allows to replace.

        Raises:
            UsageError: something else is there by now.
        """
        refuse_taken(self.path, force=self.force)
        with writing(self.path):
            (self._aside / LOCK.parent).mkdir(parents=True)
            self._is_filled = True
            _move(self.path, self._aside)

    def settle(self) -> None:
        """Removes what was moved aside: nothing is left that could refuse the run."""
        remove(self._aside)

    def withdraw(self) -> None:
        """Removes what the run wrote; what was moved aside comes back."""
        with contextlib.suppress(OSError):
            if self._is_filled:
                _clear(self.path, REPLACEABLE)
                _move(self._aside, self.path)
                remove(self._aside)
            if not _entries(self.path):
                remove(self.path / LOCK.parent)


@contextlib.contextmanager
def reserved(path: Path, *, force: bool) -> Iterator[Reservation]:
    """Locks the directory of a run that is to begin. Unless `is_kept` is set at the end, nothing of the run stays.

    Args:
        path: where; parents are made.
        force: whether a run that is there may be replaced. It stays until the reservation is filled.

    Raises:
        UsageError: it is taken, in use, or a path that cannot be used.
        StorageError: it cannot be made or written to.
    """
    refuse_taken(path, force=force)
    reservation = Reservation(path, force=force)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with locked(path):
            try:
                write_whole(path / PROBE, b"")  # whether it can be written to, before hours of work
                (path / PROBE).unlink()
                yield reservation
            finally:
                if not reservation.is_kept:
                    reservation.withdraw()
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty: kept, or in use by another run
                folder.rmdir()


def _move(source: Path, target: Path) -> None:
    """Moves what a run wrote from one directory to another, but for the lock."""
    for inside in _written(source, REPLACEABLE):
        os.replace(inside, target / inside.relative_to(source))


def write_metrics(path: Path, history: Sequence[EpochRow]) -> None:
    """Writes the history as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(EpochRow._fields)
    writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in history)
    write_text(path, buffer.getvalue())


def read_metrics(path: Path) -> list[EpochRow]:
    """What `write_metrics` wrote.

    Raises:
        CheckpointError: it is something else by now.
    """
    kinds = get_type_hints(EpochRow)
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    try:
        return [EpochRow(**{name: kinds[name](value) for name, value in row.items()}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} must be as the run wrote it; it has been changed ({error}).") from error


class StepLog:
    """`steps.csv`: loss, rate and gradient of every step, once each, also of a run that was killed and went on.

    Args:
        path: the file.
        step: the steps done so far; what is there of later ones is cut off, for they will be done again.
    """

    FIELDS = ("step", "epoch", "lr", "loss", "grad_norm")

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        lines = path.read_text().splitlines() if step and path.exists() else []
        kept = [line for line in lines[1:] if line.count(",") == 4 and int(line.split(",", 1)[0]) <= step]
        write_text(path, "\n".join([",".join(self.FIELDS), *kept]) + "\n")
        with writing(path):
            self.file = path.open("a")

    def add(self, step: int, epoch: int, lr: float, loss: float, grad_norm: float) -> None:
        """One step; both numbers counted from 1."""
        self.file.write(f"{step},{epoch},{lr!r},{loss!r},{grad_norm!r}\n")

    def flush(self) -> None:
        """To the disk, before the state that counts on it."""
        with writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """What is still in memory is written."""
        with contextlib.suppress(OSError):  # it may be a full disk that ends the run
            self.file.close()
