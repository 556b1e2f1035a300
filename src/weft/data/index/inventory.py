"""Inventory of a dataset: its labelled images, from whichever source, and what a check of their files finds."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from weft.data.images import MAX_PIXELS
from weft.data.images.bit_depth import ValueRange, Values, common_range
from weft.data.images.decode import BadImage, ImageInfo, image_info
from weft.data.index.source import BadFile, ImageEntry, Reader, bad_file
from weft.data.index.split_names import held_out_side
from weft.data.index.tree import EXTENSIONS, extension
from weft.errors import DataError
from weft.processor import available_cores
from weft.text import count, printable

CHUNK = 16  # images per task of a thread
Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Inventory:
    """Labelled images of a dataset, which are read by key. `inspect` returns it with all files checked.

    Attributes:
        name: name in messages: the path, or `torchvision:NAME`.
        entries: images with class and split, in order; also those that a check adds to `bad`.
        read: function from key to bytes.
        classes: class names by split (`train`, `val`; one empty key without a split), in the order of their labels;
            also those without images.
        folders: names of the folders for training (`train`, `Training`, ...) and validation (`val`, `test`, ...), by
            split; empty for other sources.
        bad: image files that cannot be used, sorted by key after a check.
        ignored: number of files that are no images by name and content, by extension.
        skipped: number of skipped entries, by key of `weft.data.index.tree.SKIPPED`.
        classes_outside: class or split folders that are links to outside the root, not followed.
        unread: top-level folders, or shards, that are not read because the others are a split.
        set_aside: the test split, which is not read because another one is held out: `test/`, or `12 images of test`.
        remarks: sentences for the user: guesses, and what a name was taken for.
        nested: folders in each class, if every class with images has them in further folders alone; else empty.
        notes: number of conversions of checked images, by key of `weft.data.images.colour.NOTES`.
        sizes: (height, width) of checked images in pixels.
        values: of checked images of more than 8 bits per channel.
        digests: `digest_of` of every checked image that can be used, by key.
    """

    name: str
    entries: list[ImageEntry]
    read: Reader
    classes: dict[str, list[str]]
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
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def is_given(self) -> bool:
        """Whether the dataset has a held-out split of its own."""
        return "val" in self.classes

    @property
    def good(self) -> list[ImageEntry]:
        """Images that are not known to be bad."""
        bad = {file.key for file in self.bad}
        return [entry for entry in self.entries if entry.key not in bad]

    @property
    def copies(self) -> list[list[str]]:
        """Groups of two or more keys whose files are byte-identical, of checked images."""
        seen, several = set[str](), set[str]()
        for digest in self.digests.values():
            (several if digest in seen else seen).add(digest)
        keys = defaultdict[str, list[str]](list)
        for key, digest in self.digests.items():
            if digest in several:
                keys[digest].append(key)
        return list(keys.values())

    @property
    def value_range(self) -> ValueRange | None:
        """Black and white of the images of more than 8 bits per channel; None without such images."""
        return common_range(self.values)

    def folder(self, split: str) -> str:
        """Return the name of the folder of a split; that of the split itself for other sources."""
        return self.folders.get(split, split)

    def with_held_out(self, *, test: bool) -> Inventory:
        """Return the images for training and the held-out ones, with the split `val`: the rule of `held_out_side`.

        Args:
            test: hold out the test split in place of the validation split.

        Raises:
            DataError: there is no test split, or a held-out image has no class.
        """
        sides = {entry.split for entry in self.entries}
        if sides <= {""} and not test:
            return self
        tested = [entry for entry in self.entries if entry.split == "test"]
        is_unlabelled = bool(tested) and not any(entry.class_name for entry in tested)
        held_out = held_out_side(sides - {"test"} if is_unlabelled and not test else sides, test=test)
        if missing := [entry for entry in tested if not entry.class_name and held_out == "test"]:
            raise DataError(
                f"Every image of the test split must have a class; {count(len(missing), 'image has', 'images have')}"
                f" none, such as '{printable(missing[0].key)}', as in test sets with hidden labels."
            )
        side_of = {"train": "train", "": ""} | ({held_out: "val"} if held_out else {})
        entries = [entry._replace(split=side_of[entry.split]) for entry in self.entries if entry.split in side_of]
        bad = [file._replace(split=side_of[file.split]) for file in self.bad if file.split in side_of]
        dropped = {entry.class_name for entry in self.entries} - {entry.class_name for entry in entries}
        names = [name for of_split in self.classes.values() for name in of_split if name not in dropped]
        splits = sorted({entry.split for entry in entries}) or [""]
        classes = dict.fromkeys(splits, names)
        if {"train", "val"} <= classes.keys():
            present = {entry.class_name for entry in entries if entry.split == "val"}
            classes["val"] = [name for name in names if name in present]
        set_aside = f"{count(len(tested), 'image')} of test" if tested and held_out != "test" else ""
        return replace(self, entries=entries, bad=bad, classes=classes, set_aside=set_aside)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; `json.dumps` escapes names that are not UTF-8."""
        good = self.good
        counts = Counter((entry.split, entry.class_name) for entry in good)
        return {
            "root": self.name,
            "good": len(good),
            "bad": [bad._asdict() for bad in self.bad],
            "classes": {
                split: {name: counts[split, name] for name in names} for split, names in sorted(self.classes.items())
            },
            "outside_classes": sum(not entry.class_name for entry in good),
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


def check(
    inventory: Inventory,
    entries: Sequence[ImageEntry],
    *,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> None:
    """Decode images of an inventory once, and add what is found to it.

    Args:
        inventory: of the dataset.
        entries: the images to decode.
        max_pixels: images with more pixels (height x width) are bad.
        progress: called regularly with (number done, total).
    """
    sizes: dict[tuple[int, int], tuple[int, int]] = {}  # equal ones are one object: else 1.3 million take 170 MB
    results = in_threads(partial(_decoded, inventory.read, max_pixels), entries)
    for done, (entry, result) in enumerate(results, 1):
        if isinstance(result, BadFile):
            inventory.bad.append(result)
        else:
            info, inventory.digests[entry.key] = result
            inventory.notes.update(info.notes)
            inventory.sizes.append(sizes.setdefault(info.size, info.size))
            inventory.values += [] if info.values is None else [info.values]
            if EXTENSIONS.get(extension(entry.key), info.format) != info.format:
                inventory.notes["extension"] += 1
        if progress is not None and (done % 64 == 0 or done == len(entries)):
            progress(done, len(entries))
    inventory.bad.sort()


def _decoded(read: Reader, max_pixels: int, entry: ImageEntry) -> tuple[ImageInfo, str] | BadFile:
    try:
        data = read(entry.key)
        return image_info(data, max_pixels=max_pixels), digest_of(data)
    except (BadImage, OSError) as err:
        return bad_file(entry.key, err, entry.split)


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
