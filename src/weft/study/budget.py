"""Estimate the time of staged training runs, and the number of epochs within a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

SHARES = (0.25, 0.5, 1.0)  # of the epochs; after each, the worse half of the candidates stops
MOST_EPOCHS = 10_000


class Price(NamedTuple):
    """Time that a candidate takes, in seconds.

    Attributes:
        epoch: an epoch with its evaluation.
        start: overhead of a stage: start of the process, reading the dataset, final measurements.
    """

    epoch: float
    start: float


class Stopwatch:
    """Time that a comparison has used, in seconds.

    Args:
        before: time that earlier calls have used.
        now: clock in seconds.
    """

    def __init__(self, before: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self._began = now, now() - before

    def spent(self) -> float:
        """Return the time used so far."""
        return self.now() - self._began


def stages_of(epochs: int) -> list[int]:
    """Return the epochs after which the worse half of the candidates stops, and the last epoch."""
    return sorted({max(1, math.ceil(share * epochs)) for share in SHARES})


def staying(count: int) -> int:
    """Return how many of `count` candidates continue after a stage."""
    return max(2, math.ceil(count / 2))


def seconds(prices: Iterable[Price], epochs: int, seeds: int, done: int = 0) -> float:
    """Estimate the time of the stages in the worst case, in which the most expensive candidates continue.

    Args:
        prices: one per candidate.
        epochs: number of epochs of a complete run.
        seeds: number of complete runs per remaining candidate.
        done: last epoch of the stages that are finished; 0 for none.
    """
    alive, total, before = sorted(prices, reverse=True), 0.0, done
    for stage in stages_of(epochs):
        if stage <= done:
            continue
        total += sum(price.start + price.epoch * (stage - before) for price in alive)
        if stage == epochs:
            total += (seeds - 1) * sum(price.start + price.epoch * epochs for price in alive)
        alive, before = alive[: staying(len(alive))], stage
    return total


def epochs_within(prices: Iterable[Price], budget: float, seeds: int) -> int:
    """Return the largest number of epochs within a budget in seconds, at least one."""
    known = list(prices)
    return max(n for n in range(1, MOST_EPOCHS + 1) if n == 1 or seconds(known, n, seeds) <= budget)
