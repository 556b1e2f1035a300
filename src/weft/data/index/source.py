"""Sources of encoded images, and deterministic splits and subsets.

Splits and subsets rank every image by a hash of (seed, key). They do not depend on the order in which a file system
lists files, a repaired or added file moves no other file (except one at the boundary of its class), and they use no
random generator whose stream could change between versions.
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
    """One encoded image with its label.

    Attributes:
        data: bytes of the file; `weft.data.open_image` decodes them.
        label: index into the source's classes.
        key: name of the image in messages and predictions, e.g. its path relative to the data directory.
    """

    data: bytes
    label: int
    key: str


class Source(Protocol):
    """Encoded images by index. A source never writes to the place that it reads."""

    classes: list[str]
    """Class names; labels are indices into this list."""
    labels: list[int]
    """Label of every image."""
    keys: list[str]
    """Key of every image, as in `Sample`."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> Sample:
        """Return image `i`.

        Raises:
            DataError: the image can no longer be read; the message names it.
        """
        ...


class BadFile(NamedTuple):
    """An image file that cannot be used.

    Attributes:
        key: path relative to the data directory.
        reason: a key of `weft.data.images.decode.REASONS`.
        message: sentence that names the file.
        split: `train`, `val`, or empty if the dataset defines no split.
    """

    key: str
    reason: str
    message: str
    split: str = ""


@dataclass(frozen=True)
class Splits:
    """A dataset with its training and validation split.

    Attributes:
        train: training images.
        val: validation images.
        classes: class names, the same list in both sources.
        notes: sentences for the user: origin of the split, excluded files, conversions.
        bad: excluded files of both splits, which cannot be used.
        is_given: whether the dataset defines the split itself.
    """

    train: Source
    val: Source
    classes: list[str]
    notes: list[str] = field(default_factory=list)
    bad: tuple[BadFile, ...] = ()
    is_given: bool = False


def lost_error(key: str, err: BadImage) -> DataError:
    """Return the error for an image that was usable when the data was opened and is not any more."""
    now = BadImage(printable(key), err.reason, err.detail)
    return DataError(f"{now} It could be read when the data was opened: restore it, or start again without it.")


def rank(key: str, seed: int) -> bytes:
    """Return the sort key of `key` under `seed`: a uniformly distributed hash that no version may change."""
    return hashlib.blake2b(f"{seed}/{key}".encode(errors="surrogateescape"), digest_size=8).digest()


def stratified_split(
    keys: Sequence[str], labels: Sequence[int], val_fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return (train, val) indices, ascending: `val_fraction` of every class, rounded, at least one image in each split.

    The only image of a class goes to train.
    """
    train, val = [], []
    for members in _by_class(keys, labels, seed).values():
        num_val = min(max(round(len(members) * val_fraction), 1), len(members) - 1)
        val += members[:num_val]
        train += members[num_val:]
    return sorted(train), sorted(val)


def stratified_subset(keys: Sequence[str], labels: Sequence[int], limit: int, seed: int) -> list[int]:
    """Return at most `limit` indices, ascending, taken round-robin from the classes."""
    turns = [(turn, i) for members in _by_class(keys, labels, seed).values() for turn, i in enumerate(members)]
    return sorted(i for _, i in sorted(turns, key=lambda item: (item[0], labels[item[1]]))[:limit])


def stratified_share(keys: Sequence[str], labels: Sequence[int], share: float, seed: int) -> list[int]:
    """Return indices, ascending: the fraction `share` of every class, rounded, at least one image. A smaller share is a
    subset of a larger one."""
    members = _by_class(keys, labels, seed).values()
    return sorted(i for group in members for i in group[: max(round(len(group) * share), 1)])


def _by_class(keys: Sequence[str], labels: Sequence[int], seed: int) -> dict[int, list[int]]:
    members = defaultdict(list)
    for i, label in enumerate(labels):
        members[label].append(i)
    return {label: sorted(members[label], key=lambda i: rank(keys[i], seed)) for label in sorted(members)}


def image_size_hint(source: Source) -> tuple[int, int]:
    """Return the median (height, width) in pixels of images sampled evenly from the source, by their headers.

    Raises:
        DataError: one of them can no longer be read.
    """
    step = max(len(source) // NUM_HEADERS, 1)
    sizes = []
    for i in range(0, len(source), step):
        sample = source.read(i)
        try:
            sizes.append(image_size(sample.data))
        except BadImage as err:
            raise lost_error(sample.key, err) from err
    heights, widths = zip(*sizes, strict=True)
    return median_low(heights), median_low(widths)
