"""Metrics of a training step, and of an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Count = Annotated[int, Field(ge=0, le=1 << 48)]
"""A number, with the limits that pydantic checks in a saved state."""


class StepResult(NamedTuple):
    """Result of one step over all micro-batches and processes.

    Attributes:
        loss_sum: sum of the loss over the images, in nats.
        hits: number of correct predictions.
        images: number of images.
        grad_norm: gradient norm before clipping.
    """

    loss_sum: float
    hits: float
    images: int
    grad_norm: float

    @property
    def loss(self) -> float:
        """Mean loss per image in nats."""
        return self.loss_sum / self.images

    @property
    def is_finite(self) -> bool:
        """Whether the step changed the weights: loss and gradient were finite."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


@dataclass
class Meter:
    """Running metrics of one epoch.

    Attributes:
        step: number of completed steps of the epoch.
        steps: total number of steps of the epoch.
        count: number of images.
        loss_sum: sum of the loss over these images, in nats.
        hits: number of correct predictions on these augmented images; for a mixed image, its largest class counts.
        seconds: time since the start of the epoch, or since the run was resumed within it.
        waiting: part of `seconds` spent waiting for data.
        seen: number of images in `seconds`.
    """

    step: Count = 0
    steps: Count = 0
    count: Count = 0
    loss_sum: float = 0.0
    hits: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    seen: Count = 0

    @property
    def loss(self) -> float:
        """Mean loss per image in nats."""
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.hits / self.count if self.count else math.nan

    @property
    def images_per_second(self) -> float:
        """Throughput of all processes together."""
        return self.seen / self.seconds if self.seconds else 0.0

    @property
    def waiting_percent(self) -> float:
        """Percentage of the time spent waiting for data."""
        return 100 * self.waiting / self.seconds if self.seconds else 0.0

    def add(self, result: StepResult) -> None:
        """Add the result of a step."""
        self.step += 1
        self.seen += result.images
        self.count += result.images
        self.loss_sum += result.loss_sum
        self.hits += result.hits
