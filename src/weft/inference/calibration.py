"""Calibration of probabilities on held-out images: temperature scaling, and errors by confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import fminbound
from scipy.special import log_softmax, softmax

from weft.checkpoints.confidence import Confidence, Point, confidence_of
from weft.checkpoints.unknown import detector_of
from weft.inference.scores import calibration_error

MAX_IMAGES = 5_000  # held-out images that the calibration uses
MAX_POINTS = 1_000  # of the curve in config.json
LIMITS = (0.05, 20.0)  # of the temperature
PRIOR = 0.5  # standard deviation of the log temperature before any image is seen: few images move it little
SQUARED_FROM = 500  # held-out images from which the squared error decides (benchmarks/few-images/calibration_sizes.csv)
FOLDS = 5


def calibrate(logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n"]) -> Confidence:
    """Measure the confidence of a model on held-out images.

    Args:
        logits: of at least one image.
        labels: class indices.
    """
    logits = logits.astype(np.float64)
    squared = len(labels) >= SQUARED_FROM
    temperature = fit_temperature(logits, labels, squared)
    # by folds, so that the error is that of images which the temperature does not know
    fold = np.arange(len(labels)) % FOLDS
    cross = np.ones(len(labels))
    for number in range(FOLDS):
        known = fold != number
        cross[~known] = fit_temperature(logits[known], labels[known], squared)
    sure, right = _predictions(softmax(logits / temperature, axis=1), labels)
    return Confidence(
        temperature=temperature,
        count=len(labels),
        ece_before=calibration_error(*_predictions(softmax(logits, axis=1), labels)),
        ece_after=calibration_error(*_predictions(softmax(logits / cross[:, None], axis=1), labels)),
        curve=_curve(sure, right),
    )


def calibration_lines(model: Any) -> list[tuple[str, str]]:
    """Return (name, value) lines: the calibration of a loaded model, and the threshold of its detector."""
    lines, confidence, detector = [], confidence_of(model), detector_of(model)
    if confidence is not None:
        before, after = confidence.ece_before, confidence.ece_after
        value = f"temperature {confidence.temperature:.2f}; expected calibration error {before:.1f} points before"
        lines.append(("calibration", f"{value}, {after:.1f} after (cross-validated)"))
    if detector is not None and (threshold := detector.threshold) is not None:
        lines.append(("images of no class", f"threshold {threshold.value:.2f}; {threshold}"))
    return lines


def fit_temperature(
    logits: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n"], squared: bool = False
) -> float:
    """Return the temperature of the least error of the probabilities, near 1 for very few images.

    The temperature has a log-normal prior around 1, whose weight is that of a few images. Without images it is 1.

    Args:
        logits: of any number of images.
        labels: class indices.
        squared: the error is the squared error of the probabilities of all classes (Brier score), to which no image
            adds more than 2, instead of the cross-entropy.
    """
    if len(labels) == 0:
        return 1.0
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        scores = log_softmax(logits / np.exp(log_temperature), axis=1)
        if squared:
            probabilities = np.exp(scores, out=scores)
            of_labels = probabilities[rows, labels].sum()
            error = np.square(probabilities, out=probabilities).sum() - 2 * of_labels + len(labels)
        else:
            error = -scores[rows, labels].sum()
        return float(error + log_temperature**2 / (2 * PRIOR**2))

    low, high = np.log(LIMITS)
    return float(np.exp(fminbound(loss, low, high)))


def _predictions(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each predicted class, and whether it is correct."""
    predicted = probabilities.argmax(axis=1)
    return probabilities[np.arange(len(labels)), predicted], predicted == labels


def _curve(sure: np.ndarray, right: np.ndarray) -> list[Point]:
    """Return accepted images and errors by threshold; images of equal probability are accepted together."""
    order = np.argsort(-sure, kind="stable")
    sure, errors = sure[order], np.cumsum(~right[order])
    ends = np.flatnonzero(np.r_[sure[1:] != sure[:-1], True])
    if len(ends) > MAX_POINTS:
        ends = ends[np.linspace(0, len(ends) - 1, MAX_POINTS).round().astype(int)]
    # A probability is rounded down, so that its own image is accepted.
    return [(float(np.floor(sure[end] * 1e6) / 1e6), int(end + 1), int(errors[end])) for end in ends]
