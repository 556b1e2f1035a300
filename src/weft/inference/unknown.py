"""Scores of images by the detector of unknown images, and its threshold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float

from weft.checkpoints.unknown import Threshold
from weft.data.preprocessing import Pixels
from weft.inference.arguments import image_files, none_readable
from weft.inference.prediction import prepared_batches
from weft.inference.predictor import Predictor

KNOWN_SHARE = 0.95  # of the held-out images are not unknown, unless images of no class set the threshold


def scores_of_files(
    predictor: Predictor, images: str | Path, batch_size: int, on_batch: Callable[[int], None] = lambda count: None
) -> Float[np.ndarray, " images"]:
    """Return the scores of image files; those that cannot be read are left out.

    Raises:
        DataError: no image can be read.
        UsageError: the model has no detector.
    """
    paths, scores = image_files(images), []
    for batch in prepared_batches(predictor, paths, batch_size):
        if usable := [item for _, item in batch if isinstance(item, Pixels)]:
            scores.append(predictor.scores(predictor.array(usable)))
        on_batch(len(batch))
    if not scores:
        raise none_readable(images)
    return np.concatenate(scores)


def compare_scores(
    known: Float[np.ndarray, " images"], other: Float[np.ndarray, " images"] | None, value: float
) -> Threshold:
    """Count the images below a threshold.

    Args:
        known: scores of images of the classes; at least one.
        other: scores of images that show none of them; at least one, or None.
        value: the threshold.
    """
    if other is None:
        return Threshold(value, len(known), int((known < value).sum()))
    from sklearn.metrics import roc_auc_score  # takes seconds to import

    return Threshold(
        value,
        count=len(known),
        unknown=int((known < value).sum()),
        other_count=len(other),
        other_unknown=int((other < value).sum()),
        auroc=float(roc_auc_score(_is_known(known, other), np.r_[known, other])),
    )


def set_threshold(known: Float[np.ndarray, " images"], other: Float[np.ndarray, " images"] | None = None) -> Threshold:
    """Set the threshold by the scores of held-out images and of images that show none of the classes.

    With the latter, the threshold has the highest sum of the share of held-out images at or above it and of the share
    of other images below it (Youden's index). Without them, at most 5 % of the held-out images are below it.

    Args:
        known, other: as in `compare_scores`.
    """
    if other is None:
        value = _between(float(np.quantile(known, 1 - KNOWN_SHARE, method="lower")), known)
    else:
        from sklearn.metrics import roc_curve  # takes seconds to import

        false, true, thresholds = roc_curve(_is_known(known, other), np.r_[known, other])
        value = float(thresholds[1:][int(np.argmax((true - false)[1:]))])  # the first is infinite
        value = _between(value, np.r_[known, other])
    return compare_scores(known, other, value)


def _is_known(known: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.r_[np.ones(len(known)), np.zeros(len(other))]


def _between(value: float, scores: np.ndarray) -> float:
    """Return the mean of a score and the next lower one, which no rounding of an export reaches."""
    lower = scores[scores < value]
    return (value + float(lower.max())) / 2 if len(lower) else value
