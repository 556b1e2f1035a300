"""The prediction for an image file, and predictions as a table, a CSV file or copies of the images by class."""

from __future__ import annotations

import csv
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.files import check_output, new_directory, write_table
from weft.inference.arguments import check_files, check_outside_images
from weft.inference.image_card import image_card
from weft.machine.system import unused_name
from weft.progress import say
from weft.report import markup
from weft.report.notebook import described
from weft.text import printable

INDEX = "predictions.csv"  # in a directory of copies; its last column names each copy
UNKNOWN, REJECTED = "unknown", "rejected"  # folders of images that are in no class


@dataclass(frozen=True)
class FilePrediction:
    """Prediction for one image file: the most probable classes, or the reason why there is none.

    Attributes:
        image: path of the file, printable.
        top: (class, probability), most probable first.
        error: message, if the file cannot be read.
        reason: short code of the error, such as `truncated`.
        rejected: whether the most probable class is below the threshold of `reject_at_error`; None without one.
        unknown: whether the image resembles no training image; None if the model cannot tell.
    """

    image: str
    top: list[tuple[str, float]]
    error: str | None = None
    reason: str | None = None
    rejected: bool | None = None
    unknown: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        if self.error is not None:
            return {"image": self.image, "error": self.error, "reason": self.reason}
        top = [{"class": name, "probability": share} for name, share in self.top]
        rejected = {} if self.rejected is None else {"rejected": self.rejected}
        unknown = {} if self.unknown is None else {"unknown": self.unknown}
        return {"image": self.image, "top": top, **rejected, **unknown}

    def __repr__(self) -> str:
        """Return the image and its classes in one line."""
        top = ", ".join(f"{name!r} {100 * share:.1f} %" for name, share in self.top)
        values = [("image", repr(self.image)), ("top", None if self.error is not None else f"[{top}]")]
        values += [("error", self.error and repr(self.error)), ("rejected", self.rejected), ("unknown", self.unknown)]
        return described("FilePrediction", values)

    def _repr_html_(self) -> str:
        return markup.fragment(markup.gallery([self.card()]))

    def card(self) -> markup.Card:
        """Return the image and its classes, for a gallery."""
        if self.error is not None:
            return markup.Card({}, [self.error], self.image)
        lines = [f"{name}, {100 * share:.1f} %" for name, share in self.top]
        lines += ["rejected: the confidence is below the threshold"] if self.rejected else []
        lines += ["unknown: the image resembles no training image"] if self.unknown else []
        return image_card(self.image, lines)


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
    if is_table(out):
        check_files([out], force=force)
        return
    check_output(out, _owned(out), force=force)
    if inside := [path for path in paths if Path(path).resolve().is_relative_to(out.resolve())]:
        raise UsageError(
            f"The images must be outside the output directory, which is replaced as a whole; {printable(inside[0])}"
            f" is in {printable(str(out))}. Choose another --out."
        )


def is_table(out: Path) -> bool:
    """Return whether an output is a CSV file; else it is a directory."""
    return out.suffix.lower() == ".csv"


def write_predictions(out: Path, paths: Sequence[str], predictions: Sequence[FilePrediction], *, force: bool) -> None:
    """Write a CSV file, or copy the images into one folder per class; the images themselves are only read.

    Args:
        out: a file that ends in .csv, or a directory.
        paths: of the images.
        predictions: one per path; images that could not be read are left out. Without any other, nothing is written.
        force: replace an existing file or directory.

    Raises:
        UsageError, StorageError: as in `check_prediction_output`.
    """
    good = [(path, row) for path, row in zip(paths, predictions, strict=True) if row.error is None]
    if not good:
        say(f"{printable(str(out))} is not written, because no image could be read.")
        return
    if is_table(out):
        write_table(out, *table_of(predictions))
        return
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
    """Return the files of a directory that an earlier call wrote, by its table."""
    try:
        with (out / INDEX).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            return [INDEX, *filter(None, (row["copy"] for row in csv.DictReader(file)))]
    except (OSError, ValueError, KeyError, AttributeError, csv.Error):
        return []
