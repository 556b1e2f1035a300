"""Listing of images that are not the files of one folder: in a table, in tar shards, or in another library.

A listing names every image with its class and split, and reads an image by its key. `weft.data.sources.open` does the
rest, the same for all kinds: decoding every image once, splitting, errors, notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weft.data.index.inventory import ImageEntry, Inventory
from weft.data.index.source import BadFile


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
        entries: images with class and split (`train`, `val`, or empty without a split), in order.
        read: function from key to bytes.
        classes: class names, in the order of their labels.
        bad: images that cannot be used.
        notes: sentences for the user.
        groups: group of every image by key, if a column of the table names it.
        skipped, ignored, unread: as in `weft.data.index.inventory.Inventory`.
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
        )


def sort_class_names(names: set[str]) -> list[str]:
    """Sort class names: by value if all are numbers, else alphabetically."""
    is_numbers = all(name.isascii() and name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if is_numbers else (0, name))


def _present(entries: Sequence[ImageEntry], split: str, names: Sequence[str]) -> list[str]:
    """Return the names with an image in `split`, in order; all names for the empty split."""
    present = {entry.class_name for entry in entries if entry.split == split}
    return [name for name in names if name in present or split == ""]
