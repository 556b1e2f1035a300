"""Groups: which images belong together, so that a split keeps them on one side.

A group is named by a column of a table, by a pattern in the key of an image, by a file that lists the images, by the
camera and the time of a photo, by the name without its counter, or by a series of similar images
(`weft.data.series`).
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from PIL import ExifTags, Image

from weft.data.decode import BadImage
from weft.data.index import in_threads
from weft.data.source import Reader
from weft.errors import DataError, UsageError
from weft.files import write_table
from weft.text import printable, reason_of

SIMILAR, EXIF, NAME, NONE = RULES = ("similar", "exif", "name", "none")
"""Values of `data.group` that name a rule; a column of a table with such a name comes first."""
COLUMNS = "image", "group"
"""Columns of a file of groups."""
MAX_PAUSE = 60  # seconds between two photos of a camera in one group
COUNTER = re.compile(r"(.*?)[\W_]*\d+\W*", re.DOTALL)  # the number at the end of a name, and what is before it


class GroupError(DataError):
    """Groups of images that the data do not have, or that do not allow a split."""


def groups_of(group: str, keys: Sequence[str], read: Reader, series: Mapping[str, str] | None) -> list[str]:
    """Return the group of every image; an image that the rule says nothing about is a group of its own.

    Args:
        group: a rule of `RULES` other than `none`, the path of a file of `write_groups`, or a pattern.
        keys: of the images.
        read: function from key to bytes, for `exif`.
        series: of similar images, by key, which come before `group`; None if none were looked for.

    Raises:
        UsageError: the pattern is not a regular expression, or no series were looked for.
        GroupError: the rule applies to no image, or the file cannot be read.
    """
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
        listed = read_groups(Path(group))
        named = [listed.get(key) for key in keys]
        if not any(named):
            raise GroupError(
                f"{printable(group)} must list images of the data, such as '{printable(min(keys, default=''))}'; it"
                " lists none of them. Name the file that was written for these data."
            )
    else:
        named = _by_pattern(keys, group)
    # A key never begins with a slash, so no group has the name of a single image.
    return [name or f"/{key}" for name, key in zip(named, keys, strict=True)]


def is_file_of_groups(group: str | None) -> bool:
    """Return whether a value of `data.group` is a file of `write_groups`."""
    return group is not None and group.endswith(".csv") and os.path.isfile(group)


def write_groups(path: Path, groups: Mapping[str, str]) -> None:
    """Write the group of each image, by its key."""
    write_table(path, COLUMNS, groups.items())


def read_groups(path: Path) -> dict[str, str]:
    """Return the group of each image by its key; images with an empty group are left out.

    Raises:
        GroupError: the file cannot be read, or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = [[row[column] or "" for column in COLUMNS] for row in csv.DictReader(file)]
    except (OSError, csv.Error, KeyError, ValueError) as error:
        raise GroupError(
            f"{printable(str(path))} must be a CSV file with the columns {' and '.join(COLUMNS)}; it cannot be read"
            f" ({reason_of(error)}). Restore it."
        ) from error
    return {key: group for key, group in rows if group}


def _by_pattern(keys: Sequence[str], pattern: str) -> list[str | None]:
    """Return the parenthesised parts of a regular expression in each key, or its whole match without any."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--group must be a column of the table, a CSV file, a regular expression, or one of {', '.join(RULES)};"
            f" '{printable(pattern)}' is none of these ({error})."
        ) from None
    matches = [expression.search(key) for key in keys]
    if not any(matches):
        raise GroupError(
            f"--group must be a column of the table, or match the names of images; '{printable(pattern)}' matches none"
            f" of {len(keys):,}, such as '{printable(min(keys, default=''))}'."
        )
    return [match and ("/".join(filter(None, match.groups())) or match[0]) for match in matches]


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
    except (BadImage, OSError, ValueError, SyntaxError, TypeError, KeyError):  # also of damaged EXIF data
        return None
