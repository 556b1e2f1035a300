"""From a trained network to what answers: folded, and in time exported, checked against what it was made of."""

from weft.deploy.fold import fold

__all__ = ["fold"]
