"""Inventory of a dataset: its labelled images, from whichever source, and what a check of their files finds."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from weft.data.bit_depth import Values, common_range
from weft.data.colour import NOTES
from weft.data.decode import BadImage, as_bad, image_header, image_info
from weft.data.formats import MAX_PIXELS
from weft.data.index import DECODED, HEADER, UNKNOWN, Digests, FileIndex, Found, Progress, bits_of
from weft.data.source import BadFile, FileReader, Reader, bad_file
from weft.data.split_names import held_out_side
from weft.data.tree import EXTENSIONS, extension
from weft.errors import DataError
from weft.text import count, printable


@dataclass
class Inventory:
    """Labelled images of a dataset as columns, one value per image, and what is known about their files.

    Attributes:
        name: name in messages: the path, or `torchvision:NAME`.
        read: function from key to bytes.
        classes: class names by split (`train`, `val`; one empty key without a split), in the order of their labels;
            also those without images.
        keys: path relative to the root, or another unique name.
        class_names: empty without a class: outside all class folders, or in a test split with hidden labels.
        splits: `train`, `val`, or empty if the dataset defines no split; `test` until `hold_out`.
        groups: images of the same group are on the same side of a split; an empty list if they are not grouped.
        folders: names of the folders for training (`train`, `Training`, ...) and validation (`val`, `test`, ...), by
            split; empty for other sources.
        bad: image files that cannot be used, sorted by key after a check.
        ignored: number of files that are no images by name and content, by extension.
        skipped: number of skipped entries, by key of `weft.data.tree.SKIPPED`.
        classes_outside: class or split folders that are links to outside the root, not followed.
        unread: top-level folders, or shards, that are not read because the others are a split.
        set_aside: the test split, which is not read because another one is held out: `test/`, or `12 images of test`.
        remarks: sentences for the user: guesses, and what a name was taken for.
        nested: folders in each class, if every class with images has them in further folders alone; else empty.
        notes: number of conversions of checked images, by key of `weft.data.colour.NOTES`.
        sizes: (height, width) of checked images in pixels: int32 (n 2).
        values: of checked images of more than 8 bits per channel.
        index: what is known about the files; None until the check, except for a folder.
        places: of the images in the index.
        level: of the check.
        usable: numbers of the checked images that can be used.
    """

    name: str
    read: Reader
    classes: dict[str, list[str]]
    keys: list[str] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    bad: list[BadFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    classes_outside: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    set_aside: str = ""
    remarks: list[str] = field(default_factory=list)
    nested: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    sizes: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    values: list[Values] = field(default_factory=list)
    index: FileIndex | None = None
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    level: int = UNKNOWN
    usable: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, key: str, class_name: str, split: str = "") -> None:
        """Add an image."""
        self.add_all([key], class_name, split)

    def add_all(self, keys: Sequence[str], class_name: str, split: str = "") -> None:
        """Add images of one class."""
        self.keys += keys
        self.class_names += [sys.intern(class_name)] * len(keys)  # one object: else 1.3 million names take 80 MB
        self.splits += [split] * len(keys)

    def keep(self, images: Sequence[int]) -> None:
        """Keep some images, in this order."""
        for column in (self.keys, self.class_names, self.splits, self.groups):
            column[:] = [column[i] for i in images if column]
        self.places = self.places[np.array(images, np.int64)] if len(self.places) else self.places

    @property
    def is_given(self) -> bool:
        """Whether the dataset has a held-out split of its own."""
        return "val" in self.classes

    @property
    def good(self) -> list[str]:
        """Keys of the images that are not known to be bad."""
        bad = {file.key for file in self.bad}
        return [key for key in self.keys if key not in bad]

    @property
    def copies(self) -> list[list[int]]:
        """Groups of two or more images whose files are byte-identical, of decoded images."""
        if self.index is None or self.level < DECODED:
            return []
        hashes = self.index.records["digest"][self.places[self.usable]].view("S12")
        _, group_of, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        is_copy = counts[group_of] > 1
        groups = defaultdict[int, list[int]](list)
        for i, group in zip(self.usable[is_copy].tolist(), group_of[is_copy].tolist(), strict=True):
            groups[group].append(i)
        return sorted(sorted(images) for images in groups.values())

    def digests(self, images: Sequence[int]) -> Digests:
        """Return size and hash of the content of checked images."""
        assert self.index is not None, "they are checked"
        return self.index.digests(self.places[np.array(images, np.int64)], self.level)

    def folder(self, split: str) -> str:
        """Return the name of the folder of a split; that of the split itself for other sources."""
        return self.folders.get(split, split)

    def labelled(self, images: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return the keys and the class names of some images."""
        return [self.keys[i] for i in images], [self.class_names[i] for i in images]

    def hold_out(self, *, test: bool) -> None:
        """Give the held-out images the split `val`, and drop those that are not read: the rule of `held_out_side`.

        Raises:
            DataError: there is no test split, or a held-out image has no class.
        """
        sides = set(self.splits)
        if sides <= {""} and not test:
            return
        tested = [i for i, split in enumerate(self.splits) if split == "test"]
        hidden = [self.keys[i] for i in tested if not self.class_names[i]]
        is_unlabelled = bool(tested) and len(hidden) == len(tested)
        held_out = held_out_side(sides - {"test"} if is_unlabelled and not test else sides, test=test)
        if hidden and held_out == "test":
            raise DataError(
                f"Every image of the test split must have a class; {count(len(hidden), 'image has', 'images have')}"
                f" none, such as '{printable(hidden[0])}', as in test sets with hidden labels."
            )
        if tested and held_out != "test":
            self.set_aside = f"{count(len(tested), 'image')} of test"
        side_of = {"train": "train", held_out: "val", "": ""}
        kept = [i for i, split in enumerate(self.splits) if split in side_of]
        dropped = set(self.class_names) - {self.class_names[i] for i in kept}
        self.keep(kept)
        self.splits = [side_of[split] for split in self.splits]
        self.bad = [file._replace(split=side_of[file.split]) for file in self.bad if file.split in side_of]
        names = [name for of_split in self.classes.values() for name in of_split if name not in dropped]
        self.classes = dict.fromkeys(sorted(set(self.splits)) or [""], names)
        if {"train", "val"} <= self.classes.keys():
            present = {name for name, split in zip(self.class_names, self.splits, strict=True) if split == "val"}
            self.classes["val"] = [name for name in names if name in present]

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; `json.dumps` escapes names that are not UTF-8."""
        bad = {file.key for file in self.bad}
        images = zip(self.keys, self.splits, self.class_names, strict=True)
        counts = Counter((split, name) for key, split, name in images if key not in bad)
        return {
            "root": self.name,
            "good": counts.total(),
            "bad": [bad._asdict() for bad in self.bad],
            "classes": {
                split: {name: counts[split, name] for name in names} for split, names in sorted(self.classes.items())
            },
            "outside_classes": sum(number for (_, name), number in counts.items() if not name),
            "ignored": dict(sorted(self.ignored.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "notes": dict(sorted(self.notes.items())),
            "value_range": common_range(self.values),
            "copies": [[self.keys[i] for i in images] for images in self.copies],
            "classes_outside": self.classes_outside,
            "unread": self.unread,
            "set_aside": self.set_aside,
            "remarks": self.remarks,
        }


def check_images(
    inventory: Inventory,
    images: Sequence[int],
    level: int = DECODED,
    *,
    max_pixels: int = MAX_PIXELS,
    fresh: bool = False,
    progress: Progress | None = None,
) -> None:
    """Find out about some images of an inventory, and add what is found; `open_data` has the other arguments.

    Args:
        inventory: of the images.
        images: their numbers.
        level: `DECODED` to decode every image once, `HEADER` to read its header, `UNKNOWN` to read nothing.
        fresh: read all files, also those that the index knows.
    """
    if inventory.index is None:
        if isinstance(inventory.read, FileReader):
            name = os.path.abspath(inventory.name)
            index, places = FileIndex.of_list(inventory.read.folder, inventory.keys, name, fresh=fresh)
        else:
            index, places = FileIndex(inventory.keys, {"": len(inventory.keys)}), np.arange(len(inventory.keys))
        inventory.index, inventory.places = index, places
    index, numbers = inventory.index, np.array(images, np.int64)
    places = inventory.places[numbers]
    if level > UNKNOWN:
        find = partial(_found, inventory.read, level, max_pixels)
        index.fill(places, level, find, max_pixels=max_pixels, progress=progress)
    is_bad = index.is_bad(places, level)
    for i, place in zip(numbers[is_bad].tolist(), places[is_bad].tolist(), strict=True):
        inventory.bad.append(bad_file(inventory.keys[i], index.problems[place], inventory.splits[i]))
    inventory.bad.sort()
    usable = places[~is_bad]
    inventory.level, inventory.usable = level, np.concatenate([inventory.usable, numbers[~is_bad]])
    if level < HEADER:
        return
    notes = index.records["notes"][usable]
    if level == HEADER:  # which shows no conversion, unless an image of more than 8 bits is decoded for its values
        notes = np.where(notes & bits_of(["16-bit"]), notes, notes & bits_of(["extension"]))
    for note in NOTES:
        inventory.notes[note] += int(np.count_nonzero(notes & bits_of([note])))
    inventory.notes = +inventory.notes
    sizes = np.stack([index.records[side][usable] for side in ("height", "width")], axis=1)
    inventory.sizes = np.concatenate([inventory.sizes, sizes])
    if index.values:
        inventory.values += [index.values[place] for place in usable.tolist() if place in index.values]


def _found(read: Reader, level: int, max_pixels: int, key: str) -> Found:
    """Decode an image, or read its header."""
    header, data = getattr(read, "header", None), b""  # of readers that need not read the whole file for it
    try:
        if level == HEADER and header is not None:
            info = header(key, max_pixels)
        else:
            data = read(key)
            info = image_header(data, max_pixels=max_pixels)
    except (BadImage, OSError) as err:
        return Found(HEADER, problem=as_bad(err))
    problem, hashed, size = None, b"", len(data) or None
    if level == DECODED:
        try:
            info, hashed = image_info(data, max_pixels=max_pixels), content_hash(data)
        except BadImage as err:
            problem = as_bad(err)
    if EXTENSIONS.get(extension(key), info.format) != info.format:
        info = info._replace(notes=(*info.notes, "extension"))
    return Found(level, info, problem, hashed, size)


def content_hash(data: bytes) -> bytes:
    """Return the 96-bit hash of the content of a file."""
    return hashlib.blake2b(data, digest_size=12).digest()


def digest_of(data: bytes) -> str:
    """Return the size of a file in bytes and its hash in hexadecimal digits, separated by a tab."""
    return f"{len(data)}\t{content_hash(data).hex()}"
