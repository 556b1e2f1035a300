"""ReaL labels: several correct classes per ImageNet validation image, or none (Beyer et al., arXiv 2006.07159)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from weft.data.decode import open_regular
from weft.errors import DataError
from weft.text import printable, reason_of

_NAME = "ILSVRC2012_val_{:08}"  # names of the images of the list, numbered from 1


class RealScore(NamedTuple):
    """Accuracy by ReaL labels.

    Attributes:
        top1: percentage of `images` whose prediction is one of their labels.
        images: number of images with at least one label.
        unlabelled: number of images without a label; they are not evaluated.
    """

    top1: float
    images: int
    unlabelled: int


class RealLabels:
    """ReaL labels of images: the correct classes of each, by name without suffix.

    Args:
        file: `real.json`, a list with the classes of ILSVRC2012_val_00000001, 00000002 and so on; or a JSON object from
            names to lists of classes, for another dataset. Classes are indices of the model's outputs.

    Raises:
        DataError: the file cannot be read, or has another content.
    """

    def __init__(self, file: str | Path) -> None:
        self.path = printable(str(file))
        if not Path(file).exists():
            raise DataError(f"The ReaL labels '{self.path}' must be a JSON file; there is none.")
        try:
            with open_regular(file) as stream:
                content: Any = json.loads(stream.read())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"The ReaL labels '{self.path}' must be a JSON file; {reason_of(error)}.") from error
        if isinstance(content, list):
            content = {_NAME.format(number): classes for number, classes in enumerate(content, start=1)}
        if not isinstance(content, dict):
            raise DataError(f"'{self.path}' must contain a list or an object of lists of classes; got {content!r:.50}.")
        self.classes = {_stem(name): classes for name, classes in content.items()}

    def check(self, keys: Sequence[str], num_classes: int) -> None:
        """Check that the labels list every image, and no other classes than those of the model.

        Args:
            keys: paths or names of the images.
            num_classes: number of outputs of the model.

        Raises:
            DataError: they do not.
        """
        for name, classes in self.classes.items():
            if not isinstance(classes, list) or not all(type(c) is int and 0 <= c < num_classes for c in classes):
                raise DataError(
                    f"Classes in '{self.path}' must be whole numbers from 0 to {num_classes - 1}, as the model has"
                    f" {num_classes} outputs; image '{printable(name)}' has {classes!r:.50}."
                )
        if unknown := [key for key in keys if _stem(key) not in self.classes]:
            raise DataError(
                f"The ReaL labels must list every image by its name; {len(unknown):,} are missing, e.g."
                f" '{printable(unknown[0])}'. Pass the labels of this dataset; real.json has those of ImageNet's"
                " validation images, ILSVRC2012_val_00000001 to ILSVRC2012_val_00050000."
            )
        if not any(self.classes[_stem(key)] for key in keys):
            raise DataError(
                "At least one image must have a ReaL label; none of them has. Pass the labels of this dataset."
            )

    def score(self, keys: Sequence[str], predicted: np.ndarray) -> RealScore:
        """Return the accuracy of predictions by the labels of images that `check` accepts; images without a label are
        not evaluated.

        Args:
            keys: paths or names of the images.
            predicted: (images) predicted classes.
        """
        labels = [self.classes[_stem(key)] for key in keys]
        is_correct = [label in known for known, label in zip(labels, predicted.tolist(), strict=True) if known]
        return RealScore(100 * sum(is_correct) / len(is_correct), len(is_correct), len(keys) - len(is_correct))


def _stem(name: str) -> str:
    """Return the name of an image without folders and suffix."""
    path = PurePosixPath(name)
    return path.stem if path.suffix.lower() in (".jpeg", ".jpg", ".png", ".webp") else path.name
