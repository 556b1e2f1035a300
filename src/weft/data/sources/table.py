"""Open a table of images, one row per image: CSV or TSV with paths, Parquet with paths or with the images themselves.

Columns: `image` (or path, file, ...), `label` (or class, ...), and optionally `split`. `--set data.image=COLUMN` and
`--set data.label=COLUMN` choose others, and a note names every guess. Paths are absolute, or relative to the folder of
the table. Spaces around a column name, a path or a label count nothing.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from weft.data.index.inventory import Inventory
from weft.data.index.source import ImageEntry, sort_class_names
from weft.data.index.split_names import SIDES, is_flag_of_split, split_of
from weft.data.index.tree import EXTENSIONS, extension, num_beside, walk
from weft.data.sources.folder import FileReader
from weft.data.sources.parquet import SUFFIX, read_parquet
from weft.data.sources.tabular import Table, read_text_table, shown
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
_YES, _NO = {"1", "1.0", "true"}, {"0", "0.0", "false"}
_CHOOSE_LABEL = "Choose the column of classes: --set data.label=COLUMN."


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
    try:
        table = read_table(path, image)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"A table of images must be readable; '{printable(str(path))}' is not ({reason}).") from error
    entries, used = _entries(table, path.parent, group, image, label)
    if group is not None and group in table.header:
        names = table.texts(table.header.index(group))
        entries = [entry._replace(group=name or f"/{entry.key}") for entry, name in zip(entries, names, strict=True)]
    own = table.classes.get(table.header[used[1]], [])
    classes = own + sort_class_names({entry.class_name for entry in entries} - {"", *own})
    inventory = Inventory(str(path), entries, table.read or FileReader(path.parent), {"": classes}, remarks=table.notes)
    if path.is_dir():
        inventory.skipped = +Counter(beside=num_beside(os.fspath(path)))
    return inventory


def other_columns(
    path: Path, image: str | None = None, label: str | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the columns other than image, label and split, and their values by image.

    Raises:
        OSError, UnicodeDecodeError, csv.Error, DataError: as `open_table`, which reports them.
    """
    table = read_table(path, image)
    entries, used = _entries(table, path.parent, None, image, label)
    others = [(name, table.texts(place)) for place, name in enumerate(table.header) if place not in used]
    values = {entry.key: [texts[i] for _, texts in others] for i, entry in enumerate(entries)}
    return [name for name, _ in others], values


def read_table(path: Path, image: str | None = None) -> Table:
    """Read a table.

    Args:
        path: of the table, or of a folder of Parquet files.
        image: column of images in a Parquet file, if it is known.

    Raises:
        OSError, UnicodeDecodeError, csv.Error, DataError: it cannot be read.
    """
    return read_parquet(path, image) if path.suffix == SUFFIX or path.is_dir() else read_text_table(path)


def _entries(
    table: Table, folder: Path, group: str | None, image: str | None, label: str | None
) -> tuple[list[ImageEntry], list[int]]:
    """Return the image of every row, and the columns that they are read from: image, classes, split. Add notes.

    Raises:
        DataError: a column cannot be recognised, a guess is wrong, a row lacks a value, or no path leads to a file.
        UsageError: there is no column `image` or `label`.
    """
    header = table.header
    for setting, column in (("image", image), ("label", label)):
        if column is not None and column not in header:
            raise unknown(f"column for data.{setting}", column, header, first_few(header, 20))
    if twice := sorted({column for column in header if column and header.count(column) > 1}):
        raise DataError(
            f"Columns of a table must have different names; '{table.name}' has {first_few(map(shown, twice))} more than"
            " once. Rename one of them."
        )
    notes: list[str] = []
    image_place = header.index(image) if image is not None else _image_column(table)
    taken = {image_place} | {place for place, column in enumerate(header) if column in (label, group)}
    split, is_guess = _split_column(table, taken, notes)
    labels = [header.index(label)] if label is not None else _label_columns(table, taken | {split})
    guessed = []
    if image is None and header[image_place].lower() != "image":
        guessed.append(f"images from column '{shown(header[image_place])}'")
    if label is None and len(labels) > 1:
        guessed.append(f"classes from the one-hot columns {first_few(shown(header[place]) for place in labels)}")
    elif label is None and header[labels[0]].lower() != "label":
        guessed.append(f"classes from column '{shown(header[labels[0]])}'")
    if split is not None and is_guess:
        guessed.append(f"the split from column '{shown(header[split])}'")
    if guessed:
        notes.insert(0, f"Read {', '.join(guessed)}. To choose others: --set data.image=COLUMN, data.label=COLUMN.")
    entries = _read_rows(table, image_place, labels, split)
    _check_once(entries, table)
    if table.read is None or table.image != header[image_place]:
        table.read = None
        entries = _located(entries, folder, header[image_place], table.name, notes)
        _check_once(entries, table)
    table.notes += notes
    return entries, [image_place, *labels, *([] if split is None else [split])]


