"""Open a table of image paths and labels, one row per image: CSV, TSV or Parquet.

Columns: `image` (or path, file, filename, filepath), `label` (or class, target), and optionally `split`. Paths are
absolute, or relative to the folder of the table. Spaces around a column name or a label count nothing.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.data.images.decode import read_regular
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
        return read_regular(os.path.join(self.folder, key))

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
        header, numbered = read_rows(path)
        image, label, split = (_column(header, names, name) for names in (IMAGE, LABEL, SPLIT))
        rows = list(_entries(numbered, image, label, split, name))
        groups = None
        if group is not None and group in header:
            groups = {entry.key: _group(row, header.index(group), entry.key) for row, entry in rows}
        entries = [entry for _, entry in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"A table of images must be readable; '{name}' is not ({reason}).") from error
    classes = sort_class_names({entry.class_name for entry in entries})
    return Listing(name, entries, FileReader(path.parent), classes, groups=groups)


def _group(row: Sequence[Any], place: int, key: str) -> str:
    """Return the group of an image; an image without one is a group of its own."""
    value = "" if place >= len(row) or row[place] is None else str(row[place]).strip()
    return value or f"/{key}"


def other_columns(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the columns other than image, label and split, and their values by image.

    Raises:
        OSError, UnicodeDecodeError, csv.Error, DataError: as `open_table`, which reports them.
    """
    header, rows = read_rows(path)
    image, label, split = (_column(header, names, str(path)) for names in (IMAGE, LABEL, SPLIT))
    assert image is not None
    others = [place for place in range(len(header)) if place not in (image, label, split)]
    values = {
        str(row[image]): ["" if place >= len(row) or row[place] is None else str(row[place]) for place in others]
        for _, row in rows
    }
    return [header[place] for place in others], values


def read_rows(path: Path) -> tuple[list[str], Iterator[tuple[int, Sequence[Any]]]]:
    """Return the column names of a table, and its rows with their numbers; empty rows are left out.

    Columns of a .csv file are separated by commas; by semicolons, as spreadsheets of many countries write them, if the
    first line has no comma. Spaces around a column name count nothing.
    """
    header, rows = _parquet(path) if path.suffix == ".parquet" else _text(path)
    return [str(name).strip() for name in header], rows


def _text(path: Path) -> tuple[list[str], Iterator[tuple[int, Sequence[Any]]]]:
    """Return the header and the rows of a CSV or TSV file."""

    def rows() -> Iterator[tuple[int, Sequence[str]]]:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if path.suffix == ".tsv" else ";" if "," not in first and ";" in first else ","
            reader = csv.reader(file, delimiter=delimiter)
            yield from ((reader.line_num, row) for row in reader)

    lines = rows()
    _, header = next(lines, (1, []))
    return list(header), ((number, row) for number, row in lines if any(value.strip() for value in row))


def _parquet(path: Path) -> tuple[list[str], Iterator[tuple[int, Sequence[Any]]]]:
    """Return the header and the rows of a Parquet file, read in batches; the first row has number 2, as in a CSV."""
    need("data", "pyarrow")
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DataError(
            f"A table of images that ends in .parquet must be a Parquet file; '{path}': {reason_of(error)}."
        ) from error
    header = list(file.schema_arrow.names)
    rows = (tuple(row.values()) for batch in file.iter_batches() for row in batch.to_pylist())
    return header, enumerate(rows, start=2)


def _column(header: Sequence[str], names: Sequence[str], name: str) -> int | None:
    """Return the index of a column; None if there is no column of splits."""
    lowered = [word.lower() for word in header]
    place = next((lowered.index(word) for word in names if word in lowered), None)
    if place is None and names is not SPLIT:
        raise DataError(
            f"A table of images must have a column '{names[0]}' (or {', '.join(names[1:])}); '{name}' has "
            f"{', '.join(header) or 'none'}. Add a first line with the column names."
        )
    return place


def _entries(
    rows: Iterator[tuple[int, Sequence[Any]]], image: int | None, label: int | None, split: int | None, name: str
) -> Iterator[tuple[Sequence[Any], ImageEntry]]:
    """Yield every row with its image."""
    assert image is not None
    assert label is not None
    seen: set[str] = set()
    for number, row in rows:
        class_name = "" if len(row) <= max(image, label) or row[label] is None else str(row[label]).strip()
        if not class_name or row[image] in (None, ""):
            raise DataError(
                f"Every row of a table must name an image and its class; row {number} of '{name}' does not. Fill it in,"
                " or delete the row."
            )
        key = str(row[image])
        if key in seen:
            raise DataError(
                f"A table must list every image once; row {number} of '{name}' lists '{printable(key)}' again."
            )
        seen.add(key)
        yield row, ImageEntry(key, class_name, _split(row, split, number, name))


def _split(row: Sequence[Any], place: int | None, number: int, name: str) -> str:
    if place is None:
        return ""
    word = str(row[place]).strip().lower() if place < len(row) else ""
    if word == "train":
        return "train"
    if word in VAL_NAMES:
        return "val"
    raise DataError(f"The split must be train or {', '.join(VAL_NAMES)}; row {number} of '{name}' has '{word}'.")
