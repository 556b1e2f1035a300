"""Groups: which images belong together, so that a split keeps them on one side.

A group is named by a column of a table, by a pattern in the key of an image, by a file that lists the images, by the
camera and the time of a photo, by the name without its counter, or by a series of similar images
(`weft.data.series`).
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from PIL import ExifTags, Image

from weft.data.index import in_threads
from weft.data.source import Reader
from weft.errors import DataError, UsageError
from weft.files import write_table
from weft.text import count, first_few, printable, reason_of

SIMILAR, EXIF, NAME, NONE = RULES = ("similar", "exif", "name", "none")
"""Values of `data.group` that name a rule; a column of a table with such a name comes first."""
COLUMNS = "image", "group"
"""Columns of a file of groups."""
SUFFIX = ".csv"  # of its name
MAX_PAUSE = 60  # seconds between two photos of a camera in one group
COUNTER = re.compile(r"(.*?)[\W_]*\d+\W*", re.DOTALL)  # the number at the end of a name, and what is before it


class GroupError(DataError):
    """Groups of images that the data do not have, or that do not allow a split."""


def groups_of(
    group: str, keys: Sequence[str], read: Reader, series: Mapping[str, str] | None
) -> tuple[list[str], list[str]]:
    """Return the group of every image, and notes; an image that the rule says nothing about is a group of its own.

    Args:
        group: a rule of `RULES` other than `none`, the path of a file of groups, or a pattern.
        keys: of the images.
        read: function from key to bytes, for `exif`.
        series: of similar images, by key, which come before `group`; None if none were looked for.

    Raises:
        UsageError: the pattern is not a regular expression, or no series were looked for.
        GroupError: the rule applies to no image, or the file cannot be read.
    """
    notes = list[str]()
    if group == SIMILAR or series:
        if series is None:
            raise UsageError(
                "--group similar needs the features of a network; this command computes none. Write the series to a"
                " file, and name it: weft data check DATA --series FILE, then --group FILE."
            )
        named = [series.get(key) for key in keys]
    elif group == EXIF:
        named = _by_time(keys, read)
    elif group == NAME:
        named = [_without_counter(key) for key in keys]
    elif is_file_of_groups(group):
        rows = _rows(Path(group))
        listed = _by_key(rows)
        named = [listed.get(key) for key in keys]
        if not any(named):
            raise GroupError(
                f"{printable(group)} must name the groups of images of the data, such as"
                f" '{printable(min(keys, default=''))}'; it names the group of none of them. Choose the file that was"
                " written for these data."
            )
        if unknown := sorted(set(map(str.strip, rows)) - set(map(str.strip, keys))):
            notes = [
                f"{count(len(unknown), 'row names', 'rows name')} no image of the data, of {len(rows):,} in"
                f" {printable(group)}: {first_few(unknown)}."
            ]
    else:
        named = _by_pattern(keys, group)
    # A key never begins with a slash, so no group has the name of a single image.
    return [name or f"/{key}" for name, key in zip(named, keys, strict=True)], notes


def is_file_of_groups(group: str | None) -> bool:
    """Return whether a value of `data.group` is a file of groups."""
    return group is not None and group.lower().endswith(SUFFIX) and os.path.isfile(group)


def write_groups(path: Path, groups: Mapping[str, str]) -> None:
    """Write the group of each image, by its key."""
    write_table(path, COLUMNS, groups.items())


def read_groups(path: Path) -> dict[str, str]:
    """Return the group of each image by its key; images with an empty group are left out.

    The file is one of `write_groups`, or one that was edited: spreadsheets separate the columns by semicolons or tabs,
    and begin the file with a byte order mark. A key with blanks around it is also listed without them.

    Raises:
        GroupError: the file cannot be read, lacks a column, or names two groups of one image.
    """
    return _by_key(_rows(path))


def _by_key(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the group of each image that has one, by its key, and by its key without blanks around it."""
    stripped = {key.strip(): group for key, group in rows.items()}
    return {key: group for key, group in (stripped | dict(rows)).items() if group}


