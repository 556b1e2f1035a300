"""Estimate the time of staged training runs, and the number of epochs within a time budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

SHARES = (0.25, 0.5, 1.0)  # of the epochs, after which the worse half stops
MOST_EPOCHS = 10_000


class Price(NamedTuple):
    """Seconds that a candidate takes.

    Attributes:
        epoch: of an epoch, with its evaluation.
        start: of a stage beside its epochs: starting, reading the data, measuring what was trained.
    """

    epoch: float
    start: float


def stages_of(epochs: int) -> list[int]:
    """The epochs after which the worse half stops, and the last."""
    return sorted({max(1, math.ceil(share * epochs)) for share in SHARES})


def staying(count: int) -> int:
    """How many of so many candidates go on after a stage."""
    return max(2, math.ceil(count / 2))


def seconds(prices: Iterable[Price], epochs: int, seeds: int) -> float:
    """Of all stages at worst: the costliest are those that stay.

    Args:
        prices: one per candidate.
        epochs: of each that goes to the end.
        seeds: trainings of each that goes to the end.
    """
    alive, total, before = sorted(prices, reverse=True), 0.0, 0
    for stage in stages_of(epochs):
        total += sum(price.start + price.epoch * (stage - before) for price in alive)
        if stage == epochs:
            total += (seeds - 1) * sum(price.start + price.epoch * epochs for price in alive)
        alive, before = alive[: staying(len(alive))], stage
    return total


def epochs_within(prices: Iterable[Price], budget: float, seeds: int) -> int:
    """The most epochs that a budget in seconds holds, at least one."""
    known = list(prices)
    return max(n for n in range(1, MOST_EPOCHS + 1) if n == 1 or seconds(known, n, seeds) <= budget)
