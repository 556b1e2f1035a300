"""Open a table of images, one row per image: CSV or TSV with paths, Parquet with paths or with the images themselves.

Columns: `image` (or path, file, ...), `label` (or class, ...), and optionally `split`. `--set data.image=COLUMN` and
`--set data.label=COLUMN` choose others, and a note names every guess. Paths are absolute, or relative to the folder of
the table. Spaces around a column name, a path or a label count nothing.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.index.inventory import Inventory
from weft.data.index.source import ImageEntry, Reader, sort_class_names
from weft.data.index.split_names import SIDES, is_flag_of_split, split_of
from weft.data.index.tree import EXTENSIONS, extension, is_junk, num_beside
from weft.data.sources.folder import FileReader
from weft.data.sources.parquet import SUFFIX, ParquetRows, read_parquet
from weft.errors import DataError, unknown
from weft.text import count, first_few, printable

SUFFIXES = (".csv", ".tsv", SUFFIX)
IMAGE = ("image", "path", "file", "filename", "filepath", "imagepath", "imagefile", "imagename", "img", "imgpath")
IMAGE_ID = ("imageid", "imgid", "id")  # the image only if no other column names a file
LABEL = ("label", "class", "target", "classname", "labelname", "category", "categoryname")
SPLIT = ("split", "subset", "fold")
SPLIT_LIKE = ("partition", "phase", "usage")  # further names of columns that can only be a split
MAX_SEARCHED = 200_000  # files below a table among which images are searched by name
MAX_PATH = 4096  # characters of a path
_SHOWN = 60  # characters of a value in a message
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SIGNS = "\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u20ac\xb0\xa0"  # quotes, dashes, ellipsis, euro, degree, space
_DELIMITERS = (",", ";", "\t", "|")
_YES, _NO = {"1", "1.0", "true"}, {"0", "0.0", "false"}


class Table(NamedTuple):
    """Content of a table.

    Attributes:
        header: column names.
        rows: (number, values) of every row that is not empty.
        notes: sentences for the user.
        parquet: of a Parquet file.
    """

    header: list[str]
    rows: list[tuple[int, Sequence[Any]]]
    notes: list[str]
    parquet: ParquetRows | None = None


class Columns(NamedTuple):
    """Places of columns: of the image, of the class (several if one-hot), and of the split."""

    image: int
    labels: list[int]
    split: int | None


def open_table(path: Path, group: str | None = None, image: str | None = None, label: str | None = None) -> Inventory:
    """List the images of a table.

    Args:
        path: of the table, or of a folder of Parquet files.
        group: column that names the group of an image, if the table has it.
        image, label: columns of the images and of the classes; None to recognise them.

    Raises:
        DataError: the table cannot be read, lacks a column, a row lacks a value, or no path leads to a file.
        UsageError: there is no column `image` or `label`, or a library for Parquet is not installed.
    """
    name = printable(str(path))
    try:
        table = read_table(path, image)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"A table of images must be readable; '{name}' is not ({reason}).") from error
    columns, notes = choose_columns(table, name, group, image, label)
    entries = _entries(table, columns, name)
    _check_once(entries, table, name)
    parquet = table.parquet
    reader: Reader
    if parquet is not None and parquet.read is not None and parquet.image == table.header[columns.image]:
        reader = parquet.read
    else:
        reader = FileReader(path.parent)
        entries = _located(entries, path.parent, table.header[columns.image], name, notes)
        _check_once(entries, table, name)
    if group is not None and group in table.header:
        place = table.header.index(group)
        pairs = zip(table.rows, entries, strict=True)
        entries = [entry._replace(group=_text_in(row, place) or f"/{entry.key}") for (_, row), entry in pairs]
    own = [] if parquet is None else parquet.classes.get(table.header[columns.labels[0]], [])
    classes = own + sort_class_names({entry.class_name for entry in entries} - {"", *own})
    skipped = Counter(beside=num_beside(os.fspath(path))) if path.is_dir() else Counter()
    return Inventory(str(path), entries, reader, {"": classes}, remarks=[*table.notes, *notes], skipped=+skipped)


def other_columns(
    path: Path, image: str | None = None, label: str | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the columns other than image, label and split, and their values by image.

    Raises:
        OSError, UnicodeDecodeError, csv.Error, DataError: as `open_table`, which reports them.
    """
    table = read_table(path, image)
    columns, _ = choose_columns(table, str(path), None, image, label)
    entries = _located(_entries(table, columns, str(path)), path.parent, table.header[columns.image], str(path), [])
    others = [place for place in range(len(table.header)) if place not in (columns.image, *columns.labels)]
    others = [place for place in others if place != columns.split]
    pairs = zip(table.rows, entries, strict=True)
    values = {entry.key: [_text_in(row, place) for place in others] for (_, row), entry in pairs}
    return [table.header[place] for place in others], values


