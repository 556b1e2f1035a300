"""Read tables: CSV and TSV in any usual encoding and with any usual delimiter, and Parquet, also with the images.

Images in Parquet files are read at random through the library datasets, which maps them from a copy in weft's cache.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weft.data.library import LibraryReader, hf_bytes
from weft.data.source import Reader
from weft.data.split_names import split_of
from weft.data.tree import is_junk
from weft.errors import DataError, need
from weft.files import cache_dir
from weft.text import count, first_few, printable, reason_of

PARQUET = ".parquet"
_SHOWN = 60  # characters of a value in a message
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SIGNS = "\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u20ac\xb0\xa0"  # quotes, dashes, ellipsis, euro, degree, space
_DELIMITERS = (",", ";", "\t", "|")


@dataclass
class Table:
    """Content of a table.

    Attributes:
        name: in messages.
        columns: values of every row that is not empty, by `column_names`.
        numbers: number of each row in the file.
        notes: sentences for the user.
        image: column whose values are the keys of images in the file itself; empty if there is none.
        read: function from such a key to the bytes of the image.
        classes: class names by column, where the file defines them, in the order of their numbers.
    """

    name: str
    columns: dict[str, list[Any]]
    numbers: Sequence[int]
    notes: list[str] = field(default_factory=list)
    image: str = ""
    read: Reader | None = None
    classes: dict[str, list[str]] = field(default_factory=dict)

    def texts(self, column: str) -> list[str]:
        """Return the values of a column as text, without spaces around it; empty where a row has none."""
        return ["" if value is None else str(value).strip() for value in self.columns[column]]


def read_table(path: Path, image: str | None = None) -> Table:
    """Read a table.

    A text table is UTF-8, UTF-16 with a byte order mark, or Windows-1252, which a note names. Its columns are separated
    by commas, semicolons, tabs or bars: by those that give the first line most columns. Of Parquet, the bytes of images
    are not read.

    Args:
        path: of the table, or of a folder of Parquet files with the same columns.
        image: column of images in a Parquet file; None for the first that has the bytes of images.

    Raises:
        DataError: the table cannot be read, its encoding is unknown, a quote is not closed, a row has too many values,
            or files of a folder do not belong together.
        UsageError: a library for Parquet is not installed.
    """
    try:
        return _read_parquet(path, image) if path.suffix == PARQUET or path.is_dir() else _read_text(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"A table of images must be readable; '{printable(str(path))}' is not ({reason}).") from error


def _column_names(name: str, header: Iterable[str]) -> list[str]:
    """Return the names of columns without spaces around them; those without a name differ in their number of spaces."""
    names = [column.strip() for column in header]
    if twice := sorted({column for column in names if column and names.count(column) > 1}):
        raise DataError(
            f"Columns of a table must have different names; '{name}' has {first_few(map(shown, twice))} more than once."
            " Rename one of them."
        )
    spaces = itertools.count()
    return [column or " " * next(spaces) for column in names]


def _read_text(path: Path) -> Table:
    name = printable(str(path))
    text, notes = _decoded(path)
    lines = io.StringIO(text, newline="")
    first = lines.readline()
    if stated := re.fullmatch(r"sep=(.)\s*", first, re.IGNORECASE):  # as Excel writes it
        delimiter = stated[1]
    else:
        lines.seek(0)
        order = sorted(_DELIMITERS, key=lambda sign: sign != "\t") if path.suffix == ".tsv" else _DELIMITERS
        delimiter = max(order, key=lambda sign: len(next(csv.reader([first], delimiter=sign), [])))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)  # else a lost quote swallows rows
    rows: list[list[str]] = []
    numbers: list[int] = []
    try:
        header = _column_names(name, next(reader, []))
        for row in reader:
            if any(value.strip() for value in row[len(header) :]):
                raise DataError(
                    f"A row of a table must have a value per column; row {reader.line_num} of '{name}' has {len(row)}"
                    f" for {count(len(header), 'column')}: {first_few(map(shown, row))}. Quote values with"
                    f" '{printable(delimiter)}' in them."
                )
            if any(value.strip() for value in row):
                numbers.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"Quotes of a table must come in pairs; at row {reader.line_num} of '{name}': {error}. Close the quote, and"
            ' write quotes in quoted values twice, "".'
        ) from error
    columns = {column: [row[i] if i < len(row) else "" for row in rows] for i, column in enumerate(header)}
    return Table(name, columns, numbers, notes)


def shown(value: str) -> str:
    """Return a value for a message: printable, and cut."""
    return printable(value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}...")


def _decoded(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and a note if its encoding was guessed."""
    data = path.read_bytes()
    for mark, encoding in _ENCODINGS.items():
        if data.startswith(mark):
            return data.decode(encoding), []
    try:
        text, notes = data.decode("utf-8"), []
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
        foreign = [place for place, char in enumerate(text) if not char.isascii()]
        is_western = all(text[place].isalpha() or text[place] in _SIGNS for place in foreign)
        if not is_western or re.search(r"[^\x00-\x7f]{3}", text):  # no language of it has three in a row
            raise DataError(
                f"A table must be UTF-8 text; '{printable(str(path))}' is not: byte 0x{data[foreign[0]]:02x} at"
                f" position {foreign[0]:,}. Save it as CSV UTF-8."
            ) from None
        word = re.search(r"[^,;|\t\r\n\"]*[^\x00-\x7f][^,;|\t\r\n\"]*", text)
        assert word is not None
        notes = [
            f"The table is not UTF-8; it is read as Windows-1252, for example '{shown(word[0].strip())}'. If that is"
            " wrong, save it as CSV UTF-8."
        ]
    if "\0" in text:
        raise DataError(f"A table must be text; '{printable(str(path))}' has NUL characters. Save it as CSV UTF-8.")
    return text, notes


