"""Run directory: reserve and lock it, read and write its files.

It grows in place, so it is locked while a process uses it: then every temporary file in it is of one that was killed.
Directories of studies are locked, refused and cleared by the same functions.

recipe.yaml    all settings and the machine; repeats the run
metrics.csv    one row per epoch
steps.csv      one row per step
best/ last/    model directories
state/         training states, from which an interrupted run resumes
series.csv     series of similar images, where training found some
candidates.csv networks that training could start from, where they were compared
images.tsv.gz  fingerprint of the dataset: class, split, size and hash of every image
report/        figures and tables
public_classifier.safetensors  of the public weights that the run started from, for the detector of unknown images
folds/         with a cross-validation: a run directory for each fold but the first, and a report over all folds
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO, get_type_hints

from weft import files
from weft.data.folder import check_outside
from weft.errors import CheckpointError, StorageError, UsageError
from weft.files import TakenError, check_writable, is_temporary, remove, settle, write_file, write_table, writing
from weft.machine.system import IS_WINDOWS, is_alive, lock_file
from weft.text import reason_of

CONTENTS = ("recipe.yaml", "metrics.csv", "steps.csv", "best", "last", "state", "images.tsv.gz", "report")
FINGERPRINT = "images.tsv.gz"
SERIES, CANDIDATES = "series.csv", "candidates.csv"
PUBLIC_CLASSIFIER = "public_classifier.safetensors"
FOLDS, CROSS_VALIDATION = "folds", "cross_validation.json"
# entries that --force may replace
REPLACEABLE = (*CONTENTS, SERIES, CANDIDATES, PUBLIC_CLASSIFIER, FOLDS, CROSS_VALIDATION, "tensorboard", "wandb")
LOCK = Path("state") / "lock"  # it does not count as content
PROBE = LOCK.with_name("probe-000000000.safetensors")  # as long as the longest path in a run directory
RETRY_S = 0.5  # time to wait for another process that is creating or removing the lock file
_LOCKED: set[Path] = set()  # run directories that this process has locked
_ADDING = threading.Lock()


class EpochRow(NamedTuple):
    """One row of `metrics.csv`; validation results are nan for an epoch without evaluation.

    Attributes:
        epoch: number of the epoch, from 1; 0 for an evaluation before training.
        step: steps since the start of the run.
        lr: learning rate of the first step of the epoch.
        train_loss, val_loss: cross-entropy in nats.
        train_top1, val_top1, val_top5: accuracies in percent.
        val_balanced: balanced accuracy (mean recall of the classes) in percent.
        images_per_second: throughput of training, without evaluation.
        data_wait: percentage of the training time spent waiting for data.
        seconds: duration of the epoch, including evaluation.
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
    val_balanced: float = math.nan


def best_of(history: Sequence[EpochRow], measure: str = "top1") -> EpochRow | None:
    """Return the epoch whose model is in best/; None if no epoch was evaluated.

    It has the best value of the measure on the validation set: the highest top-1 (`top1`) or balanced accuracy
    (`balanced`), or the lowest loss (`loss`). At equal accuracy the lowest loss decides, at equal loss top-1, and then
    the first epoch. Training, report and model card share this rule. Values are compared as `metrics.csv` has them.

    Args:
        history: rows of `metrics.csv`.
        measure: setting `best` of the recipe.
    """

    def key(row: EpochRow) -> tuple[float, float]:
        top1, balanced, loss = (float(_text(value)) for value in (row.val_top1, row.val_balanced, row.val_loss))
        loss = -math.inf if math.isnan(loss) else -loss
        return {"top1": (top1, loss), "balanced": (balanced, loss), "loss": (loss, top1)}[measure]

    return max((row for row in history if not math.isnan(row.val_top1)), key=key, default=None)