def read_table(path: Path, image: str | None = None) -> Table:
    """Return the columns of a table, and its rows with their numbers.

    Text is UTF-8, or UTF-16 with a byte order mark, or Windows-1252, which a note names. Columns are separated by
    commas, semicolons, tabs or bars: by those that give the first line most columns.

    Args:
        path: of the table, or of a folder of Parquet files.
        image: column of images in a Parquet file, if it is known.

    Raises:
        OSError, UnicodeDecodeError, csv.Error: it cannot be read.
        DataError: the encoding is unknown, or it is no Parquet file.
    """
    if path.suffix == SUFFIX or path.is_dir():
        parquet = read_parquet(path, image)
        return Table([str(name).strip() for name in parquet.header], list(enumerate(parquet.rows, 2)), [], parquet)
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
    rows = []
    try:
        header = [value.strip() for value in next(reader, [])]
        for row in reader:
            if any(value.strip() for value in row[len(header) :]):
                raise DataError(
                    f"A row of a table must have a value per column; row {reader.line_num} of '{printable(str(path))}'"
                    f" has {len(row)} for {count(len(header), 'column')}: {first_few(map(_shown, row))}. Quote values"
                    f" with '{printable(delimiter)}' in them."
                )
            if any(value.strip() for value in row):
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise DataError(
            f"Quotes of a table must come in pairs; at row {reader.line_num} of '{printable(str(path))}': {error}."
            ' Close the quote, and write quotes in quoted values twice, "".'
        ) from error
    return Table(header, rows, notes)


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
            f"The table is not UTF-8; it is read as Windows-1252, for example '{_shown(word[0].strip())}'. If that is"
            " wrong, save it as CSV UTF-8."
        ]
    if "\0" in text:
        raise DataError(f"A table must be text; '{printable(str(path))}' has NUL characters. Save it as CSV UTF-8.")
    return text, notes


def choose_columns(
    table: Table, name: str, group: str | None = None, image: str | None = None, label: str | None = None
) -> tuple[Columns, list[str]]:
    """Return the columns to read, and a note that names those that were guessed.

    Args:
        table: its content.
        name: of the table, in messages.
        group, image, label: as in `open_table`.

    Raises:
        DataError: a column cannot be recognised, or a guess is wrong.
        UsageError: there is no column `image` or `label`.
    """
    header = table.header
    for setting, column in (("image", image), ("label", label)):
        if column is not None and column not in header:
            raise unknown(f"column for data.{setting}", column, header, first_few(header, 20))
    if twice := sorted({column for column in header if column and header.count(column) > 1}):
        raise DataError(
            f"Columns of a table must have different names; '{name}' has {first_few(map(_shown, twice))} more than"
            " once. Rename one of them."
        )
    notes: list[str] = []
    image_place = header.index(image) if image is not None else _image_column(table, name)
    taken = {image_place} | {place for place, column in enumerate(header) if column == label or column == group}
    split, is_guess = _split_column(table, taken, name, notes)
    if label is not None:
        labels = [header.index(label)]
    else:
        labels = _label_columns(table, taken | {split}, name)
    guessed = []
    if image is None and header[image_place].lower() != "image":
        guessed.append(f"images from column '{_shown(header[image_place])}'")
    if label is None and len(labels) > 1:
        guessed.append(f"classes from the one-hot columns {first_few(_shown(header[place]) for place in labels)}")
    elif label is None and header[labels[0]].lower() != "label":
        guessed.append(f"classes from column '{_shown(header[labels[0]])}'")
    if split is not None and is_guess:
        guessed.append(f"the split from column '{_shown(header[split])}'")
    if guessed:
        notes.insert(0, f"Read {', '.join(guessed)}. To choose others: --set data.image=COLUMN, data.label=COLUMN.")
    return Columns(image_place, labels, split), notes


def _image_column(table: Table, name: str) -> int:
    """Return the column of images: by its content in a Parquet file, else by its name, else by its values."""
    if table.parquet is not None and table.parquet.image:
        return table.header.index(table.parquet.image)
    if any(extension(column) in EXTENSIONS for column in table.header):
        raise DataError(
            f"The first line of a table must name its columns; that of '{name}' names an image:"
            f" {_listed(table.header)}. Add the line image,label."
        )
    plain = [_plain(column) for column in table.header]
    by_name = [plain.index(word) for word in IMAGE if word in plain]
    by_value = [place for place in range(len(plain)) if _are_files(table, place)]
    by_id = [plain.index(word) for word in IMAGE_ID if word in plain]
    if by_name or len(by_value) == 1 or (by_id and not by_value):
        return (by_name or by_value or by_id)[0]
    raise DataError(
        f"A table of images must have a column 'image' (or path, file, filename); '{name}' has"
        f" {_listed(table.header)}. Choose the column of paths: --set data.image=COLUMN."
    )


