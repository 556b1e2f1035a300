"""Confidence intervals of 95 % and significance tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
DRAWS = 2000


class Estimate(NamedTuple):
    """A number with its interval, in the same unit."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def mean_of_runs(values: Sequence[float]) -> Estimate:
    """Mean over runs of other seeds, by Student's t; of one run the interval is infinite.

    Args:
        values: one per run.
    """
    value = float(np.mean(values))
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return Estimate(value, value - float(half), value + float(half))


def accuracy(right: np.ndarray, seed: int = 0) -> Estimate:
    """Top-1 in percent over images, by bootstrap: what other held-out images of the same kind would say of this model.

    Args:
        right: (images) whether each was answered right.
        seed: of the draws.
    """
    return _bootstrapped(right.astype(np.float64), seed)


def difference(first: np.ndarray, second: np.ndarray, seed: int = 0) -> Estimate:
    """Top-1 of the first model above the second's, in points, by bootstrap over the same images.

    Args:
        first, second: (images) whether each was answered right, in the same order.
        seed: of the draws.
    """
    return _bootstrapped(first.astype(np.float64) - second.astype(np.float64), seed)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """Probability of so uneven a split of the images on which two models disagree, if neither were better (exact).

    Args:
        first, second: (images) whether each was answered right, in the same order.
    """
    won, lost = int((first & ~second).sum()), int((second & ~first).sum())
    return 1.0 if won + lost == 0 else float(stats.binomtest(won, won + lost).pvalue)


def _bootstrapped(values: np.ndarray, seed: int) -> Estimate:
    """Mean in percent; the values are few, so the number of each in a draw is drawn."""
    kinds, counts = np.unique(values, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=DRAWS)
    means = 100 * draws @ kinds / len(values)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(100 * float(values.mean()), float(low), float(high))