def entries_of(path: Path) -> list[Path]:
    """Return the entries of a directory (or the file itself) without a lock that is alone in its folder."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [entry for entry in path.iterdir() if entry != path / LOCK.parent or set(entry.iterdir()) - {path / LOCK}]


def refuse_taken(path: Path, owned: Sequence[str] = REPLACEABLE, *, force: bool) -> None:
    """Check that a directory is new, empty or replaceable; its lock may be in it.

    Args:
        path: the directory.
        owned: names of entries that `force` may replace.
        force: allow an existing directory, if it holds nothing but `owned` and temporary files.

    Raises:
        UsageError: the directory holds other entries, or any without `force`.
    """
    with writing(path):
        entries = entries_of(path)
    files.refuse_taken(path, owned, force=force, entries=entries)


def make_dir(path: Path, owned: Sequence[str] = REPLACEABLE, *, force: bool) -> None:
    """Make an empty directory for `owned`; a lock in it stays, and nothing but `owned` is ever removed.

    Args:
        path, owned, force: as in `refuse_taken`; parents are made.

    Raises:
        UsageError: the directory is taken.
        StorageError: it cannot be made or written to.
    """
    refuse_taken(path, owned, force=force)
    check_writable(path)
    clear(path, owned)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def clear(path: Path, owned: Sequence[str]) -> None:
    """Remove `owned` and temporary files from a directory that is locked; the lock stays."""
    with writing(path):
        for entry in entries_of(path):
            if entry.name in owned or is_temporary(entry):
                for inside in entry.iterdir() if entry == path / LOCK.parent else (entry,):
                    if inside != path / LOCK:
                        remove(inside)


def sweep(folder: Path) -> None:
    """Settle what killed processes have left in a run directory that is locked, or in a folder of it."""
    for entry in filter(is_temporary, folder.iterdir() if folder.is_dir() else ()):
        settle(entry)


def check_run_dir(path: Path, source: str) -> None:
    """Check that a run directory can be created at a path.

    Args:
        path: path of the run directory.
        source: the dataset.

    Raises:
        UsageError: the path is not UTF-8, or is in the dataset, as in `check_outside`.
    """
    try:
        is_text = "\0" not in str(path) and bool(str(path).encode())
    except UnicodeEncodeError:  # safetensors only opens files with UTF-8 names
        is_text = False
    if not is_text:
        raise UsageError(f"--out must be a path in UTF-8 without NUL; got {str(path)!r}. Choose another --out.")
    check_outside(path, source)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a run directory for this process; create it if needed. The lock ends with the process.

    Raises:
        UsageError: another run has locked it.
        StorageError: it cannot be created or written to, or its file system has no locks.
    """
    resolved = path.resolve()
    with _ADDING:
        if resolved in _LOCKED:  # by another thread: a file lock does not exclude threads of the same process
            raise _in_use(path, str(os.getpid()))
        _LOCKED.add(resolved)
    try:
        with _open_lock(path) as file:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            with writing(path):
                file.flush()
            yield
    finally:
        _LOCKED.discard(resolved)


def _in_use(path: Path, holder: str) -> TakenError:
    return TakenError(
        f"Only one process at a time can use a run directory; {path} is in use by process {holder}."
        " Wait for it, stop it, or choose another --out."
    )


def _open_lock(path: Path) -> TextIO:
    """Open and lock the lock file of a run directory, and create both if needed. Closing the file unlocks it."""
    deadline = time.monotonic() + RETRY_S
    while True:
        with writing(path):
            try:
                (path / LOCK).parent.mkdir(parents=True, exist_ok=True)
                is_new = not (path / LOCK).exists()
                file = open(path / LOCK, "a+", encoding="utf-8", errors="replace", opener=no_follow)
            except FileNotFoundError:  # another process has just removed the directory, after its run was refused
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
        try:
            is_locked = lock_file(file.fileno())
        except OSError as error:
            file.close()
            if is_new:  # else another process may have locked it
                with contextlib.suppress(OSError):
                    (path / LOCK).unlink()
                    (path / LOCK.parent).rmdir()
            raise StorageError(
                f"The file system of a run directory must support locks; that of {path} does not"
                f" ({error.strerror or error}). Choose another --out, on a local disk."
            ) from error
        if not is_locked:
            with file:
                holder = _holder_of(file)
            raise _in_use(path, holder)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (path / LOCK).stat()):
                return file
        file.close()  # the lock file was removed between opening and locking: try again


