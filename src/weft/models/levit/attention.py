"""Locate the attention layers and the last feature map of a LeViT, for attention maps and Grad-CAM."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace
from weft.models.base import CamTarget
from weft.models.levit.network import BiasedAttention, LeViT


def attention(model: LeViT, weights: Sequence[Tensor], img_size: Grid) -> AttentionTrace:
    """Return the layers of one forward pass; shrinking attention has no residual and larger keys."""
    layers: list[AttentionLayer] = []
    for i, stage in enumerate(model.stages):
        modules = [module for module in stage.modules() if isinstance(module, BiasedAttention)]
        for j, module in enumerate(modules):
            shrinks = module.stride > 1
            keys = model.grids[i - 1] if shrinks else model.grids[i]
            level = f"stages.{i}" if j == len(modules) - 1 else ""
            layers.append(AttentionLayer(weights[len(layers)], model.grids[i], keys, 0, not shrinks, level))
    return AttentionTrace(layers)


def cam_target(model: LeViT) -> CamTarget:
    """Return the map of the last stage."""
    return CamTarget(model.stages[-1], 0, lambda args: model.grids[-1])
