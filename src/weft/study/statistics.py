"""Confidence intervals of 95 % and significance tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from weft.intervals import LEVEL, Estimate, accuracy_of, difference_of

MAX_SEEDS = 1000  # of a study, and to search for a number of seeds


class Outcome(Protocol):
    """Result of a run on the validation images: top-1 in percent, and (images) which are correct, empty if unknown."""

    @property
    def top1(self) -> float | None: ...
    @property
    def right(self) -> np.ndarray: ...


def mean_of_runs(values: Sequence[float]) -> Estimate:
    """Estimate the mean over runs with different seeds, by Student's t; infinite interval for one run."""
    from scipy import stats  # takes a second to import

    value = float(np.mean(values))
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return Estimate(value, value - float(half), value + float(half))


def seeds_to_show(effect: Estimate, seeds: int, size: float) -> int | None:
    """Return how many seeds it would take until the interval of an effect is narrower than a size to either side.

    Args:
        effect: effect over paired runs, with its interval by Student's t.
        seeds: number of pairs, at least 2.
        size: difference in percentage points, above 0.

    Returns:
        The number, if the variation between the seeds stays as it is; None for more than MAX_SEEDS.
    """
    from scipy import stats

    counts = np.arange(2, MAX_SEEDS + 1)
    factors = stats.t.ppf((1 + LEVEL) / 2, counts - 1) / np.sqrt(counts)
    deviation = (effect.high - effect.value) / factors[seeds - 2]
    enough = counts[factors * deviation < size]
    return int(enough[0]) if len(enough) else None


def accuracy(right: np.ndarray) -> Estimate:
    """Estimate the top-1 accuracy in percent from (images) whether each prediction is correct."""
    return accuracy_of(int(right.sum()), right.size)


def difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Estimate the top-1 accuracy of the first model minus that of the second, in percentage points.

    Args:
        first, second: (images) whether each prediction is correct, on the same images.
    """
    won, lost = _disagreements(first, second)
    return difference_of(won, lost, first.size)


def paired_difference(pairs: Sequence[tuple[Outcome, Outcome]]) -> Estimate | None:
    """Estimate the difference of two models over paired runs: by seed, or over the images if there is one pair.

    Args:
        pairs: finished results of the first and the second model with the same seed.

    Returns:
        The estimate, with an infinite interval for one pair without results per image; None without pairs.
    """
    if len(pairs) == 1 and pairs[0][0].right.size == pairs[0][1].right.size > 0:
        return difference(pairs[0][0].right, pairs[0][1].right)
    return mean_of_runs([float(ours.top1 or 0) - float(other.top1 or 0) for ours, other in pairs]) if pairs else None


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p-value of McNemar's exact test, on the images where only one of two models is correct.

    Args:
        first, second: (images) whether each prediction is correct, on the same images.
    """
    from scipy import stats

    won, lost = _disagreements(first, second)
    return 1.0 if won + lost == 0 else float(stats.binomtest(won, won + lost).pvalue)


def _disagreements(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """Return the numbers of images on which only the first and only the second model is correct."""
    return int((first & ~second).sum()), int((second & ~first).sum())
