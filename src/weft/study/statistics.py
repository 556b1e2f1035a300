"""Confidence intervals of 95 % and significance tests over the runs of an experiment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.report.intervals import LEVEL, Estimate, difference_of


def mean_of_runs(values: Sequence[float]) -> Estimate:
    """Estimate the mean over runs with different seeds, by Student's t; infinite interval for one run."""
    from scipy import stats  # takes a second to import

    value = float(np.mean(values))
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return Estimate(value, value - float(half), value + float(half))


def paired_difference(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Estimate | None:
    """Estimate the top-1 accuracy of a model minus that of another: by seed, or over the images if there is one pair.

    Args:
        pairs: (images) whether each prediction of the first and of the second model with the same seed is correct.

    Returns:
        The estimate, in percentage points; with an infinite interval for one pair on different images, and None
        without pairs.
    """
    if len(pairs) == 1 and pairs[0][0].size == pairs[0][1].size > 0:
        return difference_of(*_disagreements(*pairs[0]), pairs[0][0].size)
    return mean_of_runs([100 * float(ours.mean() - other.mean()) for ours, other in pairs]) if pairs else None


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
