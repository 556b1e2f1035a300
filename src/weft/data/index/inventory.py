"""Scan a data directory: usable images, bad files with reasons, other files. Nothing is written to it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.data.images.colour import ValueRange, Values, common_range
from weft.data.images.decode import (
    HEAD_BYTES,
    MAX_PIXELS,
    BadImage,
    ImageInfo,
    archive_kind,
    image_info,
    open_regular,
    read_regular,
    sniff,
)
from weft.data.index.source import BadFile
from weft.data.index.tree import EXTENSIONS, extension, is_folder, is_junk, walk
from weft.errors import DataError, UsageError
from weft.processor import available_cores
from weft.text import printable

CHUNK = 16  # images per task of a thread
VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists is the validation set
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class ImageEntry(NamedTuple):
    """An image of a dataset, before it is opened.

    Attributes:
        key: path relative to the root, or another unique name.
        class_name: class folder; empty outside all class folders.
        split: `train`, `val`, or empty if the dataset defines no split.
    """

    key: str
    class_name: str
    split: str


@dataclass
class Inventory:
    """Content of a data directory, as returned by `inspect`.

    Attributes:
        root: the directory.
        val_name: name of the validation folder (`val`, `test`, ...); empty without one.
        classes: class folders by split (`train`, `val`; one empty key without a split), sorted, with empty folders.
        good: usable images, sorted by key.
        bad: image files that cannot be used, sorted by key.
        ignored: number of files that are no images by name and content, by extension.
        skipped: number of skipped entries, by key of `weft.data.index.tree.SKIPPED`.
        notes: number of conversions of usable images, by key of `weft.data.images.colour.NOTES`.
        sizes: (height, width) of usable images in pixels; empty before decoding.
        values: of usable images of more than 8 bits per channel.
        copies: groups of two or more keys whose files are byte-identical; empty before decoding.
        classes_outside: class or split folders that are links to outside the root, not followed.
        unread: top-level folders, or shards, that are not read because others are for training.
    """

    root: Path
    val_name: str
    classes: dict[str, list[str]]
    good: list[ImageEntry] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)
    classes_outside: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @property
    def value_range(self) -> ValueRange | None:
        """Black and white of the images of more than 8 bits per channel; None without such images."""
        return common_range(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; `json.dumps` escapes names that are not UTF-8."""
        counts = Counter((entry.split, entry.class_name) for entry in self.good)
        return {
            "root": str(self.root),
            "good": len(self.good),
            "bad": [bad._asdict() for bad in self.bad],
            "classes": {
                split: {name: counts[split, name] for name in names} for split, names in sorted(self.classes.items())
            },
            "outside_classes": sum(not entry.class_name for entry in self.good),
            "ignored": dict(sorted(self.ignored.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "notes": dict(sorted(self.notes.items())),
            "value_range": self.value_range,
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
    """Check every file of a data directory.

    Args:
        path: folder of class folders, or folder with `train/` and optionally `val/` (`valid/`, `validation/`, `test/`).
        decode: decode every image. Otherwise only the first bytes of each file are read: 100,000 files take seconds,
            and later damage is not detected.
        max_pixels: images with more pixels (height x width) count as bad.
        follow_links: also enter folders outside `path` through links.
        progress: called regularly with (number done, total).

    Raises:
        DataError: `path` does not exist, is not a directory, or cannot be read.
    """
    inventory, entries = scan_folder(path, follow_links=follow_links)
    if decode:
        decode_entries(inventory, entries, max_pixels=max_pixels, progress=progress)
    else:
        inventory.good = entries
    return inventory


def scan_folder(path: str | Path, *, follow_links: bool = False) -> tuple[Inventory, list[ImageEntry]]:
    """Walk a directory and read the first bytes of every file: the first half of `inspect`.

    Returns:
        The inventory with `good` empty, and the files that are images by their first bytes, sorted by key.
    """
    root = existing(path)
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
        candidates.append(ImageEntry(key, inner[0] if len(inner) > 1 else "", split))
    entries = []
    for entry, verdict in _in_threads(partial(_sniff_entry, root), candidates):
        if isinstance(verdict, BadFile):
            inventory.bad.append(verdict)
        elif verdict:
            entries.append(entry)
        else:
            inventory.ignored[extension(entry.key)] += 1
    inventory.bad.sort()
    return inventory, entries


def check_outside(out: str | Path, *data: str | Path, is_dataset: bool = True) -> None:
    """Refuse an output in a folder of images, where a later run would read it as a class or an image.

    Args:
        out: file or directory to write.
        data: folders of images; other sources are ignored.
        is_dataset: next to `train/`, where nothing is read, an output is allowed.

    Raises:
        UsageError: `out` is in one of the folders.
    """
    for folder in data:
        root, resolved = Path(folder).resolve(), Path(out).resolve()
        if not root.is_dir() or not resolved.is_relative_to(root):
            continue
        places = _layout(root)[1] if is_dataset else {}
        first = next(iter(resolved.relative_to(root).parts), "train")
        if not places or first in ("train", *VAL_NAMES):
            raise UsageError(
                f"The output must be outside the data folder, where it would be read as a class or an image;"
                f" {printable(str(out))} is in {printable(os.fspath(folder))}. Choose another path."
            )


def images_below(folder: Path) -> list[str]:
    """Return the image files of a folder by name or content, as `inspect` finds them; paths relative to it, sorted."""
    tree = walk(os.fspath(folder))
    names = tree.files + [bad.key for bad in tree.bad]
    images = {name for name in names if extension(name) in EXTENSIONS}
    others = [ImageEntry(name, "", "") for name in tree.files if name not in images]
    images |= {entry.key for entry, is_image in _in_threads(partial(_sniff_entry, folder), others) if is_image}
    return sorted(images)


def decode_entries(
    inventory: Inventory,
    entries: list[ImageEntry],
    *,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
    read: Callable[[str], bytes] | None = None,
) -> None:
    """Decode images and add each to `good` or `bad` of the inventory: the second half of `inspect`.

    `read` returns the bytes of an image by key, for images that are not files below the root.
    """
    results = _in_threads(lambda entry: _decode_entry(inventory.root, entry, max_pixels, read), entries)
    same: dict[int, list[str]] = defaultdict(list)
    for done, (entry, verdict) in enumerate(results, 1):
        if isinstance(verdict, BadFile):
            inventory.bad.append(verdict)
        else:
            info, digest = verdict
            inventory.good.append(entry)
            inventory.notes.update(info.notes)
            inventory.sizes.append(info.size)
            inventory.values += [] if info.values is None else [info.values]
            same[digest].append(entry.key)
            if EXTENSIONS.get(extension(entry.key), info.format) != info.format:
                inventory.notes["extension"] += 1
        if progress is not None and (done % 64 == 0 or done == len(entries)):
            progress(done, len(entries))
    inventory.copies = [keys for keys in same.values() if len(keys) > 1]
    inventory.bad.sort()


def existing(path: str | Path) -> Path:
    """Return the path of a folder of images; refuse one that does not exist or cannot be read."""
    name = printable(os.fspath(path))
    todo = "Pass a folder with one folder of images per class, or the name digits."
    if not os.path.lexists(path):
        raise DataError(f"The data directory must exist; '{name}' does not. {todo}")
    if not os.path.isdir(path):
        if kind := archive_kind(path):
            raise DataError(f"The data must be a directory; '{name}' is {kind}. Unpack it, and pass the folder.")
        raise DataError(f"The data must be a directory; '{name}' is not. {todo}")
    try:
        with os.scandir(path):
            return Path(path)
    except OSError as err:
        raise DataError(f"The data directory must be readable; '{name}' is not ({err.strerror}).") from err


def _layout(root: Path) -> tuple[str, dict[str, str], list[str]]:
    """Return (name of the validation folder, top-level folder -> split, folders not read); the mapping is empty
    without a split.

    There is a split if `train` contains folders; a `train` that contains files is a class.
    """
    names = sorted(entry.name for entry in os.scandir(root) if is_folder(entry) and not is_junk(entry.name))
    if "train" not in names or not any(is_folder(e) and not is_junk(e.name) for e in _entries(root / "train")):
        return "", {}, []
    val_name = next((name for name in VAL_NAMES if name in names), "")
    places = {"train": "train"} | ({val_name: "val"} if val_name else {})
    return val_name, places, [name for name in names if name not in places]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # `walk` records it as bad
        return []


def _place(key: str, places: dict[str, str]) -> tuple[str, list[str]]:
    """Return (split, parts of the path below the split); the first of two or more parts is the class."""
    parts = key.split("/")
    return (places[parts[0]], parts[1:]) if places else ("", parts)


def _sniff_entry(root: Path, entry: ImageEntry) -> bool | BadFile:
    """Return whether a file is an image by its first bytes; a bad file if only its extension is an image's."""
    try:
        with open_regular(os.path.join(root, entry.key)) as file:
            if sniff(file.read(HEAD_BYTES)) is not None:
                return True
        problem = BadImage("", "not-an-image")
    except BadImage as err:
        problem = err
    except OSError as err:  # disk error
        problem = BadImage("", "unreadable", err.strerror or "")
    return _bad(entry, problem) if extension(entry.key) in EXTENSIONS else False


def _decode_entry(
    root: Path, entry: ImageEntry, max_pixels: int, read: Callable[[str], bytes] | None
) -> tuple[ImageInfo, int] | BadFile:
    """Return the properties of an image and a hash of its bytes, or the bad file."""
    try:
        data = read_regular(os.path.join(root, entry.key)) if read is None else read(entry.key)
        return image_info(data, max_pixels=max_pixels), _digest(data)
    except BadImage as err:
        return _bad(entry, err)
    except OSError as err:  # disk error
        return _bad(entry, BadImage("", "unreadable", err.strerror or ""))


def _digest(data: bytes) -> int:
    """Return a 64-bit hash. Among a million different images, a collision has a probability of 3e-8."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _bad(entry: ImageEntry, err: BadImage) -> BadFile:
    """Return the error as a bad file, named by its key."""
    message = str(BadImage(printable(entry.key), err.reason, err.detail))
    return BadFile(entry.key, err.reason, message, entry.split)


def _in_threads(function: Callable[[Item], Result], items: list[Item]) -> Iterator[tuple[Item, Result]]:
    """Yield (item, result) in order, from a thread pool: Pillow releases the GIL while decoding."""
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    pool = ThreadPoolExecutor(min(available_cores(), 8))
    try:
        results = pool.map(lambda chunk: [function(item) for item in chunk], chunks)
        for chunk, of_chunk in zip(chunks, results, strict=True):
            yield from zip(chunk, of_chunk, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
