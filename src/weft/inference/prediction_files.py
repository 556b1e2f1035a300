"""Predictions as a table, as a CSV file, and as copies of the images in one folder per class."""

from __future__ import annotations

import csv
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.files import check_output, check_writable, new_directory, write_table
from weft.inference.arguments import check_outside_images
from weft.machine.system import unused_name
from weft.text import printable

if TYPE_CHECKING:
    from weft.inference.prediction import FilePrediction

INDEX = "predictions.csv"  # in a directory of copies; its last column names each copy
UNKNOWN, REJECTED = "unknown", "rejected"  # folders of images that are in no class


def table_of(predictions: Sequence[FilePrediction]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows: a row per class of each image that could be read.

    The columns `unknown` and `rejected` exist only where the model has a detector of unknown images, and where
    predictions are rejected.
    """
    good = [prediction for prediction in predictions if prediction.error is None]
    flags = [name for name in (UNKNOWN, REJECTED) if any(getattr(row, name) is not None for row in good)]
    rows = [
        (row.image, str(rank), name, f"{share:.4f}", *("yes" if getattr(row, flag) else "no" for flag in flags))
        for row in good
        for rank, (name, share) in enumerate(row.top, start=1)
    ]
    return ("image", "rank", "class", "probability", *flags), rows


def check_prediction_output(
    out: Path, images: str | Path | Sequence[str | Path], paths: Sequence[str], *, force: bool
) -> None:
    """Check that the CSV file or the directory can be written.

    Args:
        out, force: as in `write_predictions`.
        images, paths: argument of `predict`, and the files that it means.

    Raises:
        UsageError: it is taken, or in a folder of images, or the directory has other files than copies of images.
        StorageError: it cannot be written to.
    """
    check_outside_images(out, images)
    if not is_table(out):
        check_output(out, _owned(out), force=force)
        if inside := [path for path in paths if Path(path).resolve().is_relative_to(out.resolve())]:
            raise UsageError(
                f"The images must be outside the output directory, which is replaced as a whole; {printable(inside[0])}"
                f" is in {printable(str(out))}. Choose another --out."
            )
        return
    if out.is_dir() or (os.path.lexists(out) and not force):
        raise UsageError(f"{out} exists. Choose another --out, or pass --force to replace a file.")
    check_writable(out.parent)


def is_table(out: Path) -> bool:
    """Return whether an output is a CSV file; else it is a directory."""
    return out.suffix.lower() == ".csv"


def write_predictions(out: Path, paths: Sequence[str], predictions: Sequence[FilePrediction], *, force: bool) -> None:
    """Write a CSV file, or copy the images into one folder per class; the images themselves are only read.

    Args:
        out: a file that ends in .csv, or a directory.
        paths: of the images.
        predictions: one per path; images that could not be read are left out.
        force: replace an existing file or directory.

    Raises:
        UsageError, StorageError: as in `check_prediction_output`.
    """
    if is_table(out):
        write_table(out, *table_of(predictions))
        return
    good = [(path, row) for path, row in zip(paths, predictions, strict=True) if row.error is None]
    header, _ = table_of([row for _, row in good])
    used: set[str] = set()
    unknown, rejected = unused_name(UNKNOWN, used), unused_name(REJECTED, used)
    folders = {name: unused_name(name, used) for name in sorted({row.top[0][0] for _, row in good})}
    used_in: defaultdict[str, set[str]] = defaultdict(set)
    rows = []
    with new_directory(out, _owned(out), force=force) as directory:
        for path, row in good:
            folder = unknown if row.unknown else rejected if row.rejected else folders[row.top[0][0]]
            copy = f"{folder}/{unused_name(Path(path).stem, used_in[folder])}{Path(path).suffix}"
            (directory / folder).mkdir(exist_ok=True)
            shutil.copyfile(path, directory / copy)
            rows.append((*table_of([row])[1][0], copy))
        write_table(directory / INDEX, (*header, "copy"), rows)


def _owned(out: Path) -> list[str]:
    """Return the entries of a directory that an earlier call wrote, by its table."""
    try:
        with (out / INDEX).open(encoding="utf-8", newline="") as file:
            return [INDEX, *{row["copy"].partition("/")[0] for row in csv.DictReader(file)}]
    except (OSError, ValueError, KeyError, AttributeError, csv.Error):
        return []
