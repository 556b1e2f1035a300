"""95 % confidence intervals of accuracies, in percent, and of differences of two accuracies, in percentage points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
MAX_HALF_WIDTH = 10.0  # percentage points; with a wider interval, the images are too few for a conclusion
ENOUGH_IMAGES = 100  # with so many images, the interval of every accuracy is narrower


class Estimate(NamedTuple):
    """Value with its confidence interval, in the same unit."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return interval_text(self)

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide for a conclusion: more than 10 points to each side."""
        return self.high - self.low > 2 * MAX_HALF_WIDTH


def accuracy_of(correct: int, count: int) -> Estimate:
    """Estimate an accuracy in percent, with Wilson's score interval (1927).

    Args:
        correct: number of correct predictions.
        count: number of images, at least 1.
    """
    return _wilson(correct / count, count)


def accuracy_in_groups(right: Sequence[bool] | np.ndarray, groups: Sequence[str]) -> Estimate:
    """Estimate an accuracy in percent where images of a group are alike, such as the frames of a video.

    It is the interval of Wilson for the number of independent images whose accuracy varies as much as that of these
    groups (design effect; Kish, Survey Sampling, 1965).

    Args:
        right: whether the prediction of each image is correct, of at least one.
        groups: group of each image.
    """
    count, numbers = len(right), np.unique(groups, return_inverse=True)[1]
    sizes, correct = np.bincount(numbers), np.bincount(numbers, np.asarray(right, np.float64))
    share = correct.sum() / count
    if 0 < correct.sum() < count and len(sizes) > 1:
        variance = np.square(correct - share * sizes).sum() * len(sizes) / (len(sizes) - 1) / count**2
        effect = max(variance / (share * (1 - share) / count), 1)
    else:
        effect = np.square(sizes).sum() / count  # as if the images of a group were equal
    return _wilson(float(share), float(count / effect))


def _wilson(share: float, count: float) -> Estimate:
    """Return Wilson's score interval (1927) in percent of the share of a number of images."""
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    low, high = (min(max(100 * bound, 0.0), 100.0) for bound in (center - half, center + half))
    return Estimate(100 * share, min(low, 100 * share), max(high, 100 * share))


def interval_of(percent: float, count: int) -> Estimate:
    """Estimate an accuracy from its value in percent, as `accuracy_of` does."""
    return accuracy_of(round(percent * count / 100), count)


def difference_of(won: int, lost: int, count: int) -> Estimate:
    """Estimate the accuracy of a model minus that of another on the same images, in percentage points.

    The interval is that of Agresti and Min (2005): half an image is added to each of the four outcomes. So it also has
    a width if both models are correct on the same images.

    Args:
        won: number of images on which only the first model is correct.
        lost: number of images on which only the second model is correct.
        count: number of images, at least 1.
    """
    center = (won - lost) / (count + 2)
    half = Z * math.sqrt((won + lost + 1) / (count + 2) - center**2) / math.sqrt(count + 2)
    low, high = max(100 * (center - half), -100.0), min(100 * (center + half), 100.0)
    value = 100 * (won - lost) / count
    return Estimate(value, min(low, value), max(high, value))


def accuracy_text(percent: float, count: int, images: str = "images", estimate: Estimate | None = None) -> str:
    """Return an accuracy with its number of images and interval, as `90.00 % of 50 images (95 % CI 78.6 to 95.7 %)`.

    Args:
        percent: the accuracy.
        count: number of images, at least 1.
        images: noun for the images.
        estimate: the accuracy with another interval, as of images in groups.
    """
    estimate = estimate or interval_of(percent, count)
    return f"{percent:.2f} % of {count:,} {images} (95 % CI {estimate.low:.1f} to {estimate.high:.1f} %)"


def held_out_text(percent: float, count: int, groups: int | None, images: str = "held-out images") -> str:
    """Return the accuracy for held-out images; of images in groups without the interval for single images.

    Args:
        percent, count, images: as in `accuracy_text`.
        groups: number of groups of the images, of which none was trained on; None if they are not in groups.
    """
    if groups is None:
        return accuracy_text(percent, count, images)
    held_out = f"{groups:,} group{' that was' if groups == 1 else 's that were'} held out"
    return f"{percent:.2f} % of {count:,} {images} in {held_out}"


def interval_text(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Format an estimate with its interval; without one, where it is not finite. None is an empty text."""
    if estimate is None:
        return ""
    sign = "+" if signed else ""
    if not math.isfinite(estimate.high):
        return f"{estimate.value:{sign}.2f}"
    return f"{estimate.value:{sign}.2f} ({estimate.low:{sign}.2f} to {estimate.high:{sign}.2f})"


def grouped_text(images: int, groups: int) -> str:
    """Return a note if images are in groups; an empty text without groups, or if each has one image."""
    if not 0 < groups < images:
        return ""
    return f"The {images:,} images are in {groups:,} group{'' if groups == 1 else 's'}; the 95 % interval is by groups."


def too_few_text(estimate: Estimate, images: int, groups: int = 0) -> str:
    """Return a warning if images or groups are too few for a conclusion about an accuracy; else an empty text.

    Args:
        estimate: the accuracy.
        images: number of images.
        groups: number of groups that they are in; 0 without groups.
    """
    if not estimate.is_wide:
        return ""
    is_grouped = 0 < groups < images
    noun, number = ("groups", groups) if is_grouped else ("images", images)
    advice = "Add images of other groups." if is_grouped else f"{ENOUGH_IMAGES} images are always enough for that."
    return (
        f"Too few {noun} for a conclusion: with {number:,}, the 95 % interval of the accuracy is wider than"
        f" {MAX_HALF_WIDTH:g} points to each side. {advice}"
    )