def no_follow(path: str, flags: int) -> int:
    """Open a file without following symbolic links; an `opener` for `open`. Windows follows them."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _holder_of(file: TextIO) -> str:
    """Return the process number in a lock file; `unknown` if the process that locked it has not written its own yet."""
    file.seek(0)
    holder = file.read().strip()
    return holder if holder.isdecimal() and is_alive(int(holder)) else "unknown"


@contextlib.contextmanager
def reserved(path: Path, *, force: bool) -> Iterator[Path]:
    """Lock the directory of a new run, and yield it. It is removed at the end if it is empty then.

    Args:
        path: the run directory; parents are created.
        force: allow an existing run to be there, which the new one replaces when it starts.

    Raises:
        UsageError: the directory is taken or in use.
        StorageError: it cannot be created or written to.
    """
    refuse_taken(path, force=force)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with locked(path):
            try:
                write_file(path / PROBE, b"")  # fail before hours of work if the directory is not writable
                (path / PROBE).unlink()
                yield path
            finally:
                if not IS_WINDOWS:  # it removes no open file
                    _remove_if_empty(path)
    finally:
        if IS_WINDOWS:
            _remove_if_empty(path)
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty: the run is kept, or another run uses the folder
                folder.rmdir()


def _remove_if_empty(path: Path) -> None:
    """Remove the lock file of a run directory that holds nothing else."""
    with contextlib.suppress(OSError):
        if not entries_of(path):
            (path / LOCK).unlink()
            (path / LOCK.parent).rmdir()


@contextlib.contextmanager
def reserved_numbered(path: Path) -> Iterator[Path]:
    """Lock the directory of a new run as `reserved` does; if it is taken or in use, NAME-2, NAME-3 and so on.

    Raises:
        StorageError: it cannot be created or written to.
    """
    for number in itertools.count(1):
        with contextlib.ExitStack() as stack:
            folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                stack.enter_context(reserved(folder, force=False))
            except TakenError:
                continue
            yield folder
            return


def write_metrics(path: Path, history: Sequence[EpochRow]) -> None:
    """Write metrics as CSV, atomically."""
    rows = ([_text(value) if isinstance(value, float) else value for value in row] for row in history)
    write_table(path, EpochRow._fields, rows)


def _text(value: float) -> str:
    return f"{value:.6g}"


def read_metrics(path: Path) -> list[EpochRow]:
    """Read the metrics that `write_metrics` wrote.

    Raises:
        CheckpointError: the file has been edited and is not valid.
    """
    types = get_type_hints(EpochRow)
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        return [EpochRow(**{name: types[name](value) for name, value in row.items()}) for row in rows]
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} must have the columns and values that the run wrote; it was edited ({reason_of(error)})."
            f" weft train --resume {path.parent} writes it again."
        ) from error


def _step_of(line: str) -> int:
    """Return the step of a row of `steps.csv`; 0 for a row that is not whole."""
    try:
        step, epoch, *values = line.split(",")
        return int(step) if int(epoch) and len([float(value) for value in values]) == 3 else 0
    except ValueError:
        return 0


class StepLog:
    """Writer of `steps.csv`: one row per step, each step once, also if the run is resumed.

    Args:
        path: the file. Rows that are not whole, as after a power failure, are removed.
        step: number of completed steps; rows of later steps are removed, since these steps will be repeated.
    """

    FIELDS = ("step", "epoch", "lr", "loss", "grad_norm")

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[1:-1] if step and path.exists() else []
        kept = [line for line in lines if 1 <= _step_of(line) <= step]
        write_file(path, "\n".join([",".join(self.FIELDS), *kept]) + "\n")
        with writing(path):
            self.file = path.open("a", encoding="utf-8", newline="\n")

    def add(self, step: int, epoch: int, lr: float, loss: float, grad_norm: float) -> None:
        """Add the row of a step; `step` and `epoch` count from 1."""
        self.file.write(f"{step},{epoch},{lr!r},{loss!r},{grad_norm!r}\n")

    def flush(self) -> None:
        """Flush all rows to the disk; called before each saved state, so that no completed step lacks a row."""
        with writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Write the remaining rows, and close the file."""
        with contextlib.suppress(OSError):  # the run may be ending because the disk is full
            self.file.close()
