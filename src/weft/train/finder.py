"""Find a batch size that fits the machine, and a learning rate that fits the problem."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.data.loading.loader import ImageLoader
from weft.recipes import Recipe
from weft.train.build import build_model, preprocessing
from weft.train.loop import Batch, Learner, in_steps
from weft.train.runtime import Runtime

BATCH_SIZES = tuple(2**power for power in range(3, 13))
NEAR_BEST = 0.95  # of the fastest; a smaller batch learns more per image
PATIENCE_S = 10.0  # a step that takes longer is too long to try larger ones
SWEEP = (1e-7, 1.0)
SMOOTHING = 0.9
DIVERGED = 4.0  # times the best smoothed loss


def find_batch_size(recipe: Recipe, num_classes: int, num_images: int, runtime: Runtime) -> tuple[int, str]:
    """A number of images per step, all devices together.

    On a GPU the largest power of two that fits, on a CPU the smallest that is about as fast as any: there, larger ones
    gain nothing.

    Returns:
        The number, and a sentence that says how it came about.
    """
    parts = runtime.world * recipe.accumulate
    sizes = [size for size in BATCH_SIZES if size * parts <= num_images] or [max(num_images // parts, 1)]
    speeds: dict[int, float] = {}
    for size in sizes:
        seconds = _seconds_of_step(recipe, size, num_classes, runtime)
        seconds = max(runtime.gather(seconds))
        if math.isinf(seconds):
            break
        speeds[size] = size / seconds
        gains_nothing = size >= 4 * max(speeds, key=lambda known: speeds[known])
        if seconds > PATIENCE_S or (runtime.device.type == "cpu" and gains_nothing):
            break
    best = max(speeds.values(), default=0.0)
    fast = [size for size in speeds if speeds[size] >= NEAR_BEST * best] or sizes[:1]
    each = max(fast) if runtime.device.type == "cuda" else min(fast)
    why = "the largest that is fast and fits" if runtime.device.type == "cuda" else "about as fast as any"
    return each * parts, f"Batch size {each * parts}: {each} per device, {why}; another: --batch-size N."


def _seconds_of_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime) -> float:
    """Time of a step on random images; infinite where memory does not suffice."""
    try:
        trial = dataclasses.replace(recipe, batch_size=size * runtime.world * recipe.accumulate, pretrained=False)
        model = build_model(trial, num_classes).to(runtime.device)
        learner = Learner(model, dataclasses.replace(trial, compile=False), runtime, 10, 10, num_classes)
        learner.begin()
        shape = preprocessing(model)["input_size"]
        batch = (
            torch.randn(size, *shape, device=runtime.device),
            torch.zeros(size, dtype=torch.int64).to(runtime.device),
        )
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            learner.learn([batch] * recipe.accumulate)
            times.append((time.perf_counter() - begun) / recipe.accumulate)
        return min(times)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return math.inf


class LrPoint(NamedTuple):
    """One step of a sweep: its learning rate, its loss, and the loss smoothed over the steps before."""

    lr: float
    loss: float
    smoothed: float


class LrFinding(NamedTuple):
    """A sweep over learning rates, and what it suggests: where the smoothed loss fell the fastest (L. N. Smith, arXiv
    1506.01186, as fastai reads it)."""

    lr: float
    points: list[LrPoint]

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"lr": self.lr, "points": [point._asdict() for point in self.points]}


def sweep_lr(
    model: nn.Module, recipe: Recipe, batches: ImageLoader, runtime: Runtime, num_classes: int, steps: int = 100
) -> LrFinding:
    """Trains for some steps with a rate that grows from step to step, and looks where the loss falls.

    Args:
        model: on the runtime's device; it stays as it is, a copy is trained.
        recipe: everything but the learning rate.
        batches: training images.
        runtime: where.
        num_classes: of the data.
        steps: how many; it ends earlier once the loss explodes.
    """
    learner = Learner(copy.deepcopy(model), recipe, runtime, steps, steps, num_classes)
    low, high = SWEEP
    learner.rate = lambda step: low * (high / low) ** (step / max(steps - 1, 1))
    learner.begin()
    points: list[LrPoint] = []
    average, best = 0.0, math.inf
    for number, parts in enumerate(itertools.islice(_endless(batches, recipe, runtime), steps)):
        result = learner.learn(parts)
        if result.is_skipped:
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * result.loss
        smoothed = average / (1 - SMOOTHING ** (number + 1))
        points.append(LrPoint(learner.rate(number), result.loss, smoothed))
        best = min(best, smoothed)
        if smoothed > DIVERGED * best:
            break
    return LrFinding(_steepest(points), points)


def _endless(batches: ImageLoader, recipe: Recipe, runtime: Runtime) -> Iterator[list[Batch]]:
    order = batches.order
    for epoch in itertools.count():
        batches.start_at(epoch)
        keys_of = functools.partial(order.parts, epoch)
        for parts, _ in in_steps(batches, keys_of, 0, recipe.accumulate, runtime, lambda key: None):
            yield parts


def _steepest(points: list[LrPoint]) -> float:
    """The rate at which the smoothed loss falls the fastest over the logarithm of the rate, before its lowest point."""
    end = min(range(len(points)), key=lambda place: points[place].smoothed)
    if end < 2:
        return points[end].lr / 10
    slopes = [points[place + 1].smoothed - points[place - 1].smoothed for place in range(1, end)]
    return points[1 + min(range(len(slopes)), key=lambda place: slopes[place])].lr
