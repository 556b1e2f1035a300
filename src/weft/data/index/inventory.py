"""What a data directory holds: good pictures, bad files with reasons, and what is neither. Nothing is ever written to
it."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.data.images.decode import HEAD_BYTES, MAX_PIXELS, BadImage, Look, look, open_regular, sniff
from weft.data.index.source import BadFile
from weft.data.index.tree import EXTENSIONS, extension, is_junk, walk
from weft.errors import DataError
from weft.text import printable

CHUNK = 16  # images that a thread looks at in a row
VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists is held out
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Picture(NamedTuple):
    """A file that is a picture, by its first bytes or all of them.

    Attributes:
        key: path below the root.
        class_name: the class folder it lies in; empty outside of all.
        split: `train`, `val`, or empty where the data has no split of its own.
    """

    key: str
    class_name: str
    split: str


@dataclass
class Inventory:
    """What `inspect` found.

    Attributes:
        root: the directory.
        val_name: the folder that is held out (`val`, `test`, ...); empty without a split or without held-out images
            in it.
        classes: class folders of each split (`train`, `val`; one empty name without a split), sorted; also empty ones.
        good: pictures that can be used, sorted by key.
        bad: files that should be pictures and cannot be used, sorted by key.
        ignored: files whose name and content promise no picture, counted by extension.
        skipped: entries passed over, counted by a key of `weft.data.index.tree.SKIPPED`.
        notes: conversions of good pictures, counted by a key of `weft.data.images.colour.NOTES`.
        copies: keys of good pictures whose files are the same to the byte, two or more each; known once all are
            decoded.
        classes_outside: class or split folders that are links to outside the root, not followed.
        unread: top-level folders that a split leaves aside.
    """

    root: Path
    val_name: str
    classes: dict[str, list[str]]
    good: list[Picture] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    copies: list[list[str]] = field(default_factory=list)
    classes_outside: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; names as the system gives them (`json.dumps` escapes what is not UTF-8)."""
        counts = Counter((picture.split, picture.class_name) for picture in self.good)
        return {
            "root": str(self.root),
            "good": len(self.good),
            "bad": [bad._asdict() for bad in self.bad],
            "classes": {
                split: {name: counts[split, name] for name in names} for split, names in sorted(self.classes.items())
            },
            "outside_classes": sum(not picture.class_name for picture in self.good),
            "ignored": dict(sorted(self.ignored.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "notes": dict(sorted(self.notes.items())),
            "copies": self.copies,
            "classes_outside": self.classes_outside,
            "unread": self.unread,
        }


def inspect(
    path: str | Path,
    *,
    decode: bool = True,
    max_pixels: int = MAX_PIXELS,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Inventory:
    """Looks at everything below `path`.

    Args:
        path: a folder of class folders, or one with `train/` and perhaps `val/` (`valid/`, `validation/`, `test/`) in
            it.
        decode: decode every picture. Without, only the first bytes of each file are read: 100,000 files take seconds,
            and damage behind the first bytes stays unseen.
        max_pixels: pictures that claim more are bad.
        follow_links: also enter folders outside `path` that links lead to.
        progress: called now and then with (done, of how many).

    Raises:
        DataError: `path` is missing, not a directory, or cannot be read.
    """
    inventory, pictures = survey(path, follow_links=follow_links)
    if decode:
        examine(inventory, pictures, max_pixels=max_pixels, progress=progress)
    else:
        inventory.good = pictures
    return inventory


def survey(path: str | Path, *, follow_links: bool = False) -> tuple[Inventory, list[Picture]]:
    """The first half of `inspect`: walks the tree and reads the first bytes of every file.

    Returns:
        The inventory with `good` still empty, and the pictures by their first bytes, sorted by key.
    """
    root = _existing(path)
    val_name, places, unread = _layout(root)
    tree = walk(os.fspath(root), only=places or None, follow_links=follow_links)
    inventory = Inventory(root, val_name, {split: [] for split in places.values() or [""]})
    inventory.skipped, inventory.unread = tree.skipped, unread
    inventory.classes_outside = [key for key in tree.links_out if len(_place(key, places)[1]) < 2]
    inventory.bad = [bad._replace(split=_place(bad.key, places)[0]) for bad in tree.bad]
    for folder in tree.folders:
        split, inner = _place(folder, places)
        if len(inner) == 1:
            inventory.classes[split].append(inner[0])
    candidates = []
    for key in tree.files:
        split, inner = _place(key, places)
        candidates.append(Picture(key, inner[0] if len(inner) > 1 else "", split))
    pictures = []
    for picture, verdict in _in_threads(lambda candidate: _first_look(root, candidate), candidates):
        if isinstance(verdict, BadFile):
            inventory.bad.append(verdict)
        elif verdict:
            pictures.append(picture)
        else:
            inventory.ignored[extension(picture.key)] += 1
    inventory.bad.sort()
    return inventory, pictures


def examine(
    inventory: Inventory,
    pictures: list[Picture],
    *,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
    read: Callable[[str], bytes] | None = None,
) -> None:
    """The second half of `inspect`: decodes `pictures` and files each under good or bad, with notes.

    `read` gives the bytes of a picture by its key, where they are not those of a file below the root.
    """
    results = _in_threads(lambda picture: _full_look(inventory.root, picture, max_pixels, read), pictures)
    same: dict[int, list[str]] = defaultdict(list)
    for done, (picture, verdict) in enumerate(results, 1):
        if isinstance(verdict, BadFile):
            inventory.bad.append(verdict)
        else:
            seen, digest = verdict
            inventory.good.append(picture)
            inventory.notes.update(seen.notes)
            same[digest].append(picture.key)
            if EXTENSIONS.get(extension(picture.key), seen.format) != seen.format:
                inventory.notes["extension"] += 1
        if progress is not None and (done % 64 == 0 or done == len(pictures)):
            progress(done, len(pictures))
    inventory.copies = [keys for keys in same.values() if len(keys) > 1]
    inventory.bad.sort()


def _existing(path: str | Path) -> Path:
    name = printable(os.fspath(path))
    todo = "Give a folder that holds one folder of images per class, or the name digits."
    if not os.path.lexists(path):
        raise DataError(f"The data directory must exist; '{name}' does not. {todo}")
    if not os.path.isdir(path):
        raise DataError(f"The data must be a directory; '{name}' is not. {todo}")
    try:
        with os.scandir(path):
            return Path(path)
    except OSError as err:
        raise DataError(f"The data directory must be readable; '{name}' is not ({err.strerror}).") from err


def _layout(root: Path) -> tuple[str, dict[str, str], list[str]]:
    """(name of the held-out folder, top-level folder -> split, folders left aside); the middle one empty without a
    split.

    There is a split where `train` holds folders; a `train` that holds files is a class (of trains).
    """
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not is_junk(entry.name))
    if "train" not in names or not any(e.is_dir() and not is_junk(e.name) for e in _entries(root / "train")):
        return "", {}, []
    val_name = next((name for name in VAL_NAMES if name in names), "")
    places = {"train": "train"} | ({val_name: "val"} if val_name else {})
    return val_name, places, [name for name in names if name not in places]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # the walk lists it as bad
        return []


def _place(key: str, places: dict[str, str]) -> tuple[str, list[str]]:
    """(split, path below it, in parts): the first of two or more parts is the class."""
    parts = key.split("/")
    return (places[parts[0]], parts[1:]) if places else ("", parts)


def _first_look(root: Path, picture: Picture) -> bool | BadFile:
    """Whether it is a picture by its first bytes; bad only where the name promises one."""
    try:
        with open_regular(os.path.join(root, picture.key)) as file:
            if sniff(file.read(HEAD_BYTES)) is not None:
                return True
        problem = BadImage("", "not-an-image")
    except BadImage as err:
        problem = err
    except OSError as err:  # the disk
        problem = BadImage("", "unreadable", err.strerror or "")
    return _bad(picture, problem) if extension(picture.key) in EXTENSIONS else False


def _full_look(
    root: Path, picture: Picture, max_pixels: int, read: Callable[[str], bytes] | None
) -> tuple[Look, int] | BadFile:
    """What opening it takes, and a number that stands for its bytes."""
    try:
        source = os.path.join(root, picture.key) if read is None else read(picture.key)
        return look(source, max_pixels=max_pixels), _digest(source)
    except BadImage as err:
        return _bad(picture, err)
    except OSError as err:  # the disk
        return _bad(picture, BadImage("", "unreadable", err.strerror or ""))


def _digest(source: str | bytes) -> int:
    """64 bits: among a million pictures two different ones share theirs once in forty million times."""
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
    return int.from_bytes(digest.digest(), "little")


def _bad(picture: Picture, err: BadImage) -> BadFile:
    """The same, named by its key."""
    message = str(BadImage(printable(picture.key), err.reason, err.detail))
    return BadFile(picture.key, err.reason, message, picture.split)


def _in_threads(function: Callable[[Item], Result], items: list[Item]) -> Iterator[tuple[Item, Result]]:
    """(item, its result) in order. Threads are enough: Pillow lets go of the interpreter while it decodes."""
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))
    try:
        results = pool.map(lambda chunk: [function(item) for item in chunk], chunks)
        for chunk, of_chunk in zip(chunks, results, strict=True):
            yield from zip(chunk, of_chunk, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
