"""Open a table of images, one row per image: CSV or TSV with paths, Parquet with paths or with the images themselves.

Columns: `image` (or path, file, ...), `label` (or class, ...), and optionally `split`. `--set data.image=COLUMN` and
`--set data.label=COLUMN` choose others, and a note names every guess. Paths are absolute, or relative to the folder of
the table. Spaces around a column name, a path or a label count nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from weft.data.inventory import Inventory
from weft.data.source import FileReader, sort_class_names
from weft.data.split_names import SIDES, is_flag_of_split, split_of
from weft.data.tabular import PARQUET, Table, read_table, shown
from weft.data.tree import EXTENSIONS, extension, num_beside, walk
from weft.errors import DataError, unknown
from weft.text import count, first_few

SUFFIXES = (".csv", ".tsv", PARQUET)
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
    table = read_table(path, image)
    of_images, labels, of_split = _columns(table, group, image, label)
    keys, names = table.texts(of_images), _class_names(table, labels)
    splits = [""] * len(keys) if of_split is None else [split_of(text) for text in table.texts(of_split)]
    for number, key, name, split in zip(table.numbers, keys, names, splits, strict=True):
        if not key or (not name and split != "test"):
            raise DataError(
                f"Every row of a table must name an image and its class; row {number} of '{table.name}' does not. Fill"
                " it in, or delete the row."
            )
        if len(key) > MAX_PATH:
            raise DataError(
                f"Column '{shown(of_images)}' of '{table.name}' must have paths; row {number} has '{shown(key)}'."
                " Choose the column of paths: --set data.image=COLUMN."
            )
    reader = table.read if table.image == of_images else None
    if reader is None:
        keys = _located(table, keys, of_images, path.parent)
        _check_once(keys, table)
    own = table.classes.get(labels[0], [])
    classes = own + sort_class_names(set(names) - {"", *own})
    inventory = Inventory(str(path), reader or FileReader(path.parent), {"": classes}, remarks=table.notes)
    for key, name, split in zip(keys, names, splits, strict=True):
        inventory.add(key, name, split)
    if group is not None and group in table.columns:
        inventory.groups = [name or f"/{key}" for key, name in zip(keys, table.texts(group), strict=True)]
    if path.is_dir():
        inventory.skipped = +Counter(beside=num_beside(path))
    return inventory


def _columns(
    table: Table, group: str | None, image: str | None, label: str | None
) -> tuple[str, list[str], str | None]:
    """Return the column of images, those of classes, and that of splits, if any; note what is guessed."""
    for setting, column in (("image", image), ("label", label)):
        if column is not None and column not in table.columns:
            raise unknown(f"column for data.{setting}", column, table.columns, first_few(table.columns, 20))
    of_images = _image_column(table) if image is None else image
    taken = {of_images, label, group} & table.columns.keys()
    notes: list[str] = []
    of_split = _split_column(table, taken, notes)
    labels = _label_columns(table, taken | {of_split}) if label is None else [label]
    guessed = []
    if image is None and of_images.lower() != "image":
        guessed.append(f"images from column '{shown(of_images)}'")
    if label is None and len(labels) > 1:
        guessed.append(f"classes from the one-hot columns {first_few(map(shown, labels))}")
    elif label is None and labels[0].lower() != "label":
        guessed.append(f"classes from column '{shown(labels[0])}'")
    if of_split is not None and _plain(of_split) not in SPLIT:
        guessed.append(f"the split from column '{shown(of_split)}'")
    if guessed:
        notes.insert(0, f"Read {', '.join(guessed)}. To choose others: --set data.image=COLUMN, data.label=COLUMN.")
    table.notes += notes
    return of_images, labels, of_split


def _image_column(table: Table) -> str:
    """Return the column of images: by its content in a Parquet file, else by its name, else by its values."""
    if table.image:
        return table.image
    if any(extension(column) in EXTENSIONS for column in table.columns):
        raise DataError(
            f"The first line of a table must name its columns; that of '{table.name}' names an image:"
            f" {_listed(table)}. Add the line image,label."
        )

    def named(words: Iterable[str]) -> list[str]:
        return [column for word in words for column in table.columns if _plain(column) == word]

    def has_files(column: str) -> bool:
        texts = table.texts(column)[:20]
        return bool(texts) and all(extension(text) in EXTENSIONS for text in texts)

    by_name, by_id, by_value = named(IMAGE), named(IMAGE_ID), [name for name in table.columns if has_files(name)]
    if by_name or len(by_value) == 1 or (by_id and not by_value):
        return (by_name or by_value or by_id)[0]
    raise DataError(
        f"A table of images must have a column 'image' (or path, file, filename); '{table.name}' has"
        f" {_listed(table)}. Choose the column of paths: --set data.image=COLUMN."
    )


def _label_columns(table: Table, taken: Collection[str | None]) -> list[str]:
    """Return the column of classes: by its name, else one-hot columns, else the only other column."""
    others = [column for column in table.columns if column not in taken]
    if named := [column for word in LABEL for column in others if _plain(column) == word]:
        return named[:1]
    texts = {column: table.texts(column) for column in others}
    flags = [column for column in others if {text.lower() for text in texts[column]} <= _YES | _NO]
    if len(flags) > 1 and table.numbers:
        for number, *row in zip(table.numbers, *(texts[column] for column in flags), strict=True):
            if (ones := sum(text.lower() in _YES for text in row)) != 1:
                raise DataError(
                    f"Every image must have one class; the columns {first_few(map(shown, flags))} of '{table.name}'"
                    f" have 0 and 1, and row {number} has {count(ones, 'one')}. {_CHOOSE_LABEL}"
                )
        return flags
    seen = ""
    if len(others) == 1:
        (column,), (of_rows,) = texts, texts.values()
        values = set(of_rows)
        if len(values) <= max(len(of_rows) / 2, 2):
            return [column]
        seen = (
            f" Column '{shown(column)}' has {count(len(values), 'value')} in {count(len(of_rows), 'row')}, such as"
            f" '{shown(min(values))}', which are no classes."
        )
    raise DataError(
        f"A table of images must have a column 'label' (or class, target, category); '{table.name}' has"
        f" {_listed(table)}.{seen} {_CHOOSE_LABEL}"
    )


def _split_column(table: Table, taken: Collection[str], notes: list[str]) -> str | None:
    """Return the column of splits: by its name, else one whose values are all splits."""
    free = [column for column in table.columns if column not in taken]
    first = {_plain(column): column for column in reversed(table.columns)}
    has_label = len(taken) > 1 or any(_plain(column) in LABEL for column in table.columns)
    named = [first[word] for word in SPLIT if first.get(word) in free]
    for column in [*named, *(column for column in free if _plain(column) not in (*LABEL, "fold"))]:
        texts, name = table.texts(column), shown(column)
        sides = {split_of(text) for text in texts}
        listed = first_few(shown(value) or "''" for value in sort_class_names(set(texts)))
        if column in named:
            if _plain(column) == "fold" and not any(sides):
                notes.append(
                    f"Column '{name}' is not used, because its values are not names of splits: {listed}. For a"
                    " cross-validation: --set data.folds=5."
                )
                continue
            if "" in sides:
                number, text = next(pair for pair in zip(table.numbers, texts, strict=True) if not split_of(pair[1]))
                raise DataError(
                    f"The split must be {', '.join(SIDES[:-1])} or {SIDES[-1]}; row {number} of '{table.name}' has"
                    f" '{shown(text)}'. Correct it, or rename the column '{name}'."
                )
            return column
        if "" not in sides and "train" in sides and len(sides) > 1:
            return column
        flags = {text.lower() for text in texts}
        # without a column of classes, `train` can be one of several one-hot columns
        is_flag = has_label and len(flags) == 2 and flags <= _YES | _NO and is_flag_of_split(column)
        is_mixed = len(set(texts)) <= len(SIDES) + 1 and {"train", ""} < sides
        if is_flag or is_mixed or (_plain(column) in SPLIT_LIKE and "" in sides):
            raise DataError(
                f"A column of splits must have the values {', '.join(SIDES[:-1])} or {SIDES[-1]}; column '{name}' of"
                f" '{table.name}' has {listed}. Write these values, in a column 'split'; if it is no split, rename the"
                " column."
            )
    return None


def _class_names(table: Table, labels: list[str]) -> list[str]:
    """Return the class of every row, from a column of names or from one-hot columns."""
    if len(labels) > 1:
        flags = zip(*map(table.texts, labels), strict=True)
        return [next(name for name, text in zip(labels, row, strict=True) if text.lower() in _YES) for row in flags]
    for number, value in zip(table.numbers, table.columns[labels[0]], strict=True):
        if isinstance(value, (list, dict)):
            raise DataError(
                f"Every image must have one class; column '{shown(labels[0])}' of '{table.name}' has"
                f" '{shown(str(value))}' in row {number}. {_CHOOSE_LABEL}"
            )
    return table.texts(labels[0])


def _located(table: Table, keys: list[str], column: str, folder: Path) -> list[str]:
    """Return paths that lead to files: those of the table, else of files below its folder whose paths end like them."""
    if not keys or any(os.path.isfile(os.path.join(folder, key)) for key in keys):
        return keys
    files = _files_below(folder)
    matches = {key: _matches(key, files) for key in keys}
    starts = [set(found) for found in matches.values() if found]
    if not starts:
        raise DataError(
            f"Column '{shown(column)}' of '{table.name}' must have paths from the table's folder; no row leads to a"
            f" file, such as '{shown(keys[0])}'. Choose another column, --set data.image=COLUMN, or correct the paths."
        )
    common = set.intersection(*starts)
    found: dict[str, str] = {}
    for key, of_key in matches.items():
        allowed = common & set(of_key) if len(common) == 1 else of_key
        options = sorted(path for start in allowed for path in of_key[start])
        if len(options) > 1:
            raise DataError(
                f"Every row of a table must name one image; '{shown(key)}' of '{table.name}' can be"
                f" {' or '.join(map(shown, options[:2]))}. Write paths from the table's folder, or move the others."
            )
        if options:
            found[key] = options[0]
    example = next(iter(found))
    table.notes.append(
        f"Images of column '{shown(column)}' are searched below the folder of the table, for example"
        f" '{shown(example)}': {shown(found[example])}."
    )
    return [found.get(key, key) for key in keys]


def _files_below(folder: Path) -> dict[str, list[str]]:
    """Return the image files below a folder by name, and by name without extension; none if there are too many."""
    files: dict[str, list[str]] = defaultdict(list)
    number = 0
    for kind, place, names in walk(os.fspath(folder)):
        number += len(names)
        if number > MAX_SEARCHED:
            return {}
        for name in names if kind == "file" else ():
            if extension(name) in EXTENSIONS:
                for word in (name, os.path.splitext(name)[0]):
                    files[word].append(place + name)
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


def _check_once(keys: Iterable[str], table: Table) -> None:
    seen: set[str] = set()
    for number, key in zip(table.numbers, keys, strict=True):
        if (normal := os.path.normpath(key)) in seen:
            raise DataError(
                f"A table must list every image once; row {number} of '{table.name}' lists '{shown(key)}' again."
            )
        seen.add(normal)


def _plain(column: str) -> str:
    """Return a column name in lower case, letters and digits alone."""
    return re.sub(r"[\W_]+", "", column).lower()


def _listed(table: Table) -> str:
    names = [shown(name.strip()) for name in table.columns]
    return first_few(names, 20) if any(names) else "none"