def _read_parquet(path: Path, image: str | None) -> Table:
    need("data", "pyarrow")
    paths = [path]
    if path.is_dir():
        paths = sorted(file for file in path.glob(f"*{PARQUET}") if not is_junk(file.name))
    sides = _sides(paths) if path.is_dir() else []
    columns: dict[str, list[Any]] = {}
    column, header, classes = "", list[str](), dict[str, list[str]]()
    for number, file_path in enumerate(paths):
        file, rows = _rows(file_path)
        schema, names = file.schema_arrow, rows.column_names
        with_bytes = [name for name in schema.names if name not in names]
        if number == 0:
            column = _image_column(schema, with_bytes) if image is None else image if image in with_bytes else ""
            header, classes = names, _class_names(schema.metadata or {})
            added = [*([column] if column else []), *(["split"] if sides else [])]
            columns = {name: [] for name in _column_names(printable(str(path)), [*names, *added])}
        if _class_names(schema.metadata or {}) != classes:
            raise DataError(
                f"Parquet files of a folder must define the same class names; '{printable(file_path.name)}' and"
                f" '{printable(paths[0].name)}' do not. Keep them in two folders."
            )
        if names != header or (column and column not in with_bytes):
            raise DataError(
                f"Parquet files of a folder must have the same columns; '{printable(str(file_path))}' has"
                f" {first_few(schema.names)}, not {first_few([*header, *([column] if column else [])])}."
            )
        new = [
            [_value(value, classes.get(name)) for value in values.to_pylist()]
            for name, values in zip(names, rows.columns, strict=True)
        ]
        if column:
            new.append([f"{file_path.name}/{number}/{row:07}" for row in range(file.metadata.num_rows)])
        if sides:
            new.append(sides[number : number + 1] * file.metadata.num_rows)
        for of_column, values in zip(columns.values(), new, strict=True):
            of_column += values
    reader = _reader(paths, column) if column else None
    numbers = range(2, 2 + len(next(iter(columns.values()), [])))
    return Table(printable(str(path)), columns, numbers, [], column.strip(), reader, classes)


def _rows(path: Path) -> tuple[Any, Any]:
    """Open a Parquet file; also return its rows without columns of bytes."""
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        return file, file.read(columns=[field.name for field in file.schema_arrow if not _has_bytes(field.type)])
    except (ArrowException, ValueError) as error:
        raise DataError(
            f"A table of images that ends in .parquet must be a Parquet file; '{printable(str(path))}':"
            f" {reason_of(error)}."
        ) from error


def _sides(paths: Sequence[Path]) -> list[str]:
    """Return the split of each file by its name; none if no name says it."""
    sides = [split_of(path.stem) for path in paths]
    if "" in sides and any(sides):
        raise DataError(
            "Names of Parquet files in a folder must all say the split, such as train-00000-of-00001.parquet, or none;"
            f" '{printable(paths[sides.index('')].name)}' does not. Rename it, or move it to another folder."
        )
    return sides if any(sides) else []


def _has_bytes(kind: Any) -> bool:
    """Return whether a column type holds encoded files: bytes, or a struct with a field `bytes`."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _has_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _image_column(schema: Any, names: Sequence[str]) -> str:
    """Return the column of images among those with bytes: `image`, else a struct, as datasets of the hub have."""
    from pyarrow import types

    def rank(name: str) -> tuple[bool, bool]:
        return name.lower() not in ("image", "img"), not types.is_struct(schema.field(name).type)

    return min(names, key=rank, default="")


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Return the class names by column, from the metadata of the library datasets."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            str(name): [str(word) for word in feature["names"]]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _value(value: Any, names: list[str] | None) -> Any:
    """Return a value, or the class name of its number; None for a number without name, as hidden labels have."""
    if isinstance(value, float) and value.is_integer():  # as pandas writes integers next to missing values
        value = int(value)
    if names is None or not isinstance(value, int):
        return None if value != value else value  # NaN: missing
    return names[value] if 0 <= value < len(names) else None


def _reader(paths: Sequence[Path], column: str) -> LibraryReader:
    need("data", "datasets")
    import datasets
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        cache = str(cache_dir() / "parquet")
        parts = [datasets.Dataset.from_parquet(str(path), columns=[column], cache_dir=cache) for path in paths]
        parts = [part.cast_column(column, datasets.Image(decode=False)) for part in parts]
    except Exception as error:  # the library raises many types, also of other libraries
        raise DataError(
            f"The images of '{printable(str(paths[0]))}' must be readable by the library datasets; {reason_of(error)}."
        ) from error
    finally:
        if not were_disabled:
            enable_progress_bars()
    return LibraryReader(parts, partial(hf_bytes, column))
