"""Find a learning rate by a sweep over training steps (`weft train --find-lr`)."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from weft.errors import DivergedError
from weft.progress import say
from weft.train.plan import Plan

SWEEP = (1e-7, 1.0)
SMOOTHING = 0.9
DIVERGED = 4.0  # times the lowest smoothed loss


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


def sweep_lr(plan: Plan, steps: int = 100) -> LrFinding:
    """Train the network of a plan as its run would, with a learning rate that grows from step to step.

    Args:
        plan: of the run; its network is changed.
        steps: number of steps, at least 1; fewer if the loss diverges.

    Raises:
        DivergedError: the loss of the first step is not finite.
    """
    plan.initialise(say)
    learner = plan.learner()
    low, high = SWEEP
    learner.lr_at = lambda step: low * (high / low) ** (step / max(steps - 1, 1))
    learner.set_train_mode()
    points: list[LrPoint] = []
    average, best = 0.0, math.inf
    for number, (parts, keys) in enumerate(itertools.islice(plan.all_steps(), steps)):
        result = learner.train_step(parts, keys)
        if not result.is_finite:
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


def _steepest(points: list[LrPoint]) -> float:
    """Return the rate of the steepest descent of the smoothed loss over log(rate), before its minimum."""
    end = min(range(len(points)), key=lambda i: points[i].smoothed)
    if end < 2:
        return points[end].lr / 10
    slopes = [points[i + 1].smoothed - points[i - 1].smoothed for i in range(1, end)]
    return points[1 + min(range(len(slopes)), key=lambda i: slopes[i])].lr
