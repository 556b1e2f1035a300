"""Open a table of image paths and labels, one row per image: CSV, TSV or Parquet.

Columns: `image` (or path, file, filename, filepath), `label` (or class, target), and optionally `split`. Paths are
absolute, or relative to the folder of the table.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.data.images.decode import open_regular
from weft.data.index.inventory import VAL_NAMES, ImageEntry
from weft.data.sources.listing import Listing, sort_class_names
from weft.errors import DataError, need
from weft.text import printable, reason_of

SUFFIXES = (".csv", ".tsv", ".parquet")
IMAGE = ("image", "path", "file", "filename", "filepath", "file_name")
LABEL = ("label", "class", "target", "class_name")
SPLIT = ("split", "subset", "fold")


class FileReader:
    """Read files by path, relative to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)

    def __call__(self, key: str) -> bytes:
        """Return the bytes of a file."""
        with open_regular(os.path.join(self.folder, key)) as file:
            return file.read()

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        return os.stat(os.path.join(self.folder, key)).st_size


def open_table(path: Path, group: str | None = None) -> Listing:
    """List the images of a table.

    Args:
        path: of the table.
        group: column that names the group of an image, if the table has it.

    Raises:
        DataError: the table cannot be read, lacks a column, or a row lacks a value.
        UsageError: the table is a Parquet file and pyarrow is not installed.
    """
    name = printable(str(path))
    try:
        header, rows = _parquet(path) if path.suffix == ".parquet" else _text(path)
        image, label, split = (_column(header, names, name) for names in (IMAGE, LABEL, SPLIT))
        rows = list(_entries(rows, image, label, split, name))
        columns = [str(word) for word in header]
        groups = None
        if group is not None and group in columns:
            groups = {entry.key: _group(row, columns.index(group), entry.key) for row, entry in rows}
        entries = [entry for _, entry in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"A table of images must be readable; '{name}' is not ({reason}).") from error
    classes = sort_class_names({entry.class_name for entry in entries})
    return Listing(name, entries, FileReader(path.parent), classes, groups=groups)


def _group(row: Sequence[Any], place: int, key: str) -> str:
    """Return the group of an image; an image without one is a group of its own."""
    value = row[place] if place < len(row) else None
    return f"/{key}" if value in (None, "") else str(value)


def _text(path: Path) -> tuple[list[str], Iterator[Sequence[Any]]]:
    """Return the header and the rows of a CSV or TSV file."""

    def rows() -> Iterator[Sequence[str]]:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            yield from csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")

    lines = rows()
    return list(next(lines, [])), (line for line in lines if line)


def _parquet(path: Path) -> tuple[list[str], Iterator[Sequence[Any]]]:
    """Return the header and the rows of a Parquet file, read in batches."""
    need("data", "pyarrow")
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DataError(
            f"A table of images that ends in .parquet must be a Parquet file; '{path}': {reason_of(error)}."
        ) from error
    header = list(file.schema_arrow.names)
    return header, (tuple(row.values()) for batch in file.iter_batches() for row in batch.to_pylist())


def _column(header: Sequence[str], names: Sequence[str], name: str) -> int | None:
    """Return the index of a column; None if there is no column of splits."""
    lowered = [str(word).strip().lower() for word in header]
    place = next((lowered.index(word) for word in names if word in lowered), None)
    if place is None and names is not SPLIT:
        raise DataError(
            f"A table of images must have a column '{names[0]}' (or {', '.join(names[1:])}); '{name}' has "
            f"{', '.join(map(str, header)) or 'none'}. Add a first line with the column names."
        )
    return place


def _entries(
    rows: Iterator[Sequence[Any]], image: int | None, label: int | None, split: int | None, name: str
) -> Iterator[tuple[Sequence[Any], ImageEntry]]:
    """Yield every row with its image."""
    assert image is not None
    assert label is not None
    seen: set[str] = set()
    for number, row in enumerate(rows, start=2):
        if len(row) <= max(image, label) or row[image] in (None, "") or row[label] in (None, ""):
            raise DataError(
                f"Every row of a table must name an image and its class; row {number} of '{name}' does not."
            )
        key = str(row[image])
        if key in seen:
            raise DataError(
                f"A table must list every image once; row {number} of '{name}' lists '{printable(key)}' again."
            )
        seen.add(key)
        yield row, ImageEntry(key, str(row[label]), _split(row, split, number, name))


def _split(row: Sequence[Any], place: int | None, number: int, name: str) -> str:
    if place is None:
        return ""
    word = str(row[place]).strip().lower() if place < len(row) else ""
    if word == "train":
        return "train"
    if word in VAL_NAMES:
        return "val"
    raise DataError(f"The split must be train or {', '.join(VAL_NAMES)}; row {number} of '{name}' has '{word}'.")
