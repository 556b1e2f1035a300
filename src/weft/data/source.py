"""Labelled images: sources that read them by index, and the two sides of a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import NamedTuple, Protocol

import numpy as np

from weft.data.bit_depth import ValueRange, Values, common_range
from weft.data.decode import BadImage, ImageInfo, as_bad, image_header, image_size, read_regular
from weft.data.formats import MAX_PIXELS
from weft.errors import DataError
from weft.text import printable

NUM_HEADERS = 32  # images that `image_size_hint` opens

Reader = Callable[[str], bytes]
"""Function from the key of an image to its bytes, picklable for worker processes; raises BadImage or OSError."""


class FileReader:
    """Read files by path, relative to a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = os.fspath(folder)

    def __call__(self, key: str) -> bytes:
        """Return the bytes of a file."""
        return read_regular(self.path(key))

    def header(self, key: str, max_pixels: int) -> ImageInfo:
        """Check the header of an image: `image_header`."""
        return image_header(self.path(key), max_pixels=max_pixels)

    def path(self, key: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, key)


class BadFile(NamedTuple):
    """An image file that cannot be used.

    Attributes:
        key: path relative to the data directory.
        reason: a key of `weft.data.decode.REASONS`.
        message: sentence that names the file.
        split: `train`, `val`, or empty if the dataset defines no split.
    """

    key: str
    reason: str
    message: str
    split: str = ""


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


class LostDataError(DataError):  # torch gives errors of workers as text, and `DataError: ` is searched there
    """An image that passed the check, and turns out to be damaged or missing."""


class KeyedSource:
    """Images that a `Reader` reads by key, with the size and hash of each file as it was checked.

    Attributes:
        takes_next: in place of an image that turns out to be damaged, the next one of its class is used; None of
            images that are not for training.
        blocks: number of the file on a server that every image is in; None of images on this machine.
    """

    def __init__(
        self,
        reader: Reader,
        classes: list[str],
        keys: list[str],
        labels: list[int],
        max_pixels: int = MAX_PIXELS,
        digests: Iterable[str] = (),
        takes_next: bool | None = None,
        blocks: np.ndarray | None = None,
    ):
        self.reader, self.classes, self.keys, self.labels = reader, classes, keys, labels
        self.max_pixels, self.digests, self.takes_next, self.blocks = max_pixels, digests, takes_next, blocks

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, i: int) -> Sample:
        """Return image `i`.

        Raises:
            DataError: the image is missing or cannot be read.
        """
        key = self.keys[i]
        try:
            return Sample(self.reader(key), self.labels[i], key)
        except (BadImage, OSError) as err:
            raise lost_error(self, key, err) from err


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
        groups, val_groups: group of every training and of every validation image; None if the images are not grouped.
        sizes: (height, width) of the images in pixels, as far as they are known: int32 (n 2).
        values: of the images of more than 8 bits per channel.
    """

    train: KeyedSource
    val: KeyedSource
    classes: list[str]
    notes: list[str] = field(default_factory=list)
    bad: tuple[BadFile, ...] = ()
    is_given: bool = False
    groups: list[str] | None = None
    val_groups: list[str] | None = None
    sizes: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    values: list[Values] = field(default_factory=list)

    @property
    def value_range(self) -> ValueRange | None:
        """Black and white of the images of more than 8 bits per channel; None without such images."""
        return common_range(self.values)


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sort class names: by value if all are numbers, else alphabetically."""
    names = list(names)
    is_numbers = all(name.isascii() and name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if is_numbers else (0, name))


def pixel_limit(source: Source) -> int:
    """Return the largest number of pixels of an image of a source."""
    return getattr(source, "max_pixels", MAX_PIXELS)


def bad_file(key: str, err: BadImage | OSError, split: str = "") -> BadFile:
    """Return the error of an image as a bad file, named by its key."""
    problem = as_bad(err)
    return BadFile(key, problem.reason, str(BadImage(printable(key), problem.reason, problem.detail)), split)


def lost_error(source: Source, key: str, err: BadImage | OSError) -> LostDataError:
    """Return the error for an image of a source that passed the check, and cannot be used any more."""
    is_stop = getattr(source, "takes_next", None) is False
    return LostDataError(
        f"{bad_file(key, err).message} It passed the check when the data was opened: restore it, or start again without"
        f" it.{' Or use the next image of its class: --set data.damaged=next.' if is_stop else ''}"
    )


def image_size_hint(source: Source) -> tuple[int, int]:
    """Return the median (height, width) in pixels of images sampled evenly from the source, by their headers.

    Raises:
        DataError: one of them can no longer be read.
    """
    step = max(len(source) // NUM_HEADERS, 1)
    sizes, errors = [], []
    for i in range(0, len(source), step):
        try:
            sample = source.read(i)
            sizes.append(image_size(sample.data, max_pixels=pixel_limit(source)))
        except (LostDataError, BadImage) as err:
            errors.append(lost_error(source, source.keys[i], err) if isinstance(err, BadImage) else err)
            if not getattr(source, "takes_next", None):
                raise errors[0] from None
    if not sizes:
        raise errors[0]
    heights, widths = zip(*sizes, strict=True)
    return median_low(heights), median_low(widths)