def _rows(path: Path) -> dict[str, str]:
    """Return the group of each image by its key, as it is written; empty if the row names no group."""
    name = printable(str(path))
    must = f"{name} must be a CSV file with the columns {' and '.join(COLUMNS)}"
    try:
        data = path.read_bytes()
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16", "replace") if is_utf16 else data.decode("utf-8-sig", "surrogateescape")
        header, lines = _cells(text)
    except (OSError, csv.Error) as error:
        raise GroupError(f"{must}; it cannot be read ({reason_of(error)}). Restore it.") from error
    if is_utf16 or not {*COLUMNS} <= {*header}:
        begin, encoding = printable(text.partition("\n")[0].strip()[:100]), " in UTF-16" if is_utf16 else ""
        raise GroupError(
            f"{must}, in UTF-8; its first line is '{begin}'{encoding}. Begin it with {','.join(COLUMNS)}, and save it"
            " as CSV in UTF-8."
        )
    places, rows = [header.index(column) for column in COLUMNS], dict[str, str]()
    for line in lines:
        key, group = ("".join(line[place : place + 1]) for place in places)
        if key.strip() and rows.setdefault(key, group.strip()) != group.strip():
            raise GroupError(
                f"{name} must name one group for each image; for '{printable(key)}' it names '{printable(rows[key])}'"
                f" and '{printable(group.strip())}'. Remove one of the rows."
            )
    return rows


def _cells(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns in lower case, and the rows, by the delimiter that gives `COLUMNS`."""
    for delimiter in ",;\t":
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        header = [cell.strip().lower() for cell in next(lines, [])]
        if {*COLUMNS} <= {*header}:
            return header, list(lines)
    return [], []


def _by_pattern(keys: Sequence[str], pattern: str) -> list[str | None]:
    """Return the parenthesised parts of a regular expression in each key, or its whole match without any."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--group must be a column of the table, an existing CSV file, a regular expression, or one of"
            f" {', '.join(RULES)}; '{printable(pattern)}' is none of these ({error})."
        ) from None
    matches = [expression.search(key) for key in keys]
    named = [match and ("/".join(filter(None, match.groups())) or match[0]) for match in matches]
    if not any(named):
        if pattern.lower().endswith(SUFFIX):
            raise GroupError(
                f"A CSV file of --group must exist; '{printable(pattern)}' is no file. Check the path, or write it:"
                " weft data check DATA --series FILE."
            )
        raise GroupError(
            f"--group must be a column of the table, or match the names of images; '{printable(pattern)}' matches none"
            f" of {len(keys):,}, such as '{printable(min(keys, default=''))}'."
        )
    return named


def _without_counter(key: str) -> str | None:
    """Return the key up to the number at the end of its name: `clip3_frame` of `clip3_frame0012.jpg`."""
    folder, name = os.path.split(key)
    match = COUNTER.fullmatch(os.path.splitext(name)[0])
    return None if match is None else os.path.join(folder, match[1])


def _by_time(keys: Sequence[str], read: Reader) -> list[str | None]:
    """Return the camera and the time of the first photo of each burst: of one camera, with pauses up to `MAX_PAUSE`.

    Raises:
        GroupError: no image says when it was taken.
    """
    taken: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
    for i, exif in enumerate(in_threads(lambda key: _camera_and_time(key, read), keys)):
        if exif is not None:
            taken[exif[0]].append((exif[1], i))
    if not taken:
        raise GroupError(
            f"--group exif needs photos that say when they were taken; none of {len(keys):,} does, such as"
            f" '{printable(min(keys, default=''))}'. Use --group similar."
        )
    bursts: list[str | None] = [None] * len(keys)
    for camera, photos in taken.items():
        burst, before = "", None
        for time, i in sorted(photos):
            if before is None or (time - before).total_seconds() > MAX_PAUSE:
                burst = f"{camera} {time:%Y-%m-%d %H:%M:%S}"
            bursts[i], before = burst, time
    return bursts


def _camera_and_time(key: str, read: Reader) -> tuple[str, datetime] | None:
    """Return the camera of a photo, and when it was taken; None if the file does not say when."""
    try:
        with Image.open(io.BytesIO(read(key))) as image:
            exif = image.getexif()
            details = exif.get_ifd(ExifTags.IFD.Exif)
        time = details.get(ExifTags.Base.DateTimeOriginal) or details.get(ExifTags.Base.DateTimeDigitized)
        camera = (exif.get(ExifTags.Base.Make), exif.get(ExifTags.Base.Model))
        camera = (*camera, details.get(ExifTags.Base.BodySerialNumber))
        return " ".join(str(part).strip("\0 ") for part in camera if part), datetime.strptime(
            str(time).strip("\0 "), "%Y:%m:%d %H:%M:%S"
        )
    except Exception:  # Pillow raises many types for damaged EXIF data and too many pixels; bad files are found later
        return None
