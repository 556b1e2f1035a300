"""ReaL labels of ImageNet's validation images (Beyer et al. 2020, arXiv 2006.07159): several per image, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from weft.data.images.decode import open_regular
from weft.errors import DataError
from weft.text import printable

_FILE = "ILSVRC2012_val_{:08}"  # of the list's images, counted from 1


class RealScore(NamedTuple):
    """Accuracy by labels of which an image has several or none.

    Attributes:
        top1: percent of `images` whose prediction is one of their labels.
        images: number of images with a label.
        unlabelled: number of images without one, which count nowhere.
    """

    top1: float
    images: int
    unlabelled: int


def read_real_labels(file: str | Path, num_classes: int) -> dict[str, frozenset[int]]:
    """Read correct classes by the name of the image without its suffix.

    Args:
        file: `real.json`, a list with the classes of ILSVRC2012_val_00000001, 00000002 and so on; or a JSON object from
            names to lists of classes, for another data set. Classes are numbers in the order of the model's outputs.
        num_classes: number of the model's outputs.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    shown = printable(str(file))
    try:
        with open_regular(file) as opened:
            content: Any = json.loads(opened.read())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"The ReaL labels '{shown}' must be a JSON file; {printable(str(error))}.") from error
    if isinstance(content, list):
        content = {_FILE.format(number): classes for number, classes in enumerate(content, start=1)}
    if not isinstance(content, dict):
        raise DataError(f"'{shown}' must hold a list or an object of lists of classes; it holds {content!r:.50}.")
    for name, classes in content.items():
        if not isinstance(classes, list) or not all(type(c) is int and 0 <= c < num_classes for c in classes):
            raise DataError(
                f"Classes in '{shown}' must be whole numbers from 0 to {num_classes - 1}, the model's; image"
                f" '{printable(name)}' has {classes!r:.50}."
            )
    return {_stem(name): frozenset(classes) for name, classes in content.items()}


def check_listed(labels: Mapping[str, frozenset[int]], keys: Sequence[str]) -> None:
    """Refuse images that the labels do not list.

    Args:
        labels: by name, from `read_real_labels`.
        keys: paths or names of the images.

    Raises:
        DataError: there is one.
    """
    if unknown := [key for key in keys if _stem(key) not in labels]:
        raise DataError(
            f"Every image must be in the ReaL labels by its name; {len(unknown):,} are not, such as"
            f" '{printable(unknown[0])}'. They are made for ImageNet's validation images, ILSVRC2012_val_00000001 to"
            " ILSVRC2012_val_00050000."
        )


def real_score(labels: Mapping[str, frozenset[int]], keys: Sequence[str], predicted: np.ndarray) -> RealScore:
    """Score predictions; an image without a correct class is left out.

    Args:
        labels: by name, from `read_real_labels`.
        keys: paths or names of the images.
        predicted: (images) predicted class of each.

    Raises:
        DataError: an image that the labels do not list.
    """
    check_listed(labels, keys)
    names = [_stem(key) for key in keys]
    right = [int(taken) in labels[name] for name, taken in zip(names, predicted, strict=True) if labels[name]]
    if not right:
        raise DataError("At least one image must have a ReaL label; none of them has.")
    return RealScore(100 * sum(right) / len(right), len(right), len(keys) - len(right))


def _stem(name: str) -> str:
    """Name of an image without folders and suffix."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in (".jpeg", ".jpg", ".png", ".webp") else path.name
