"""Pictures that are not the files of one folder: listed in a table, packed into tar shards, kept by another library.

A shelf says which pictures there are, under which class and in which split, and reads one by its key. What is done with
them (a first look at each, a split where there is none, refusals, notes) is the same for all, in
`weft.data.sources.open`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weft.data.index.inventory import Inventory, Picture
from weft.data.index.source import BadFile


class Reader(Protocol):
    """Reads a picture's bytes by its key. It travels to worker processes, so it opens files where it reads."""

    def __call__(self, key: str, /) -> bytes:
        """The bytes.

        Raises:
            BadImage: there are none.
            OSError: the disk does not give them.
        """
        ...


@dataclass
class Shelf:
    """Pictures by key.

    Attributes:
        name: what messages call it.
        pictures: each with its class and its split (`train`, `val`, or empty where there is none), in their order.
        read: from a key to bytes.
        classes: class names, sorted or in the order that the data itself gives them.
        bad: entries that should be pictures and are none.
        notes: sentences for the person.
    """

    name: str
    pictures: list[Picture]
    read: Reader
    classes: list[str]
    bad: list[BadFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def inventory(self) -> Inventory:
        """What `weft.data.index.inventory.survey` would say of a folder that held the same."""
        splits = sorted({picture.split for picture in self.pictures}) or [""]
        is_given = "val" in splits
        classes = {split: _present(self.pictures, split, self.classes) for split in splits}
        if is_given and "train" in classes:
            classes["train"] = self.classes
        return Inventory(Path(self.name), "val" if is_given else "", classes, bad=list(self.bad))


def in_order(names: set[str]) -> list[str]:
    """Class names: numbers by their value, others by the alphabet."""
    is_numbers = all(name.isascii() and name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if is_numbers else (0, name))


def _present(pictures: Sequence[Picture], split: str, names: Sequence[str]) -> list[str]:
    """The names that have a picture in a split, in their order; without a split all of them."""
    found = {picture.class_name for picture in pictures if picture.split == split}
    return [name for name in names if name in found or split == ""]
