"""Open tar shards in the WebDataset layout: `0001.jpg` next to `0001.cls`, or images in folders named by class.

One pass over the headers builds an index of offsets; images are then read at their offset and never unpacked to disk.
Memory holds the index only, and links, devices and paths outside the archive have no effect.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weft.data.images.decode import MAX_BYTES, BadImage
from weft.data.index.inventory import ImageEntry, sort_class_names
from weft.data.index.source import BadFile
from weft.data.index.split_names import split_of
from weft.data.index.tree import EXTENSIONS
from weft.data.sources.download import fetch
from weft.data.sources.listing import Listing
from weft.errors import DataError, UsageError
from weft.text import printable

LABELS = ("cls", "json", "txt")
MAX_LABEL_BYTES = 1 << 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarMember(NamedTuple):
    """Position of a file in a tar archive, in bytes."""

    shard: str
    offset: int
    size: int


class ShardReader:
    """Read files in shards by key."""

    def __init__(self, places: dict[str, TarMember]) -> None:
        self.places = places

    def __call__(self, key: str) -> bytes:
        place = self.places[key]
        if place.size > MAX_BYTES:
            raise BadImage(printable(key), "too-many-bytes")
        # Opened for each image: thousands of open shards would exceed the limit of the system.
        with open(place.shard, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
        if len(data) < place.size:
            raise BadImage(printable(key), "truncated")
        return data

    def size(self, key: str) -> int:
        """Return the size of an image in bytes."""
        return self.places[key].size


def is_shards(data: str) -> bool:
    """Return whether `data` is a .tar file (or pattern), or a folder with .tar files and without folders."""
    if data.endswith(".tar"):
        return True
    try:
        entries = list(Path(data).iterdir())
        return any(entry.suffix == ".tar" for entry in entries) and not any(entry.is_dir() for entry in entries)
    except OSError:  # no folder, or one that may not be read, which is reported when it is opened
        return False


def open_shards(data: str) -> Listing:
    """List the images in tar shards.

    Args:
        data: a file, a range such as `train-{000..009}.tar`, https URLs of either, or a folder of .tar files. File
            names with `train`, `val` or `test` define a split.

    Raises:
        DataError: a shard cannot be read.
        UsageError: an invalid range, or a URL that is not https.
    """
    paths = _paths(data)
    splits = {path: split_of(path.name) for path in paths}
    is_given = "" not in splits.values() and len(set(splits.values())) > 1
    places: dict[str, TarMember] = {}
    entries: list[ImageEntry] = []
    bad: list[BadFile] = []
    for path in paths:
        for key, place, label in _samples(path):
            name = f"{path.name}/{key}"
            split = splits[path] if is_given else ""
            if label is None:
                bad.append(
                    BadFile(
                        name, "no-class", f"{printable(name)} has no label (.cls, .json, .txt or a folder name).", split
                    )
                )
                continue
            places[name] = place
            entries.append(ImageEntry(name, label, split))
    classes = sort_class_names({entry.class_name for entry in entries})
    listing = Listing(printable(data), entries, ShardReader(places), classes, bad)
    listing.notes.append(f"{len(entries):,} images in {len(paths)} tar {'file' if len(paths) == 1 else 'files'}.")
    return listing


def _paths(data: str) -> list[Path]:
    if Path(data).is_dir():
        return sorted(Path(data).glob("*.tar"))
    names = list(_expanded(data))
    return [fetch(name) if "://" in name else Path(name) for name in names]


def _expanded(text: str) -> Iterator[str]:
    """Expand `a-{00..11}.tar` to its twelve names."""
    match = _RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match[1], match[2]
    if int(first) > int(last) or int(last) - int(first) > 1_000_000:
        raise UsageError(f"A range of shards must be ascending, with at most a million numbers; got '{match[0]}'.")
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{text[: match.start()]}{number:0{len(first)}}{text[match.end() :]}")


def _samples(path: Path) -> Iterator[tuple[str, TarMember, str | None]]:
    """Yield (key, position, class) of every image; files with the same name up to the first dot are one sample."""
    sample, image, label = "", None, None
    for key, place in _members(path):
        folder, _, base = key.rpartition("/")
        stem, _, ending = base.partition(".")
        if (name := f"{folder}/{stem}") != sample:
            if image is not None:
                yield (*image, label if label is not None else _folder_class(image[0]))
            sample, image, label = name, None, None
        ending = ending.lower().rpartition(".")[2]
        if ending in EXTENSIONS:
            image = (key, place)
        elif ending in LABELS and label is None:
            label = _label(path, place, ending)
    if image is not None:
        yield (*image, label if label is not None else _folder_class(image[0]))


def _members(path: Path) -> Iterator[tuple[str, TarMember]]:
    """Yield the regular files of an archive, in order."""
    try:
        with tarfile.open(path, "r:") as opened:
            archive: Any = opened  # untyped: `members` below is not in its type stubs
            while (member := archive.next()) is not None:
                if member.isreg():
                    yield member.name, TarMember(os.fspath(path), member.offset_data, member.size)
                archive.members = []  # else tarfile caches every header
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"A shard must be an uncompressed tar file; '{printable(str(path))}' cannot be read ({reason})."
        ) from error


def is_folder_name(name: str) -> bool:
    """Return whether a class can be named by the folder of its images in a shard."""
    return _folder_class(f"{name}/0.jpg") == name and name not in (".", "..")


def _folder_class(key: str) -> str | None:
    folder = PurePosixPath(key).parent.name
    return folder or None


def _label(path: Path, place: TarMember, ending: str) -> str | None:
    """Read the class from a label file; None if it has none."""
    if place.size > MAX_LABEL_BYTES:
        return None
    with path.open("rb") as file:
        file.seek(place.offset)
        text = file.read(place.size).decode("utf-8", "replace").strip()
    if ending != "json":
        return text or None
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = next((metadata[key] for key in ("label", "class", "cls", "target") if key in metadata), None) if isinstance(
        metadata, dict
    ) else None  # fmt: skip
    return None if value is None else str(value)
