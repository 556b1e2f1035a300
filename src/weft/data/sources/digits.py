"""scikit-learn's digits: 1,797 real handwritten digits, 8 x 8 pixels in 17 grays, that come with the package.

One held-out split for everybody, whatever the seed: a fifth of each digit, so that results can be compared.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from weft.data.index.source import Sample, Splits, stratified_share, stratified_split, stratified_subset
from weft.errors import DataError

VAL_FRACTION = 0.2
SPLIT_SEED = 0
WHITE = 16  # the largest value; 0 is the background


class DigitsSource:
    """Some of the digits as PNG files in memory; keys are `digits/0000` to `digits/1796`, in scikit-learn's order."""

    def __init__(self, files: list[bytes], keys: list[str], labels: list[int], classes: list[str]):
        self.files, self.keys, self.labels, self.classes = files, keys, labels, classes

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> Sample:
        """Digit `i`; there is no way for this to fail."""
        return Sample(self.files[i], self.labels[i], self.keys[i])


def open_digits(
    *,
    limit: int | None = None,
    train_fraction: float = 1.0,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> Splits:
    """The digits with their fixed split.

    Args:
        limit: take at most so many for train and so many for val, in turn from every digit.
        train_fraction: what part of each digit to take for train.
        seed: decides only which ones these two take.
        classes: the list to label by; it must hold `0` to `9`.

    Raises:
        DataError: `classes` lacks a digit.
    """
    from sklearn.datasets import load_digits  # 0.5 s, for those who want digits

    digits: Any = load_digits()
    own_names = [str(name) for name in digits.target_names]
    names = list(classes) if classes is not None else own_names
    if missing := [name for name in own_names if name not in names]:
        raise DataError(
            f"Every class in the data must be one of the {len(names)} to label by; not among them: "
            f"{', '.join(missing)}. Evaluate digits with a model trained on digits."
        )
    labels = [names.index(own_names[target]) for target in digits.target]
    keys = [f"digits/{i:04d}" for i in range(len(labels))]
    files = [_png(image) for image in digits.images]
    train, val = stratified_split(keys, labels, VAL_FRACTION, SPLIT_SEED)
    if train_fraction < 1:
        part = stratified_share([keys[i] for i in train], [labels[i] for i in train], train_fraction, seed)
        train = [train[i] for i in part]
    sources = []
    for part in (train, val):
        source = DigitsSource([files[i] for i in part], [keys[i] for i in part], [labels[i] for i in part], names)
        if limit is not None:
            chosen = stratified_subset(source.keys, source.labels, limit, seed)
            source = DigitsSource(
                *([column[i] for i in chosen] for column in (source.files, source.keys, source.labels)), names
            )
        sources.append(source)
    note = (
        f"digits: {len(sources[0]):,} images in {len(own_names)} classes for training, {len(sources[1]):,} held out: "
        f"its fixed split."
    )
    return Splits(sources[0], sources[1], names, [note], is_given=True)


def _png(image: np.ndarray) -> bytes:
    """Gray 8 x 8 values from 0 to `WHITE`, spread over 0 to 255 (rounded; all 17 stay apart)."""
    file = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / WHITE)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
