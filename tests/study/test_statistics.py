"""Intervals against other ways to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from weft.report.intervals import ENOUGH_IMAGES, accuracy_of, difference_of, interval_of, too_few_text
from weft.study.statistics import mcnemar, mean_of_runs, paired_difference


def test_a_mean_of_runs_is_students_interval():
    values = [70.1, 71.3, 69.8]
    found = mean_of_runs(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


@pytest.mark.parametrize(("correct", "count"), [(800, 1000), (0, 1), (1, 1), (2, 2), (49, 53), (0, 300), (300, 300)])
def test_accuracy_is_wilsons_interval(correct, count):
    found = accuracy_of(correct, count)
    low, high = stats.binomtest(correct, count).proportion_ci(method="wilson")
    assert found == pytest.approx((100 * correct / count, 100 * low, 100 * high))
    assert found.low <= found.value <= found.high
    assert interval_of(found.value, count) == found


def test_few_images_say_so():
    """The stated number is always enough, and no much smaller one is."""
    assert not any(accuracy_of(correct, ENOUGH_IMAGES).is_wide for correct in range(ENOUGH_IMAGES + 1))
    assert accuracy_of(45, 90).is_wide
    assert too_few_text(interval_of(100.0, 2), 2).startswith("Too few images for a conclusion: with 2,")
    assert too_few_text(interval_of(50.0, 100), 100) == ""


@pytest.mark.parametrize(("share", "rate"), [(0.05, 0.02), (0.1, 0.1), (0.15, 0.0)])
def test_the_interval_of_a_difference_covers_it(share, rate):
    """In about 95 % of experiments, also with few images and few disagreements."""
    rng = np.random.default_rng(0)
    for count in (30, 100):
        drawn = rng.multinomial(count, [share, rate, 1 - share - rate], size=4000)
        intervals = [difference_of(int(won), int(lost), count) for won, lost, _ in drawn]
        covered = np.mean([one.low <= 100 * (share - rate) <= one.high for one in intervals])
        assert covered > 0.93
        assert all(one.low <= one.value <= one.high for one in intervals)
    assert difference_of(0, 0, 10).high > 10  # models without a difference on few images may differ


def test_mcnemar_counts_disagreements_alone():
    first = np.array([True] * 90 + [False] * 10)
    second = np.array([True] * 80 + [False] * 18 + [True] * 2)
    assert mcnemar(first, second) == pytest.approx(stats.binomtest(10, 12).pvalue)
    assert mcnemar(first, first) == 1


def test_one_pair_is_compared_by_images_and_several_by_seeds():
    right, wrong = np.ones(20, bool), np.zeros(20, bool)
    half = np.arange(20) < 10
    assert paired_difference([]) is None
    assert paired_difference([(right, half)]) == difference_of(10, 0, 20)
    assert paired_difference([(right, half), (half, wrong)]) == mean_of_runs([50.0, 50.0])
    assert paired_difference([(right, np.ones(4, bool))]) == (0.0, -math.inf, math.inf)  # on different images