def _label_columns(table: Table, taken: set[int | None], name: str) -> list[int]:
    """Return the column of classes: by its name, else one-hot columns, else the only other column."""
    header = table.header
    plain = [_plain(column) for column in header]
    for word in LABEL:
        if places := [place for place, column in enumerate(plain) if column == word and place not in taken]:
            return places[:1]
    others = [place for place in range(len(header)) if place not in taken]
    flags = [place for place in others if {_text_in(row, place).lower() for _, row in table.rows} <= _YES | _NO]
    if len(flags) > 1 and table.rows:
        for number, row in table.rows:
            if (ones := sum(_text_in(row, place).lower() in _YES for place in flags)) != 1:
                listed = first_few(_shown(header[place]) for place in flags)
                raise DataError(
                    f"Every image must have one class; the columns {listed} of '{name}' have 0 and 1, and row {number}"
                    f" has {count(ones, 'one')}. Choose the column of classes: --set data.label=COLUMN."
                )
        return flags
    values = {_text_in(row, others[0]) for _, row in table.rows} if len(others) == 1 else set()
    if len(others) == 1 and (len(values) <= max(len(table.rows) / 2, 2)):
        return others
    seen = ""
    if len(others) == 1:
        seen = (
            f" Column '{_shown(header[others[0]])}' has {count(len(values), 'value')} in"
            f" {count(len(table.rows), 'row')}, such as '{_shown(min(values))}', which are no classes."
        )
    raise DataError(
        f"A table of images must have a column 'label' (or class, target, category); '{name}' has {_listed(header)}."
        f"{seen} Choose the column of classes: --set data.label=COLUMN."
    )


def _split_column(table: Table, taken: set[int], name: str, notes: list[str]) -> tuple[int | None, bool]:
    """Return the column of splits, and whether its name does not say so; a column whose values are all splits."""
    plain = [_plain(column) for column in table.header]
    has_label = len(taken) > 1 or not set(LABEL).isdisjoint(plain)
    places = [plain.index(word) for word in SPLIT if word in plain and plain.index(word) not in taken]
    for place in places:
        values = {_text_in(row, place) for _, row in table.rows}
        if plain[place] == "fold" and not any(map(split_of, values)):
            listed = first_few(_shown(value) for value in sort_class_names(values))
            notes.append(
                f"Column '{_shown(table.header[place])}' is not used, because its values are not names of splits:"
                f" {listed}. For a cross-validation: --set data.folds=5."
            )
            continue
        if wrong := next(((n, row) for n, row in table.rows if not split_of(_text_in(row, place))), None):
            raise DataError(
                f"The split must be {', '.join(SIDES[:-1])} or {SIDES[-1]}; row {wrong[0]} of '{name}' has"
                f" '{_shown(_text_in(wrong[1], place))}'. Correct it, or rename the column"
                f" '{_shown(table.header[place])}'."
            )
        return place, False
    for place in range(len(plain)):
        if place in taken or plain[place] in (*LABEL, "fold"):
            continue
        values = {_text_in(row, place) for _, row in table.rows}
        sides = {split_of(value) for value in values}
        if "" not in sides and "train" in sides and len(sides) > 1:
            return place, True
        flags = {value.lower() for value in values}
        # without a column of classes, `train` can be one of several one-hot columns
        is_flag = has_label and len(flags) == 2 and flags <= _YES | _NO and is_flag_of_split(table.header[place])
        is_mixed = len(values) <= len(SIDES) + 1 and {"train", ""} < sides
        if is_flag or is_mixed or (plain[place] in SPLIT_LIKE and "" in sides):
            listed = first_few(_shown(value) or "''" for value in sort_class_names(values))
            raise DataError(
                f"A column of splits must have the values {', '.join(SIDES[:-1])} or {SIDES[-1]}; column"
                f" '{_shown(table.header[place])}' of '{name}' has {listed}. Write these values, in a column 'split';"
                " if it is no split, rename the column."
            )
    return None, False


