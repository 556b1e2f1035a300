"""Evaluations with given counts, for tests of reports and texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.inference.metrics import Evaluation


def evaluation_of(
    classes: Sequence[str], confusion: np.ndarray, mistaken: Sequence[str] = (), num_top5: int | None = None
) -> Evaluation:
    """Return an evaluation with this confusion matrix, a loss of 1, and confidences from 5 to 100 %.

    Args:
        classes: class names.
        confusion: (class, class) counts; rows are true classes.
        mistaken: names of the errors, the most confident first.
        num_top5: number of images whose true class is among the five most probable; None for all.
    """
    count = int(confusion.sum())
    cells = np.repeat(np.arange(confusion.size), confusion.ravel())
    true, predicted = cells // len(classes), cells % len(classes)
    wrong = np.flatnonzero(true != predicted)
    rank = (true != predicted).astype(int)
    if num_top5 is not None:
        rank[wrong[: count - num_top5]] = 5
    keys = [f"{number}.png" for number in range(count)]
    for place, key in zip(wrong[::-1], mistaken, strict=False):
        keys[place] = key
    confidence = np.linspace(0.05, 1, count)
    return Evaluation(list(classes), keys, np.arange(count), true, predicted, confidence, rank, np.ones(count))
