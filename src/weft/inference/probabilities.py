"""Class probabilities and their order; the same for every verb, with and without torch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def softmax(logits: Float[np.ndarray, "n classes"], temperature: float = 1.0) -> Float[np.ndarray, "n classes"]:
    """Return the probabilities of classes in float32; computed in float64, so that a row does not depend on the others.

    Args:
        logits: of any float type.
        temperature: divisor of the logits, above 0.
    """
    scores = logits.astype(np.float64) / temperature
    with np.errstate(invalid="ignore"):  # of infinite logits, the probabilities are nan
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)


def ranked(probabilities: np.ndarray) -> np.ndarray:
    """Return class numbers along the last axis, most probable first; ties in the order of the classes."""
    return np.argsort(-probabilities, axis=-1, kind="stable")