def _image_column(table: Table) -> int:
    """Return the column of images: by its content in a Parquet file, else by its name, else by its values."""
    if table.image:
        return table.header.index(table.image)
    if _are_files(table.header, any):
        raise DataError(
            f"The first line of a table must name its columns; that of '{table.name}' names an image:"
            f" {_listed(table)}. Add the line image,label."
        )
    plain = _plain(table)
    by_name = [plain.index(word) for word in IMAGE if word in plain]
    by_value = [place for place in range(len(plain)) if _are_files(table.texts(place)[:20], all)]
    by_id = [plain.index(word) for word in IMAGE_ID if word in plain]
    if by_name or len(by_value) == 1 or (by_id and not by_value):
        return (by_name or by_value or by_id)[0]
    raise DataError(
        f"A table of images must have a column 'image' (or path, file, filename); '{table.name}' has"
        f" {_listed(table)}. Choose the column of paths: --set data.image=COLUMN."
    )


def _label_columns(table: Table, taken: Collection[int | None]) -> list[int]:
    """Return the column of classes: by its name, else one-hot columns, else the only other column."""
    plain, header, seen = _plain(table), table.header, ""
    for word in LABEL:
        if places := [place for place, column in enumerate(plain) if column == word and place not in taken]:
            return places[:1]
    others = {place: table.texts(place) for place in range(len(header)) if place not in taken}
    flags = [place for place, texts in others.items() if {text.lower() for text in texts} <= _YES | _NO]
    if len(flags) > 1 and table.rows:
        for number, *row in zip(table.numbers, *(others[place] for place in flags), strict=True):
            if (ones := sum(text.lower() in _YES for text in row)) != 1:
                listed = first_few(shown(header[place]) for place in flags)
                raise DataError(
                    f"Every image must have one class; the columns {listed} of '{table.name}' have 0 and 1, and row"
                    f" {number} has {count(ones, 'one')}. {_CHOOSE_LABEL}"
                )
        return flags
    if len(others) == 1:
        ((place, texts),) = others.items()
        values = set(texts)
        if len(values) <= max(len(texts) / 2, 2):
            return [place]
        seen = (
            f" Column '{shown(header[place])}' has {count(len(values), 'value')} in {count(len(texts), 'row')}, such as"
            f" '{shown(min(values))}', which are no classes."
        )
    raise DataError(
        f"A table of images must have a column 'label' (or class, target, category); '{table.name}' has"
        f" {_listed(table)}.{seen} {_CHOOSE_LABEL}"
    )


def _split_column(table: Table, taken: Collection[int], notes: list[str]) -> tuple[int | None, bool]:
    """Return the column of splits, and whether its name does not say so; a column whose values are all splits."""
    plain = _plain(table)
    has_label = len(taken) > 1 or not set(LABEL).isdisjoint(plain)
    named = [plain.index(word) for word in SPLIT if word in plain and plain.index(word) not in taken]
    others = [place for place in range(len(plain)) if place not in taken and plain[place] not in (*LABEL, "fold")]
    for place in [*named, *others]:
        texts, column = table.texts(place), shown(table.header[place])
        sides = {split_of(text) for text in texts}
        listed = first_few(shown(value) or "''" for value in sort_class_names(set(texts)))
        if place in named:
            if plain[place] == "fold" and not any(sides):
                notes.append(
                    f"Column '{column}' is not used, because its values are not names of splits: {listed}. For a"
                    " cross-validation: --set data.folds=5."
                )
                continue
            if "" in sides:
                number, text = next(pair for pair in zip(table.numbers, texts, strict=True) if not split_of(pair[1]))
                raise DataError(
                    f"The split must be {', '.join(SIDES[:-1])} or {SIDES[-1]}; row {number} of '{table.name}' has"
                    f" '{shown(text)}'. Correct it, or rename the column '{column}'."
                )
            return place, False
        if "" not in sides and "train" in sides and len(sides) > 1:
            return place, True
        flags = {text.lower() for text in texts}
        # without a column of classes, `train` can be one of several one-hot columns
        is_flag = has_label and len(flags) == 2 and flags <= _YES | _NO and is_flag_of_split(table.header[place])
        is_mixed = len(set(texts)) <= len(SIDES) + 1 and {"train", ""} < sides
        if is_flag or is_mixed or (plain[place] in SPLIT_LIKE and "" in sides):
            raise DataError(
                f"A column of splits must have the values {', '.join(SIDES[:-1])} or {SIDES[-1]}; column '{column}' of"
                f" '{table.name}' has {listed}. Write these values, in a column 'split'; if it is no split, rename the"
                " column."
            )
    return None, False


