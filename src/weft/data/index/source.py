"""What training reads from: a source of encoded pictures, split in two without chance.

Splits and selections rank every picture by a hash of (seed, key). So they do not depend on the order in which a file
system lists files, a repaired or added file moves no other one (but for one at the border of its class), and no
generator whose stream could change between versions is involved.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple, Protocol

from weft.data.images.decode import BadImage, image_size
from weft.errors import DataError
from weft.text import printable

NUM_HEADERS = 32  # images that `image_size_hint` opens


class Sample(NamedTuple):
    """One picture as it is stored.

    Attributes:
        data: the bytes of the file; `weft.data.open_image` reads them.
        label: index into the source's classes.
        key: names the picture in messages and predictions, such as its path below the data directory.
    """

    data: bytes
    label: int
    key: str


class Source(Protocol):
    """Pictures by number, from anywhere. Sources never write where they read."""

    classes: list[str]
    """Class names; a label is an index into them."""
    labels: list[int]
    """The label of every picture, without reading any."""
    keys: list[str]
    """The key of every picture, as in `Sample`."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> Sample:
        """Picture `i`.

        Raises:
            DataError: it cannot be read any more; the message names it.
        """
        ...


class BadFile(NamedTuple):
    """A file that should be a picture and is none.

    Attributes:
        key: path below the data directory.
        reason: a key of `weft.data.images.decode.REASONS`.
        message: a sentence that names the file.
        split: `train`, `val`, or empty where the data has no split of its own.
    """

    key: str
    reason: str
    message: str
    split: str = ""


@dataclass(frozen=True)
class Splits:
    """Data ready to train on.

    Attributes:
        train: what to learn from.
        val: what is held out.
        classes: class names, the same list in both.
        notes: sentences for the person: how the split came about, what was left out, what was converted.
        bad: files left out because they cannot be used; of either split.
        is_given: the data came with its own split.
    """

    train: Source
    val: Source
    classes: list[str]
    notes: list[str] = field(default_factory=list)
    bad: tuple[BadFile, ...] = ()
    is_given: bool = False


def lost(key: str, err: BadImage) -> DataError:
    """The error for a picture that was good when the data was opened."""
    now = BadImage(printable(key), err.reason, err.detail)
    return DataError(f"{now} It was good when the data was opened: restore it, or start again without it.")


def rank(key: str, seed: int) -> bytes:
    """Where `key` stands in the queue that `seed` makes: uniform, and the same for ever."""
    return hashlib.blake2b(f"{seed}/{key}".encode(errors="surrogateescape"), digest_size=8).digest()


def stratified_split(
    keys: Sequence[str], labels: Sequence[int], val_fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """(train, val) positions, ascending: of every class the same fraction, rounded, and at least one on either side.

    A class with a single picture has it in train.
    """
    train, val = [], []
    for members in _by_class(keys, labels, seed).values():
        num_val = min(max(round(len(members) * val_fraction), 1), len(members) - 1)
        val += members[:num_val]
        train += members[num_val:]
    return sorted(train), sorted(val)


def stratified_subset(keys: Sequence[str], labels: Sequence[int], limit: int, seed: int) -> list[int]:
    """At most `limit` positions, ascending, in turn from every class."""
    turns = [(turn, i) for members in _by_class(keys, labels, seed).values() for turn, i in enumerate(members)]
    return sorted(i for _, i in sorted(turns, key=lambda item: (item[0], labels[item[1]]))[:limit])


def stratified_share(keys: Sequence[str], labels: Sequence[int], share: float, seed: int) -> list[int]:
    """Positions, ascending: of every class the same share, rounded, and at least one. A smaller share is part of a
    larger one."""
    members = _by_class(keys, labels, seed).values()
    return sorted(i for group in members for i in group[: max(round(len(group) * share), 1)])


def _by_class(keys: Sequence[str], labels: Sequence[int], seed: int) -> dict[int, list[int]]:
    members = defaultdict(list)
    for i, label in enumerate(labels):
        members[label].append(i)
    return {label: sorted(members[label], key=lambda i: rank(keys[i], seed)) for label in sorted(members)}


def image_size_hint(source: Source) -> tuple[int, int]:
    """The typical (height, width) in pixels: medians over pictures spread over the source, from their headers.

    Raises:
        DataError: one of them cannot be read any more.
    """
    step = max(len(source) // NUM_HEADERS, 1)
    sizes = []
    for i in range(0, len(source), step):
        sample = source.read(i)
        try:
            sizes.append(image_size(sample.data))
        except BadImage as err:
            raise lost(sample.key, err) from err
    heights, widths = zip(*sizes, strict=True)
    return median_low(heights), median_low(widths)
