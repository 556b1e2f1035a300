"""Inventory of a dataset: its labelled images, from whichever source, and what a check of their files finds."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.data.bit_depth import Values, common_range
from weft.data.decode import BadImage, ImageInfo, image_info
from weft.data.formats import MAX_PIXELS
from weft.data.source import BadFile, Reader, bad_file
from weft.data.split_names import held_out_side
from weft.data.tree import EXTENSIONS, extension
from weft.errors import DataError
from weft.machine.processor import available_cores
from weft.text import count, printable

CHUNK = 16  # images per task of a thread
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


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
        digests: `digest_of` of every checked image that can be used, else empty.
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
        sizes: (height, width) of checked images in pixels.
        values: of checked images of more than 8 bits per channel.
    """

    name: str
    read: Reader
    classes: dict[str, list[str]]
    keys: list[str] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
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
    sizes: list[tuple[int, int]] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)

    def add(self, key: str, class_name: str, split: str = "") -> None:
        """Add an image."""
        self.keys.append(key)
        self.class_names.append(sys.intern(class_name))  # one object per class: else 1.3 million names take 80 MB
        self.splits.append(split)
        self.digests.append("")

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
        """Groups of two or more images whose files are byte-identical, of checked images."""
        digest = self.digests.__getitem__
        equal = itertools.groupby(sorted(range(len(self.digests)), key=digest), digest)
        groups = (list(images) for digest, images in equal if digest)
        return sorted(images for images in groups if len(images) > 1)

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
        self.splits = [side_of[self.splits[i]] for i in kept]
        for column in (self.keys, self.class_names, self.groups, self.digests):
            column[:] = [column[i] for i in kept if column]
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


def check(
    inventory: Inventory,
    images: Sequence[int],
    *,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> None:
    """Decode some images of an inventory once, and add what is found to it; `open_data` has the other arguments."""
    sizes: dict[tuple[int, int], tuple[int, int]] = {}  # equal ones are one object: else 1.3 million take 170 MB
    results = in_threads(lambda i: _decoded(inventory.read, max_pixels, inventory.keys[i]), images)
    for done, (i, result) in enumerate(results, 1):
        key = inventory.keys[i]
        if isinstance(result, BadFile):
            inventory.bad.append(result._replace(split=inventory.splits[i]))
        else:
            info, inventory.digests[i] = result
            inventory.notes.update(info.notes)
            inventory.sizes.append(sizes.setdefault(info.size, info.size))
            inventory.values += [] if info.values is None else [info.values]
            if EXTENSIONS.get(extension(key), info.format) != info.format:
                inventory.notes["extension"] += 1
        if progress is not None and (done % 64 == 0 or done == len(images)):
            progress(done, len(images))
    inventory.bad.sort()


def _decoded(read: Reader, max_pixels: int, key: str) -> tuple[ImageInfo, str] | BadFile:
    try:
        data = read(key)
        return image_info(data, max_pixels=max_pixels), digest_of(data)
    except (BadImage, OSError) as err:  # not returned: its traceback holds the bytes and pixels of the image
        return bad_file(key, err)


def digest_of(data: bytes) -> str:
    """Return the size of a file in bytes and its 96-bit hash in hexadecimal digits, separated by a tab."""
    return f"{len(data)}\t{hashlib.blake2b(data, digest_size=12).hexdigest()}"


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
    """Yield (item, result) in order, from a thread pool: Pillow releases the GIL while decoding."""
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    pool = ThreadPoolExecutor(min(available_cores(), 8))
    try:
        results = pool.map(lambda chunk: [function(item) for item in chunk], chunks)
        for chunk, of_chunk in zip(chunks, results, strict=True):
            yield from zip(chunk, of_chunk, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
