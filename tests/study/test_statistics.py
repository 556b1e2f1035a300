"""Intervals against other ways to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from weft.study.statistics import accuracy, difference, mcnemar, mean_of_runs


def test_a_mean_of_runs_is_students_interval():
    values = [70.1, 71.3, 69.8]
    found = mean_of_runs(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_one_run_says_nothing_of_another():
    assert mean_of_runs([70.0]) == (70.0, -math.inf, math.inf)


def test_accuracy_is_near_the_binomial_interval():
    right = np.arange(1000) < 800
    found = accuracy(right)
    low, high = stats.binomtest(800, 1000).proportion_ci(method="wilson")
    assert found.value == 80
    assert (found.low, found.high) == pytest.approx((100 * low, 100 * high), abs=0.3)
    assert accuracy(right) == found  # the draws are the same every time


def test_a_difference_on_the_same_images_is_surer_than_two_accuracies():
    rng = np.random.default_rng(0)
    first = rng.random(2000) < 0.8
    second = first.copy()
    second[:60] = False
    found = difference(first, second)
    alone = accuracy(first).high - accuracy(first).low
    assert found.low > 0
    assert found.high - found.low < alone / 2
    assert found.value == pytest.approx(100 * first[:60].sum() / 2000)


def test_alike_models_are_not_told_apart():
    rng = np.random.default_rng(1)
    first, second = rng.random(300) < 0.7, rng.random(300) < 0.7
    found = difference(first, second)
    assert found.low < 0 < found.high
    assert mcnemar(first, second) > 0.05


def test_mcnemar_counts_disagreements_alone():
    first = np.array([True] * 90 + [False] * 10)
    second = np.array([True] * 80 + [False] * 18 + [True] * 2)
    assert mcnemar(first, second) == pytest.approx(stats.binomtest(10, 12).pvalue)
    assert mcnemar(first, first) == 1
