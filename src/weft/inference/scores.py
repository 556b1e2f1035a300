"""Scores of predictions: values of a class, of a bin and of the most certain images, from arrays of all images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

BINS = 15  # as in arXiv 1706.04599


class ClassScore(NamedTuple):
    """Scores of one class in percent; None where they are undefined. `images` is the number of images of the class.

    A class without images has no scores; a class that is never predicted has no precision.
    """

    name: str
    images: int
    precision: float | None
    recall: float | None
    f1: float | None


class ClassCounts(NamedTuple):
    """Numbers of images by class, each (classes).

    Attributes:
        images: those of the class.
        predicted: those whose predicted class it is.
        correct: those of the class that are predicted correctly.
    """

    images: np.ndarray
    predicted: np.ndarray
    correct: np.ndarray


class Mistake(NamedTuple):
    """One misclassified image; `place` is its index in the source."""

    key: str
    true: str
    predicted: str
    probability: float
    place: int


class Confident(NamedTuple):
    """The images that a model is most certain of: their number, and their accuracy in percent; None without images."""

    images: int
    top1: float | None


class Bin(NamedTuple):
    """The images whose predicted class has a probability above `low` and up to `high`.

    Attributes:
        sure: mean probability of the predicted classes (confidence), 0 to 1.
        right: accuracy, 0 to 1; equal to `sure` for a calibrated model.
    """

    low: float
    high: float
    images: int
    sure: float
    right: float


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error in percentage points: mean distance of confidence and accuracy over images.

    Args:
        sure: (images) probability of each predicted class.
        right: (images) whether it is correct.
    """
    bins = bins_of(sure)
    distances = [(bins == i).sum() * abs(sure[bins == i].mean() - right[bins == i].mean()) for i in np.unique(bins)]
    return float(100 * sum(distances) / max(len(sure), 1))


def bins_of(sure: np.ndarray) -> np.ndarray:
    """Return the bin of every confidence, of BINS bins of equal width."""
    return np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)


def confused_pairs(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the pairs of different classes (pairs 3) that occur: true class, predicted class, number of images.

    The pair with the most images is first; of equal ones, that of the first classes. The memory is that of the images.

    Args:
        true, predicted: (images) class indices.
        num_classes: number of classes.
    """
    is_wrong = true != predicted
    codes, counts = np.unique(true[is_wrong] * num_classes + predicted[is_wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return np.column_stack([*divmod(codes[order], num_classes), counts[order]])


def mean_of(scores: Iterable[float | None]) -> float:
    """Return the mean of the scores that are defined; 0 without any."""
    defined = [score for score in scores if score is not None]
    return sum(defined) / max(len(defined), 1)


def percent_text(value: float | None) -> str:
    """Return a score in percent as text; `-` where it is undefined."""
    return "-" if value is None else f"{value:.1f}"