def _read_rows(table: Table, image: int, labels: list[int], split: int | None) -> list[ImageEntry]:
    """Return the image of every row; an image of the test split may have no class."""
    header = table.header
    if len(labels) > 1:
        flags = zip(*map(table.texts, labels), strict=True)
        names = [header[next(p for p, text in zip(labels, row, strict=True) if text.lower() in _YES)] for row in flags]
    else:
        names = table.texts(labels[0])
        for number, row in zip(table.numbers, table.rows, strict=True):
            if isinstance(value := row[labels[0]] if labels[0] < len(row) else None, (list, dict)):
                raise DataError(
                    f"Every image must have one class; column '{shown(header[labels[0]])}' of '{table.name}' has"
                    f" '{shown(str(value))}' in row {number}. {_CHOOSE_LABEL}"
                )
    splits = [""] * len(names) if split is None else [split_of(text) for text in table.texts(split)]
    entries = list(map(ImageEntry, table.texts(image), names, splits))
    for number, entry in zip(table.numbers, entries, strict=True):
        if not entry.key or (not entry.class_name and entry.split != "test"):
            raise DataError(
                f"Every row of a table must name an image and its class; row {number} of '{table.name}' does not. Fill"
                " it in, or delete the row."
            )
        if len(entry.key) > MAX_PATH:
            raise DataError(
                f"Column '{shown(header[image])}' of '{table.name}' must have paths; row {number} has"
                f" '{shown(entry.key)}'. Choose the column of paths: --set data.image=COLUMN."
            )
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
            f"Column '{shown(column)}' of '{name}' must have paths of images, from the folder of the table; no row"
            f" leads to a file, such as '{shown(entries[0].key)}'. Choose another column, --set data.image=COLUMN, or"
            " correct the paths."
        )
    common = set.intersection(*starts)
    found: dict[str, str] = {}
    for key, of_key in matches.items():
        allowed = common & set(of_key) if len(common) == 1 else of_key
        options = sorted(path for start in allowed for path in of_key[start])
        if len(options) > 1:
            raise DataError(
                f"Every row of a table must name one image; '{shown(key)}' of '{name}' can be {shown(options[0])} or"
                f" {shown(options[1])}. Write paths from the folder of the table, or move the others elsewhere."
            )
        if options:
            found[key] = options[0]
    example = next(iter(found))
    notes.append(
        f"Images of column '{shown(column)}' are searched below the folder of the table, for example"
        f" '{shown(example)}': {shown(found[example])}."
    )
    return [entry._replace(key=found.get(entry.key, entry.key)) for entry in entries]


def _files_below(folder: Path) -> dict[str, list[str]]:
    """Return the image files below a folder by name, and by name without extension; none if there are too many."""
    files: dict[str, list[str]] = defaultdict(list)
    for number, (key, kind) in enumerate(walk(os.fspath(folder))):
        if number == MAX_SEARCHED:
            return {}
        if kind == "file" and extension(key) in EXTENSIONS:
            name = key.rpartition("/")[2]
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


def _check_once(entries: Iterable[ImageEntry], table: Table) -> None:
    seen: set[str] = set()
    for number, entry in zip(table.numbers, entries, strict=True):
        key = os.path.normpath(entry.key)
        if key in seen:
            raise DataError(
                f"A table must list every image once; row {number} of '{table.name}' lists '{shown(entry.key)}' again."
            )
        seen.add(key)


def _are_files(values: list[str], every: Callable[[Iterable[bool]], bool]) -> bool:
    """Return whether any or all of some values are names of image files."""
    return bool(values) and every(extension(value) in EXTENSIONS for value in values)


def _plain(table: Table) -> list[str]:
    """Return the column names in lower case, letters and digits alone."""
    return [re.sub(r"[\W_]+", "", column).lower() for column in table.header]


def _listed(table: Table) -> str:
    return first_few(map(shown, table.header), 20) if any(table.header) else "none"
