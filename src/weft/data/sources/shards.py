"""Tar shards in the WebDataset layout: `0001.jpg` beside `0001.cls`, or pictures in folders named after their classes.

A pass over the headers makes an index; a picture is then read from its place, and nothing is ever unpacked. So memory
holds names and numbers, never pictures, and what else a hostile archive may hold (links, devices, paths that lead
elsewhere) is not touched.
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
from weft.data.index.inventory import VAL_NAMES, Picture
from weft.data.index.source import BadFile
from weft.data.index.tree import EXTENSIONS
from weft.data.sources.download import fetched
from weft.data.sources.listing import Shelf, in_order
from weft.errors import DataError, UsageError
from weft.text import printable

LABELS = ("cls", "json", "txt")
MAX_LABEL_BYTES = 1 << 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Place(NamedTuple):
    """Where the bytes of a member are."""

    shard: str
    offset: int
    size: int


class ShardReader:
    """Reads members by key; every process has its own descriptors."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.places = places
        self._files: dict[tuple[int, str], int] = {}

    def __call__(self, key: str) -> bytes:
        place = self.places[key]
        if place.size > MAX_BYTES:
            raise BadImage(printable(key), "too-many-bytes")
        mine = (os.getpid(), place.shard)
        if mine not in self._files:
            self._files[mine] = os.open(place.shard, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        data = os.pread(self._files[mine], place.size, place.offset)
        if len(data) < place.size:
            raise BadImage(printable(key), "truncated")
        return data

    def size(self, key: str) -> int:
        """How many bytes it has."""
        return self.places[key].size

    def __getstate__(self) -> dict[str, object]:
        return {"places": self.places, "_files": {}}


def is_shards(data: str) -> bool:
    """Whether this names tar shards: by its ending, or a folder that holds nothing but such files beside notes."""
    if data.endswith(".tar"):
        return True
    folder = Path(data)
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    return any(entry.suffix == ".tar" for entry in entries) and not any(entry.is_dir() for entry in entries)


def open_shards(data: str) -> Shelf:
    """The pictures in shards.

    Args:
        data: a file, several as `train-{000..009}.tar`, https URLs of either, or a folder of such files. Files whose
            names begin with `train` and with `val` (or test ...) are a split.

    Raises:
        DataError: a shard cannot be read, or holds a picture without a class.
        UsageError: a range that is none, or a URL that is not https.
    """
    paths = _paths(data)
    splits = {path: _split(path.name) for path in paths}
    is_given = set(splits.values()) == {"train", "val"}
    places: dict[str, Place] = {}
    pictures: list[Picture] = []
    bad: list[BadFile] = []
    for path in paths:
        for key, place, label in _samples(path):
            name = f"{path.name}/{key}"
            split = splits[path] if is_given else ""
            if label is None:
                bad.append(BadFile(name, "no-class", f"{printable(name)} has no class beside it (.cls, .json).", split))
                continue
            places[name] = place
            pictures.append(Picture(name, label, split))
    classes = in_order({picture.class_name for picture in pictures})
    shelf = Shelf(printable(data), pictures, ShardReader(places), classes, bad)
    shelf.notes.append(f"{len(pictures):,} pictures in {len(paths)} tar {'file' if len(paths) == 1 else 'files'}.")
    return shelf


def _paths(data: str) -> list[Path]:
    if Path(data).is_dir():
        return sorted(Path(data).glob("*.tar"))
    names = list(_expanded(data))
    return [fetched(name) if "://" in name else Path(name) for name in names]


def _expanded(text: str) -> Iterator[str]:
    """`a-{00..11}.tar` as its twelve names."""
    match = _RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match[1], match[2]
    if int(first) > int(last) or int(last) - int(first) > 1_000_000:
        raise UsageError(f"A range of shards must run upwards, at most a million; got '{match[0]}'.")
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{text[: match.start()]}{number:0{len(first)}}{text[match.end() :]}")


def _split(name: str) -> str:
    if name.startswith("train"):
        return "train"
    return "val" if name.startswith(VAL_NAMES) else ""


def _samples(path: Path) -> Iterator[tuple[str, Place, str | None]]:
    """(key, place, class) of every picture: members with the same name up to the first dot are one sample."""
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


def _members(path: Path) -> Iterator[tuple[str, Place]]:
    """Regular files in an archive, in their order."""
    try:
        with tarfile.open(path, "r:") as opened:
            archive: Any = opened  # its types hide what it remembers
            while (member := archive.next()) is not None:
                if member.isreg():
                    yield member.name, Place(os.fspath(path), member.offset_data, member.size)
                archive.members = []  # every header of a large archive otherwise
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"A shard must be a tar file without compression; '{printable(str(path))}' cannot be read ({reason})."
        ) from error


def _folder_class(key: str) -> str | None:
    folder = PurePosixPath(key).parent.name
    return folder or None


def _label(path: Path, place: Place, ending: str) -> str | None:
    """The class that a small file beside a picture states."""
    if place.size > MAX_LABEL_BYTES:
        return None
    with path.open("rb") as file:
        file.seek(place.offset)
        text = file.read(place.size).decode("utf-8", "replace").strip()
    if ending != "json":
        return text or None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    stated = next((facts[word] for word in ("label", "class", "cls", "target") if word in facts), None) if isinstance(
        facts, dict
    ) else None  # fmt: skip
    return None if stated is None else str(stated)
