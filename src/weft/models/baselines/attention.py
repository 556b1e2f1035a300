"""The last map of a grafted hybrid, for Grad-CAM; weft records no attention of timm's blocks."""

from __future__ import annotations

from weft.models.base import CamTarget
from weft.models.baselines.network import Grafted


def cam_target(model: Grafted) -> CamTarget:
    """Return the last map that reaches the class token; of a network without layers the last stage's."""
    if len(model.blocks) > 1:
        return CamTarget(model.blocks[-2], model.num_prefix, lambda args: model.grid)
    return CamTarget(model.proj if len(model.blocks) else model.stages[-1], 0, lambda args: model.grid)
