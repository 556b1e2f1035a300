"""scikit-learn's digits: 1,797 handwritten digits of 8x8 pixels in 17 gray levels, included in the package.

The validation set is fixed: a fifth of each digit, independent of the seed, so that results are comparable.
"""

from __future__ import annotations

import gzip
import io
from typing import Any

import numpy as np
from PIL import Image

from weft.data.inventory import Inventory
from weft.data.split import stratified_split
from weft.lazy import package_folder

DIGITS = "digits"  # the name of this dataset wherever data is named
VAL_FRACTION = 0.2
SPLIT_SEED = 0
WHITE = 16  # the largest value; 0 is the background


def open_digits() -> Inventory:
    """List the digits as PNG files in memory, with keys `digits/0000` to `digits/1796` in scikit-learn's order."""
    images, labels = read_digits()
    keys = [f"digits/{i:04d}" for i in range(len(labels))]
    files = dict(zip(keys, map(_png, images), strict=True))
    inventory = Inventory(DIGITS, files.__getitem__, {"": [str(digit) for digit in range(10)]})
    val = set(stratified_split(keys, labels, VAL_FRACTION, SPLIT_SEED)[1])
    for i, (key, label) in enumerate(zip(keys, labels, strict=True)):
        inventory.add(key, str(label), "val" if i in val else "train")
    return inventory


def read_digits() -> tuple[np.ndarray, list[int]]:
    """Return the images (n 8 8), values 0 to `WHITE`, and their digits.

    They are read from scikit-learn's file, since its import takes seconds; by scikit-learn if the file is elsewhere.
    """
    folder = package_folder("sklearn")
    file = None if folder is None else folder / "datasets" / "data" / "digits.csv.gz"
    if file is not None and file.is_file():
        with gzip.open(file) as stream:
            rows = np.loadtxt(stream, delimiter=",")
        return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int).tolist()
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return digits.images, digits.target.tolist()


def _png(image: np.ndarray) -> bytes:
    """Encode gray 8x8 values of 0 to `WHITE`, scaled to 0 to 255 (rounded; all 17 levels stay distinct)."""
    file = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / WHITE)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