def _entries(table: Table, columns: Columns, name: str) -> list[ImageEntry]:
    """Return the image of every row; an image of the test split may have no class."""
    entries = []
    for number, row in table.rows:
        split = "" if columns.split is None else split_of(_text_in(row, columns.split))
        if len(columns.labels) > 1:
            class_name = next(table.header[place] for place in columns.labels if _text_in(row, place).lower() in _YES)
        else:
            place = columns.labels[0]
            if place < len(row) and isinstance(row[place], (list, dict)):
                raise DataError(
                    f"Every image must have one class; column '{_shown(table.header[place])}' of '{name}' has"
                    f" '{_shown(str(row[place]))}' in row {number}. Choose the column of classes: --set"
                    " data.label=COLUMN."
                )
            class_name = _text_in(row, place)
        key = _text_in(row, columns.image)
        if not key or (not class_name and split != "test"):
            raise DataError(
                f"Every row of a table must name an image and its class; row {number} of '{name}' does not. Fill it in,"
                " or delete the row."
            )
        if len(key) > MAX_PATH:
            raise DataError(
                f"Column '{_shown(table.header[columns.image])}' of '{name}' must have paths; row {number} has"
                f" '{_shown(key)}'. Choose the column of paths: --set data.image=COLUMN."
            )
        entries.append(ImageEntry(key, class_name, split))
    return entries


def _located(entries: list[ImageEntry], folder: Path, column: str, name: str, notes: list[str]) -> list[ImageEntry]:
    """Return the images with paths that lead to files.

    If no path of the table does, files below its folder are searched whose path ends like it, with or without
    extension: a column of ids, or paths from another folder.

    Raises:
        DataError: no file is found, or several for one path.
    """
    if not entries or any(os.path.isfile(os.path.join(folder, entry.key)) for entry in entries):
        return entries
    files = _files_below(folder)
    matches = {entry.key: _matches(entry.key, files) for entry in entries}
    starts = [set(found) for found in matches.values() if found]
    if not starts:
        raise DataError(
            f"Column '{_shown(column)}' of '{name}' must have paths of images, from the folder of the table; no row"
            f" leads to a file, such as '{_shown(entries[0].key)}'. Choose another column, --set data.image=COLUMN, or"
            " correct the paths."
        )
    common = set.intersection(*starts)
    found: dict[str, str] = {}
    for key, of_key in matches.items():
        allowed = common & set(of_key) if len(common) == 1 else of_key
        options = sorted(path for start in allowed for path in of_key[start])
        if len(options) > 1:
            raise DataError(
                f"Every row of a table must name one image; '{_shown(key)}' of '{name}' can be {_shown(options[0])} or"
                f" {_shown(options[1])}. Write paths from the folder of the table, or move the others elsewhere."
            )
        if options:
            found[key] = options[0]
    example = next(iter(found))
    notes.append(
        f"Images of column '{_shown(column)}' are searched below the folder of the table, for example"
        f" '{_shown(example)}': {_shown(found[example])}."
    )
    return [entry._replace(key=found.get(entry.key, entry.key)) for entry in entries]


def _files_below(folder: Path) -> dict[str, list[str]]:
    """Return the image files below a folder by name, and by name without extension; none if there are too many."""
    files: dict[str, list[str]] = defaultdict(list)
    number = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_junk(name))
        number += len(names)
        if number > MAX_SEARCHED:
            return {}
        inner = os.path.relpath(root, folder)
        for name in names:
            if not is_junk(name) and extension(name) in EXTENSIONS:
                key = name if inner == "." else f"{inner.replace(os.sep, '/')}/{name}"
                for word in (name, os.path.splitext(name)[0]):
                    files[word].append(key)
    return files


def _matches(key: str, files: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the files whose path ends like a key, by what comes before it."""
    key = key.replace("\\", "/").removeprefix("./")
    found: dict[str, list[str]] = defaultdict(list)
    for path in files.get(key.rpartition("/")[2], ()):
        for end in (path, os.path.splitext(path)[0]):
            if f"/{end}".endswith(f"/{key}"):
                found[end.removesuffix(key)].append(path)
                break
    return found


def _check_once(entries: list[ImageEntry], table: Table, name: str) -> None:
    seen: set[str] = set()
    for (number, _), entry in zip(table.rows, entries, strict=True):
        key = os.path.normpath(entry.key)
        if key in seen:
            raise DataError(
                f"A table must list every image once; row {number} of '{name}' lists '{_shown(entry.key)}' again."
            )
        seen.add(key)


def _are_files(table: Table, place: int) -> bool:
    """Return whether the first values of a column are names of image files."""
    values = [_text_in(row, place) for _, row in table.rows[:20]]
    return bool(values) and all(extension(value) in EXTENSIONS for value in values)


def _text_in(row: Sequence[Any], place: int) -> str:
    """Return a value as text, without spaces around it; empty if the row has none."""
    return "" if place >= len(row) or row[place] is None else str(row[place]).strip()


def _plain(column: str) -> str:
    return re.sub(r"[\W_]+", "", column).lower()


def _shown(value: str) -> str:
    """Return a value for a message: printable, and cut."""
    return printable(value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}...")


def _listed(header: Sequence[str]) -> str:
    return first_few((_shown(column) for column in header), 20) if any(header) else "none"
