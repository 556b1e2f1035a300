"""Scan a data directory: usable images, bad files with reasons, other files. Nothing is written to it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.data.images.bit_depth import ValueRange, Values, common_range
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
from weft.data.index.split_names import held_out_side, split_folders, split_of
from weft.data.index.tree import EXTENSIONS, extension, is_folder, is_junk, walk
from weft.errors import DataError, UsageError
from weft.processor import available_cores
from weft.text import printable

CHUNK = 16  # images per task of a thread
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class ImageEntry(NamedTuple):
    """An image of a dataset, before it is opened.

    Attributes:
        key: path relative to the root, or another unique name.
        class_name: class folder; empty outside all class folders.
        split: `train`, `val`, or empty if the dataset defines no split; `test` until the held-out side is chosen.
    """

    key: str
    class_name: str
    split: str


class SplitLayout(NamedTuple):
    """Top-level folders of a data directory that define a split.

    Attributes:
        places: folder -> (side, number of folders above the class folders); empty without a split.
        unread: folders that belong to no side.
        set_aside: folder of the test split, with slash, if another one is held out; empty without.
    """

    places: dict[str, tuple[str, int]]
    unread: list[str]
    set_aside: str = ""

    def folder(self, side: str) -> str:
        """Return the folder of a side, without slash; empty if there is none."""
        return next((name for name, (of_folder, _) in self.places.items() if of_folder == side), "")

    def place(self, key: str) -> tuple[str, list[str]]:
        """Return (side, parts of the path below the split); the first of two or more parts is the class."""
        parts = key.split("/")
        side, depth = self.places[parts[0]] if self.places else ("", 0)
        return side, parts[depth:]


@dataclass
class Inventory:
    """Content of a data directory, as returned by `inspect`.

    Attributes:
        root: the directory.
        train_name, val_name: names of the folders for training (`train`, `Training`, ...) and validation (`val`,
            `test`, ...); empty without.
        classes: class folders by split (`train`, `val`; one empty key without a split), sorted by `sort_class_names`,
            with empty folders.
        good: usable images, sorted by key.
        bad: image files that cannot be used, sorted by key.
        ignored: number of files that are no images by name and content, by extension.
        skipped: number of skipped entries, by key of `weft.data.index.tree.SKIPPED`.
        notes: number of conversions of usable images, by key of `weft.data.images.colour.NOTES`.
        sizes: (height, width) of usable images in pixels; empty before decoding.
        values: of usable images of more than 8 bits per channel.
        copies: groups of two or more keys whose files are byte-identical; empty before decoding.
        classes_outside: class or split folders that are links to outside the root, not followed.
        unread: top-level folders, or shards, that are not read because the others are a split.
        set_aside: the test split, which is not read because another one is held out: `test/`, or `12 images of test`.
        remarks: sentences for the user: guesses, and what a name was taken for.
        nested: folders in each class, if every class with images has them in further folders alone; else empty.
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
    set_aside: str = ""
    remarks: list[str] = field(default_factory=list)
    nested: dict[str, list[str]] = field(default_factory=dict)
    train_name: str = "train"

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
            "set_aside": self.set_aside,
            "remarks": self.remarks,
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
        path: folder of class folders, or folder with `train/` and optionally `val/` or `test/`, by any of the names of
            `weft.data.index.split_names`.
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


def scan_folder(
    path: str | Path, *, follow_links: bool = False, test: bool = False
) -> tuple[Inventory, list[ImageEntry]]:
    """Walk a directory and read the first bytes of every file: the first half of `inspect`.

    Args:
        path, follow_links: as in `inspect`.
        test: read the test split in place of the validation split.

    Returns:
        The inventory with `good` empty, and the files that are images by their first bytes, sorted by key.
    """
    root = existing(path)
    layout = _layout(root, test=test)
    tree = walk(os.fspath(root), only=layout.places or None, follow_links=follow_links)
    classes: dict[str, list[str]] = {side: [] for side, _ in layout.places.values()} or {"": []}
    inventory = Inventory(root, layout.folder("val"), classes, unread=layout.unread, set_aside=layout.set_aside)
    inventory.skipped, inventory.train_name = tree.skipped, layout.folder("train")
    inventory.classes_outside = [key for key in tree.links_out if len(layout.place(key)[1]) < 2]
    inventory.bad = [bad._replace(split=layout.place(bad.key)[0]) for bad in tree.bad]
    for folder in tree.folders:
        split, inner = layout.place(folder)
        if len(inner) == 1:
            classes[split].append(inner[0])
    for names in classes.values():
        names[:] = sort_class_names(names)
    candidates = []
    for key in tree.files:
        split, inner = layout.place(key)
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
    inventory.nested = _nested(layout, entries)
    return inventory, entries


def check_outside(out: str | Path, *data: str | Path, is_dataset: bool = True) -> None:
    """Refuse an output in a folder of images, where a later run would read it as a class or an image.

    Args:
        out: file or directory to write.
        data: folders of images; other sources are ignored.
        is_dataset: next to the folders of a split, where nothing is read, an output is allowed.

    Raises:
        UsageError: `out` is in one of the folders.
    """
    for folder in data:
        root, resolved = Path(folder).resolve(), Path(out).resolve()
        if not root.is_dir() or not resolved.is_relative_to(root):
            continue
        is_beside = is_dataset and has_split(root) and resolved != root
        if not is_beside or split_of(resolved.relative_to(root).parts[0]):
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


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sort class names: by value if all are numbers, else alphabetically."""
    names = list(names)
    is_numbers = all(name.isascii() and name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if is_numbers else (0, name))


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


def has_split(root: Path) -> bool:
    """Return whether the folders of a data directory define a split."""
    return bool(_layout(root, test=False).places)


def _layout(root: Path, *, test: bool) -> SplitLayout:
    """Return the folders of the split, by their names.

    Only folders that contain folders count: a `train` that contains files is a class, and a `test` of unsorted files
    has no classes.
    """
    names = _folders(root)
    named = (name for name in names if split_of(name) and _folders(root / name))
    sides = {side: name for name, side in split_folders(named).items()}
    if not sides:
        if test:
            held_out_side((), test=True)
        return SplitLayout({}, [])
    held_out = held_out_side(sides, test=test)
    read = {sides["train"]: "train"} | ({sides[held_out]: "val"} if held_out else {})
    places = {name: (side, _depth(root / name, name)) for name, side in read.items()}
    set_aside = sides["test"] if "test" in sides and held_out != "test" else ""
    unread = [name for name in names if name not in places and name != set_aside]
    return SplitLayout(places, unread, f"{set_aside}/" if set_aside else "")


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if is_folder(entry) and not is_junk(entry.name))
    except OSError:  # `walk` records it as bad
        return []


def _depth(folder: Path, name: str) -> int:
    """Return the number of folders above the class folders: 2 for `seg_train/seg_train`, as archives are unpacked."""
    depth = 1
    while len(inner := _folders(folder)) == 1 and split_of(inner[0]) == split_of(name) and _folders(folder / inner[0]):
        folder, depth = folder / inner[0], depth + 1
    return depth


def _nested(layout: SplitLayout, entries: list[ImageEntry]) -> dict[str, list[str]]:
    """Return the folders in each class; none if an image is directly in a class folder."""
    nested: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        _, inner = layout.place(entry.key)
        if len(inner) == 2:
            return {}
        if len(inner) > 2:
            nested[inner[0]].add(inner[1])
    return {name: sorted(folders) for name, folders in sorted(nested.items())}


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
