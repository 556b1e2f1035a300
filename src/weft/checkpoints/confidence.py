"""Confidence of a model: the temperature of its probabilities, and the threshold below which it rejects an image.

Both were measured on held-out images, and are part of the model's config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from weft.errors import UsageError
from weft.report.intervals import Estimate, accuracy_of

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


def _with_possible_errors(point: tuple[float, int, int]) -> tuple[float, int, int]:
    if point[2] > point[1]:
        raise ValueError(f"at most {point[1]} of {point[1]} accepted images can be errors")
    return point


Point = Annotated[tuple[Share, Annotated[int, Field(ge=1)], Count], AfterValidator(_with_possible_errors)]


@dataclass(frozen=True)
class Rejection:
    """Threshold of confidence below which predictions are rejected, and its effect on the held-out images.

    Attributes:
        threshold: smallest accepted probability of the predicted class.
        accepted: number of held-out images at or above it.
        errors: number of errors among them.
        count: number of held-out images.
    """

    threshold: float
    accepted: int
    errors: int
    count: int

    @property
    def error(self) -> Estimate:
        """Share of errors among accepted images in percent, with its 95 % confidence interval."""
        right = accuracy_of(self.accepted - self.errors, self.accepted)
        return Estimate(100 - right.value, 100 - right.high, 100 - right.low)

    def __str__(self) -> str:
        """Describe the threshold and what the held-out images can show."""
        return (
            f"Predictions with a probability below {self.threshold:.3f} are rejected: of {self.count:,} held-out images"
            f" {self.accepted:,} are accepted, {self.errors:,} of them wrongly classified (at most"
            f" {self.error.high:.1f} % by the 95 % interval)."
        )


@dataclass(frozen=True)
class Confidence:
    """Calibration of a model on held-out images.

    Attributes:
        temperature: divisor of the logits (arXiv 1706.04599); 1 changes nothing.
        count: number of held-out images.
        ece_before, ece_after: expected calibration error in percentage points without and with the temperature; the
            latter is measured on images that its temperature was not fitted to.
        curve: (probability, accepted images, errors among them) of the held-out images, most probable first: accepted
            images have at least this probability.
    """

    temperature: Annotated[float, Field(ge=1e-3, le=1000)]
    count: Count
    ece_before: Annotated[float, Field(ge=0, le=100)]
    ece_after: Annotated[float, Field(ge=0, le=100)]
    curve: list[Point] = field(default_factory=list)

    def rejection(self, error: float) -> Rejection:
        """Return the threshold with the most accepted images at an error of at most `error`.

        Args:
            error: share of errors among accepted images, from 0 to 1.

        Raises:
            UsageError: even the most confident predictions have more errors.
        """
        fitting = [point for point in self.curve if point[2] <= error * point[1]]
        if not fitting:
            least = min((errors / accepted for _, accepted, errors in self.curve), default=1.0)
            raise UsageError(
                f"--reject-at-error must be an error that a part of the {self.count:,} held-out images reaches; got"
                f" {100 * error:g} %, and the most confident part has {100 * least:.1f} %. Pass at least that, or train"
                " on more images."
            )
        threshold, accepted, errors = max(fitting, key=lambda point: point[1])
        return Rejection(threshold, accepted, errors, self.count)


def confidence_of(model: Any) -> Confidence | None:
    """Return the confidence of a loaded model or export; None if it was not measured."""
    return getattr(model, "confidence", None)
