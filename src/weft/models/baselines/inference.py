"""Grafted hybrids in their form for inference: rules of folding, by module type, and the last map for Grad-CAM."""

from __future__ import annotations

from typing import cast

from timm.models.resnet import Bottleneck
from torch import nn

from weft.layers.norm import absorb
from weft.models.base import CamTarget
from weft.models.baselines.network import Grafted


def fold_bottleneck(block: Bottleneck) -> nn.Module:
    """Merge each BatchNorm into the convolution before it."""
    for i in (1, 2, 3):
        conv, norm = block.get_submodule(f"conv{i}"), block.get_submodule(f"bn{i}")
        setattr(block, f"conv{i}", absorb(cast("nn.Conv2d", conv), norm))
        setattr(block, f"bn{i}", nn.Identity())
    return block


def fold_heads(model: Grafted) -> nn.Module:
    """Return the mean of the two heads also in training mode. They read two tokens, so both stay."""
    model.distilled_training = False
    return model


RULES = {Bottleneck: fold_bottleneck, Grafted: fold_heads}


def cam_target(model: Grafted) -> CamTarget:
    """Return the last map that reaches the class token; of a network without layers the last stage's."""
    if len(model.blocks) > 1:
        return CamTarget(model.blocks[-2], model.num_prefix, lambda args: model.grid)
    return CamTarget(model.proj if len(model.blocks) else model.stages[-1], 0, lambda args: model.grid)
