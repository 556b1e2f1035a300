"""Classify images by the labelled images with the most similar features (arXiv 1805.01978)."""

from __future__ import annotations

import numpy as np

from weft.checkpoints.unknown import unit_length

TEMPERATURE = 0.07  # of the votes


def votes(known: np.ndarray, labels: np.ndarray, queries: np.ndarray, classes: int, k: int) -> np.ndarray:
    """Return the votes (queries classes) of the k images with the highest cosine similarity s, of weight exp(s / 0.07).

    Args:
        known, queries: features (images features).
        labels: class indices of the known images.
        classes, k: number of classes and of neighbours.
    """
    similarity = unit_length(queries) @ unit_length(known).T
    places = np.argsort(-similarity, axis=1)[:, :k]
    weights = np.exp(np.take_along_axis(similarity, places, 1) / TEMPERATURE)
    return (weights[:, :, None] * np.eye(classes)[labels[places]]).sum(1)
