"""Locate the attention layers and the last feature map of a CeiT, for attention maps and Grad-CAM."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace
from weft.models.base import CamTarget
from weft.models.ceit.network import CeiT


def attention(model: CeiT, weights: Sequence[Tensor], img_size: Grid) -> AttentionTrace:
    """Return the layers of one forward pass; the weights of LCA, computed last, are the shares of the layers."""
    *blocks, lca = weights if model.lca is not None else (*weights, None)
    ends = {(i + 1) * len(blocks) // 4 - 1 for i in range(4)}  # a column has no stages: levels end with its quarters
    layers = [
        AttentionLayer(weight, model.grid, model.grid, 1, True, f"blocks.{i}" if i in ends else "")
        for i, weight in enumerate(blocks)
    ]
    return AttentionTrace(layers, None if lca is None else lca[:, 0])


def cam_target(model: CeiT) -> CamTarget:
    """Return the last map that reaches the class token: that of the block before the last."""
    if len(model.blocks) > 1:
        return CamTarget(model.blocks[-2], 1, lambda args: model.grid)
    return CamTarget(model.patch_embed, 0, lambda args: model.grid)
