"""Grafted hybrids in their form for inference: rules of folding, by module type."""

from __future__ import annotations

from typing import cast

from timm.models.resnet import Bottleneck
from torch import nn

from weft.layers.norm import absorb
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
