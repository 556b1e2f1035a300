"""Listing of images that are not the files of one folder: in a table, in tar shards, or in another library.

A listing names every image with its class and split, and reads an image by its key. `weft.data.sources.open` does the
rest, the same for all kinds: decoding every image once, splitting, errors, notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from weft.data.index.inventory import ImageEntry, Inventory
from weft.data.index.source import BadFile
from weft.data.index.split_names import held_out_side
from weft.errors import DataError
from weft.text import count, printable


class Reader(Protocol):
    """Function that reads the bytes of an image by its key. It must be picklable: worker processes call it."""

    def __call__(self, key: str, /) -> bytes:
        """Return the bytes of an image.

        Raises:
            BadImage: the image is missing or cannot be used.
            OSError: the file cannot be read.
        """
        ...


@dataclass
class Listing:
    """Images of a dataset that are read by key.

    Attributes:
        name: name in messages.
        entries: images with class and split (`train`, `val`, `test`, or empty without a split), in order. Images of
            `test` may have no class.
        read: function from key to bytes.
        classes: class names, in the order of their labels.
        bad: images that cannot be used.
        notes: sentences for the user.
        groups: group of every image by key, if a column of the table names it.
        skipped, ignored, unread: as in `weft.data.index.inventory.Inventory`.
        set_aside: images of the test split that are not read, as in `Inventory`.
        nested: as in `Inventory`.
    """

    name: str
    entries: list[ImageEntry]
    read: Reader
    classes: list[str]
    bad: list[BadFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: dict[str, str] | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)
    set_aside: str = ""
    nested: dict[str, list[str]] = field(default_factory=dict)

    def with_held_out(self, *, test: bool) -> Listing:
        """Return the images for training and the held-out ones, with the split `val`: the rule of `held_out_side`.

        Args:
            test: hold out the test split in place of the validation split.

        Raises:
            DataError: there is no test split, or a held-out image has no class.
        """
        sides = {entry.split for entry in self.entries}
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
        classes = [name for name in self.classes if name not in dropped]
        set_aside = f"{count(len(tested), 'image')} of test" if tested and held_out != "test" else ""
        return replace(self, entries=entries, bad=bad, classes=classes, set_aside=set_aside)

    def inventory(self) -> Inventory:
        """Return the inventory that `weft.data.index.inventory.scan_folder` returns for a folder of the same images."""
        splits = sorted({entry.split for entry in self.entries}) or [""]
        is_given = "val" in splits
        classes = {split: _present(self.entries, split, self.classes) for split in splits}
        if is_given and "train" in classes:
            classes["train"] = self.classes
        return Inventory(
            Path(self.name),
            "val" if is_given else "",
            classes,
            bad=list(self.bad),
            skipped=self.skipped,
            ignored=self.ignored,
            unread=self.unread,
            set_aside=self.set_aside,
            nested=self.nested,
        )


def _present(entries: Sequence[ImageEntry], split: str, names: Sequence[str]) -> list[str]:
    """Return the names with an image in `split`, in order; all names for the empty split."""
    present = {entry.class_name for entry in entries if entry.split == split}
    return [name for name in names if name in present or split == ""]
