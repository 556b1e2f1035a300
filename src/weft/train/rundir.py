"""The directory of a run: made once, written so that a file is either whole or not there.

recipe.yaml    everything that was decided, and what it ran on; repeats the run
metrics.csv    one line per epoch
best/ last/    model directories
report/        pictures and tables
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.errors import StorageError, UsageError

CONTENTS = ("recipe.yaml", "metrics.csv", "best", "last", "report")


class EpochRow(NamedTuple):
    """One line of `metrics.csv`.

    Steps are counted over the whole run, the learning rate is that of the epoch's first step, losses are in nats and
    accuracies in percent, `images_per_second` is of training alone, and `seconds` of the epoch with its evaluation.
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
    seconds: float


def refuse_taken(path: Path, contents: Sequence[str] = CONTENTS, *, force: bool) -> None:
    """Refuses a directory that holds something, unless `force` allows to replace it and all in it is in `contents`.

    Raises:
        UsageError: it is taken.
    """
    with writing(path):
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
        if not force:
            raise UsageError(
                f"The output directory must be new or empty; {path} is neither. Pass --force or another --out."
            )
        foreign = sorted(set(path.iterdir()) - {path / name for name in contents}) if path.is_dir() else [path]
    if foreign:
        raise UsageError(
            f"--force replaces what weft wrote and nothing else; {path} also holds '{foreign[0].name}'."
            " Choose another --out."
        )


def make_dir(path: Path, contents: Sequence[str] = CONTENTS, *, force: bool) -> None:
    """Makes an empty directory for `contents`.

    Args:
        path: where; parents are made.
        contents: names that may be removed from it under `force`; nothing else is ever removed.
        force: take the place of what is there.

    Raises:
        UsageError: it is taken.
        StorageError: it cannot be made or written to.
    """
    refuse_taken(path, contents, force=force)
    with writing(path):
        for name in contents:
            _remove(path / name)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # whether it can be written to, before hours of work
            pass


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk says into a `StorageError` that names the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{path} must be writable; {reason}. Free some space or choose another --out.") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: beside it, flushed to the disk, then moved into its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            # backslashreplace: names of files and classes may hold bytes that are no text
            with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write_metrics(path: Path, history: Sequence[EpochRow]) -> None:
    """Writes the history as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(EpochRow._fields)
    writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in history)
    write_text(path, buffer.getvalue())
