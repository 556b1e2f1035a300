"""Find a learning rate by a sweep over training steps (`weft train --find-lr`)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from weft.data.loading.loader import ImageLoader
from weft.errors import DivergedError, UsageError
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.loop import Batch, Learner, group_into_steps
from weft.train.network import load_start_weights
from weft.train.plan import leaves_batch_size, load_plan_recipe, make_plan

SWEEP = (1e-7, 1.0)
SMOOTHING = 0.9
DIVERGED = 4.0  # times the lowest smoothed loss


def find_lr(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: int = 100,
    quiet: bool = False,
    **given: Any,
) -> LrFinding:
    """Try learning rates from 1e-7 to 1 on the training images, and suggest one. Writes no files.

    Args:
        data, model, recipe, settings, quiet: as in `train`.
        steps: number of rates to try.
        given: other arguments of `train` that are settings, such as `batch_size`.

    Raises:
        UsageError, DataError, CheckpointError: as in `train`.
    """
    loaded = load_plan_recipe(data, recipe, settings, {"model": model, **given}, "--find-lr")
    loaded = dataclasses.replace(loaded, distill=dataclasses.replace(loaded.distill, teacher=None))
    is_open = leaves_batch_size(data, recipe, settings, given)
    plan = make_plan(loaded, Runtime.of(loaded.device, loaded.precision), quiet=quiet, fit_batch_size=is_open)
    if plan.recipe.start_from is not None:
        load_start_weights(plan.network, plan.recipe.start_from, plan.splits.classes)
    return sweep_lr(plan.network, plan.recipe, plan.batches, plan.runtime, len(plan.splits.classes), steps)


class LrPoint(NamedTuple):
    """One step of a sweep: learning rate, loss, and loss smoothed over the previous steps."""

    lr: float
    loss: float
    smoothed: float


class LrFinding(NamedTuple):
    """Result of a sweep over learning rates, and the suggested one: where the smoothed loss fell the fastest.

    The range test of L. N. Smith (arXiv 1506.01186), evaluated as in fastai.
    """

    lr: float
    points: list[LrPoint]

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {"lr": self.lr, "points": [point._asdict() for point in self.points]}


def sweep_lr(
    model: nn.Module, recipe: Recipe, batches: ImageLoader, runtime: Runtime, num_classes: int, steps: int = 100
) -> LrFinding:
    """Train a copy of a model with a learning rate that grows from step to step.

    Args:
        model: on the device of the runtime; not changed.
        recipe: all settings; its learning rate is not used.
        batches: training images.
        runtime: device and precision.
        num_classes: number of classes of the dataset.
        steps: number of steps, at least 1; fewer if the loss diverges.

    Raises:
        DivergedError: the loss of the first step is not finite.
    """
    if steps < 1:
        raise UsageError(f"steps must be at least 1; got {steps}.")
    learner = Learner(copy.deepcopy(model), recipe, runtime, steps, steps, num_classes, batches.dataset.source.labels)
    low, high = SWEEP
    learner.lr_at = lambda step: low * (high / low) ** (step / max(steps - 1, 1))
    learner.set_train_mode()
    points: list[LrPoint] = []
    average, best = 0.0, math.inf
    for number, parts in enumerate(itertools.islice(_endless(batches, recipe, runtime), steps)):
        result = learner.train_step(parts)
        if result.is_skipped:
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * result.loss
        smoothed = average / (1 - SMOOTHING ** (number + 1))
        points.append(LrPoint(learner.lr_at(number), result.loss, smoothed))
        best = min(best, smoothed)
        if smoothed > DIVERGED * best:
            break
    if not points:
        raise DivergedError(
            "The loss of the first step must be finite to find a learning rate; it is not. Check the weights to start"
            " from, and use --precision fp32."
        )
    return LrFinding(_steepest(points), points)


def _endless(batches: ImageLoader, recipe: Recipe, runtime: Runtime) -> Iterator[list[Batch]]:
    order = batches.order
    for epoch in itertools.count():
        batches.start_at(epoch)
        keys_of = functools.partial(order.parts, epoch)
        for parts, _ in group_into_steps(batches, keys_of, 0, recipe.accumulate, runtime, lambda key: None):
            yield parts


def _steepest(points: list[LrPoint]) -> float:
    """Return the rate of the steepest descent of the smoothed loss over log(rate), before its minimum."""
    end = min(range(len(points)), key=lambda i: points[i].smoothed)
    if end < 2:
        return points[end].lr / 10
    slopes = [points[i + 1].smoothed - points[i - 1].smoothed for i in range(1, end)]
    return points[1 + min(range(len(slopes)), key=lambda i: slopes[i])].lr
