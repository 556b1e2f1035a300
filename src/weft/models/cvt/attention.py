"""Locate the attention layers and the last feature map of a CvT, for attention maps and Grad-CAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace
from weft.models.base import CamTarget
from weft.models.cvt.network import CvT


def attention(model: CvT, weights: Sequence[Tensor], img_size: Grid) -> AttentionTrace:
    """Return the layers of one forward pass; stages are joined by convolutions, so rollout stays within the last."""
    layers: list[AttentionLayer] = []
    grid, stages = img_size, model.stages
    for i, stage in enumerate(stages):
        module: Any = stage
        grid = module.patch_embed.grid(grid)
        for j, block in enumerate(module.blocks):
            keys = grid
            if block.attn.conv_k is not None:
                conv = block.attn.conv_k.conv
                keys = grid.conv(conv.kernel_size[0], conv.stride[0], conv.padding[0])
            level = f"stages.{i}" if j == len(module.blocks) - 1 else ""
            weight = weights[len(layers)]
            layers.append(AttentionLayer(weight, grid, keys, block.attn.num_prefix, True, level, joins=j > 0))
    return AttentionTrace(layers)


def cam_target(model: CvT) -> CamTarget:
    """Return the last map that reaches the class token: that of the block before the last."""
    stage: Any = model.stages[-1]
    if len(stage.blocks) > 1:
        return CamTarget(stage.blocks[-2], model.num_prefix, lambda args: args[1])
    return CamTarget(stage.patch_embed, 0, lambda args: stage.patch_embed.grid(Grid(*args[0].shape[-2:])))
