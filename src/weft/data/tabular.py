"""Read text tables: CSV and TSV in any usual encoding, with any usual delimiter."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.source import Reader
from weft.errors import DataError
from weft.text import count, first_few, printable

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


def column_names(name: str, header: Iterable[str]) -> list[str]:
    """Return the names of columns without spaces around them; those without a name differ in their number of spaces.

    Raises:
        DataError: two columns have the same name.
    """
    names = [column.strip() for column in header]
    if twice := sorted({column for column in names if column and names.count(column) > 1}):
        raise DataError(
            f"Columns of a table must have different names; '{name}' has {first_few(map(shown, twice))} more than once."
            " Rename one of them."
        )
    spaces = itertools.count()
    return [column or " " * next(spaces) for column in names]


def read_text_table(path: Path) -> Table:
    """Read a text table: UTF-8, UTF-16 with a byte order mark, or Windows-1252, which a note names.

    Columns are separated by commas, semicolons, tabs or bars: by those that give the first line most columns.

    Raises:
        OSError, UnicodeDecodeError, csv.Error: it cannot be read.
        DataError: the encoding is unknown, a quote is not closed, or a row has too many values.
    """
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
        header = column_names(name, next(reader, []))
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
