"""The interval of an accuracy over images in groups is that of the groups."""

from __future__ import annotations

import numpy as np
import pytest

from weft.report.intervals import accuracy_in_groups, accuracy_of, held_out_text, too_few_text


def frames(clips: int, alike: float, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Return which predictions of clips of 2 to 12 frames are correct: a share of the clips as a whole, or by frame."""
    random = np.random.default_rng(seed)
    right, groups = [], list[str]()
    for clip in range(clips):
        size = int(random.integers(2, 13))
        whole = random.random() < alike
        right += [random.random() < 0.8] * size if whole else (random.random(size) < 0.8).tolist()
        groups += [f"clip {clip}"] * size
    return np.array(right), groups


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_it_is_as_wide_as_a_bootstrap_over_groups(alike: float) -> None:
    right, groups = frames(150, alike)
    random, names = np.random.default_rng(1), np.array(groups)
    members = [np.flatnonzero(names == name) for name in sorted(set(groups))]
    drawn = [np.concatenate([members[i] for i in random.integers(0, 150, 150)]) for _ in range(2000)]
    low, high = np.percentile([100 * right[images].mean() for images in drawn], [2.5, 97.5])
    estimate = accuracy_in_groups(right, groups)
    assert estimate.value == pytest.approx(100 * right.mean())
    assert estimate.high - estimate.low == pytest.approx(high - low, rel=0.2)


def test_single_images_have_the_interval_of_wilson() -> None:
    right = np.arange(200) % 4 > 0
    singles = [str(i) for i in range(200)]
    for estimate in (accuracy_in_groups(right, singles), accuracy_in_groups(np.ones(200, bool), singles)):
        expected = accuracy_of(round(2 * estimate.value), 200)
        assert estimate.low == pytest.approx(expected.low, abs=0.2)
        assert estimate.high == pytest.approx(expected.high, abs=0.2)


@pytest.mark.parametrize("right", [[True] * 40, [False] * 40, [True] * 20 + [False] * 20])
def test_four_groups_count_as_four_images(right: list[bool]) -> None:
    estimate = accuracy_in_groups(right, [str(i // 10) for i in range(40)])
    expected = accuracy_of(sum(right) // 10, 4)
    assert estimate.low == pytest.approx(expected.low, abs=6)
    assert estimate.high == pytest.approx(expected.high, abs=6)
    assert too_few_text(estimate, 40, 4).startswith("Too few groups for a conclusion: with 4, ")


def test_more_images_of_few_groups_are_not_called_enough() -> None:
    right, groups = frames(40, 1.0)
    warning = too_few_text(accuracy_in_groups(right, groups), len(right), 40)
    assert warning.startswith("Too few groups for a conclusion: with 40, ")
    assert warning.endswith(" points to each side. Add images of other groups.")
    assert "100 images are always enough" in too_few_text(accuracy_of(20, 40), 40, 40)


def test_a_recorded_accuracy_says_what_it_is_for() -> None:
    assert held_out_text(80.0, 50, None).startswith("80.00 % of 50 held-out images (95 % CI ")
    assert held_out_text(80.0, 50, 1) == "80.00 % of 50 held-out images in 1 group that was held out"
    assert held_out_text(80.0, 5_000, 2_000) == "80.00 % of 5,000 held-out images in 2,000 groups that were held out"
