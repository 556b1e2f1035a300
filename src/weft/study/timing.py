"""Time of a training step of a candidate, from a few steps in this process."""

from __future__ import annotations

import dataclasses
import itertools
import time

import torch

from weft.data import Splits
from weft.memory import release_memory
from weft.models.families import SMALL_SIDE
from weft.progress import quietly
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.plan import Plan, open_splits

BATCH_SIZES = {"small": 64, "large": 8}  # on a CPU, both even, as mixup requires
STEPS, SECONDS = 3, 3.0  # steps that are timed, and the time after which no further one begins


def seconds_per_image(recipe: Recipe, splits: Splits | None, threads: int) -> float:
    """Train a network of random weights for a few steps, and return the seconds per training image.

    Args:
        recipe: complete, as `weft.train.decisions.fill_in` returns it, with batch size and precision.
        splits: the dataset; None to read a part of it.
        threads: CPU threads of a training run.

    Raises:
        WeftError: the network cannot be trained with this recipe.
    """
    assert isinstance(recipe.batch_size, int)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runtime = Runtime.of(recipe.device, recipe.precision)
        size = recipe.batch_size
        if runtime.device.type == "cpu":
            side = min(recipe.img_size) if isinstance(recipe.img_size, tuple) else recipe.img_size or SMALL_SIDE
            size = min(size, BATCH_SIZES["small" if side < SMALL_SIDE else "large"])
        small = dataclasses.replace(
            recipe, batch_size=size, accumulate=1, workers=0, pretrained=False, start_from=None, compile=False
        )
        if splits is None:
            limited = dataclasses.replace(small.data, limit=min(small.data.limit or 2 * size, 2 * size))
            with quietly():
                splits = open_splits(dataclasses.replace(small, data=limited))
        plan = Plan(dataclasses.replace(small, precision=runtime.precision), splits, runtime)
        waited, computed = _time_steps(plan)
        return max(computed, waited / recipe.workers) if recipe.workers else computed + waited
    finally:
        torch.set_num_threads(before)
        release_memory()


def _time_steps(plan: Plan) -> tuple[float, float]:
    """Return, per image, the seconds of waiting for data and the seconds of a step; the first step warms up."""
    learner, order = plan.learner(), plan.batches.order
    learner.set_train_mode()
    times, start = list[tuple[float, float]](), time.perf_counter()
    for epoch in itertools.count():
        for parts, keys in plan.training_steps(epoch):
            ready = time.perf_counter()
            learner.train_step(parts, keys)
            now = time.perf_counter()
            times.append((ready - start, now - ready))
            if len(times) > STEPS or (len(times) > 1 and sum(map(sum, times[1:])) > SECONDS):
                waits, steps = zip(*times[1:], strict=True)
                return sum(waits) / len(waits) / order.batch_size, sum(steps) / len(steps) / order.batch_size
            start = time.perf_counter()
    raise AssertionError("epochs have no end")
