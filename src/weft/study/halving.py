"""Successive halving (arXiv 1502.07943): stages, and the number of epochs within a time budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data import Splits
from weft.errors import UsageError
from weft.models.families import SMALL_SIDE
from weft.progress import clock, say
from weft.recipes import Recipe

SHARES = (0.25, 0.5, 1.0)  # of the epochs; after each, the worse half of the candidates stops
MOST_EPOCHS = 10_000
START_S = 20.0  # of a training run besides its epochs: start of the process, reading the dataset, final evaluation
EVALUATION = 0.35  # time to evaluate an image, relative to a training step
MEASURING = 0.25  # share of a budget that is kept for measuring speed
TIMED_STEPS, TIMED_S = 3, 3.0  # steps that are timed, and the time after which no further one begins
CPU_BATCH = {"small": 64, "large": 8}  # images of a timed step on a CPU; both even, as mixup requires


@dataclass
class Budget:
    """Time of a comparison, in seconds.

    Attributes:
        total: limit; None for none.
        now: clock.
        before: time that earlier calls have used.
    """

    total: float | None
    now: Callable[[], float] = time.monotonic
    before: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def spent(self) -> float:
        """Time used so far."""
        return self.before + self.now() - self._began

    @property
    def left(self) -> float:
        """Time that is left."""
        return math.inf if self.total is None else self.total - self.spent

    @property
    def left_for_training(self) -> float:
        """Time that is left, less the share for measuring speed."""
        return math.inf if self.total is None else self.left - MEASURING * self.total


def seconds_per_image(recipe: Recipe, splits: Splits) -> float:
    """Train a network of random weights for a few steps, and return the seconds per training image.

    Args:
        recipe: complete, as `weft.train.decisions.fill_in` returns it, with batch size and precision.
        splits: the dataset.

    Raises:
        WeftError: the network cannot be trained with this recipe.
    """
    from weft.machine.runtime import Runtime
    from weft.train.plan import Plan
    from weft.train.timing import step_times

    runtime, size = Runtime.of(recipe.device, recipe.precision), recipe.batch_size
    assert isinstance(size, int)
    if runtime.device.type == "cpu":
        side = min(recipe.img_size) if isinstance(recipe.img_size, tuple) else recipe.img_size or SMALL_SIDE
        size = min(size, CPU_BATCH["small" if side < SMALL_SIDE else "large"])
    changes = {"batch_size": size, "accumulate": 1, "workers": 0, "pretrained": False, "start_from": None}
    plan = Plan(dataclasses.replace(recipe, compile=False, **changes), splits, runtime)
    steps = (step for epoch in itertools.count() for step in plan.training_steps(epoch))
    times = step_times(plan.learner(), steps)
    next(times)  # warms up
    timed = [next(times)]
    while len(timed) < TIMED_STEPS and np.sum(timed) <= TIMED_S:
        timed.append(next(times))
    waited, computed = np.mean(timed, axis=0) / size
    workers = 0 if recipe.workers == "auto" else recipe.workers
    return max(computed, waited / workers) if workers else computed + waited


def stages_of(epochs: int) -> list[int]:
    """Return the epochs after which the worse half of the candidates stops, and the last epoch."""
    return sorted({max(1, math.ceil(share * epochs)) for share in SHARES})


def staying(count: int) -> int:
    """Return how many of `count` candidates continue after a stage."""
    return min(count, max(2, math.ceil(count / 2)))


def training_seconds(epoch_seconds: Sequence[float], epochs: int, seeds: int, done: int = 0) -> float:
    """Estimate the time of the stages in the worst case, in which the most expensive candidates continue.

    Args:
        epoch_seconds: time of an epoch with its evaluation, of each candidate.
        epochs: number of epochs of a complete run.
        seeds: number of complete runs per remaining candidate.
        done: last epoch of the stages that are finished; 0 for none.
    """
    alive, total, before = sorted(epoch_seconds, reverse=True), 0.0, done
    for stage in (stage for stage in stages_of(epochs) if stage > done):
        total += sum(START_S + epoch * (stage - before) for epoch in alive)
        if stage == epochs:
            total += (seeds - 1) * sum(START_S + epoch * epochs for epoch in alive)
        alive, before = alive[: staying(len(alive))], stage
    return total


def epochs_within(epoch_seconds: Sequence[float], budget: float, seeds: int) -> int:
    """Return the largest number of epochs within a time in seconds, at least one."""
    fits = (n for n in range(MOST_EPOCHS, 1, -1) if training_seconds(epoch_seconds, n, seeds) <= budget)
    return next(fits, 1)


def plan_within(time: Budget, prices: Mapping[str, float], seeds: int) -> dict[str, Any]:
    """Return budget, epochs and stages of a comparison: the most epochs that the budget allows.

    Args:
        time: budget.
        prices: seconds of an epoch with its evaluation, by candidate.
        seeds: number of complete runs per remaining candidate.

    Raises:
        UsageError: the budget does not suffice for one epoch of each candidate.
    """
    assert time.total is not None
    if not prices:
        raise UsageError("None of the candidates could be trained.")
    seconds = list(prices.values())
    if (needed := training_seconds(seconds, 1, seeds)) > time.left_for_training:
        costliest = max(prices, key=prices.__getitem__)
        raise UsageError(
            "The budget must suffice for one epoch of every candidate, about"
            f" {time_text((time.spent + needed) / (1 - MEASURING))} here (an epoch of {costliest} takes"
            f" {time_text(prices[costliest])}); got {time_text(time.total)}. Raise --budget, or use fewer --models or"
            " --limit N."
        )
    epochs = epochs_within(seconds, time.left_for_training, seeds)
    stages = stages_of(epochs)
    say(
        f"Budget {time_text(time.total)}: {epochs} epochs"
        + (f", with halving after epochs {', '.join(map(str, stages[:-1]))}" if len(stages) > 1 else "")
        + f". {time_text(time.spent)} are used, {time_text(MEASURING * time.total)} are kept for measuring speed."
    )
    return {"budget": time.total, "epochs": epochs, "stages": stages}


def time_text(seconds: float) -> str:
    """Format a time."""
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)
