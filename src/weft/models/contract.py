"""Functions for any classifier under timm's contract: mean of several heads, preprocessing, input size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.grid import Grid
from weft.models.building import MEAN, STD

DEFAULTS = dict(
    input_size=(3, 224, 224), interpolation="bicubic", mean=MEAN, std=STD, crop_pct=0.875, crop_mode="center"
)  # timm's


def mean_logits(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return logits (b classes); of a model with several heads, the mean over the heads."""
    return torch.stack(logits).mean(dim=0) if isinstance(logits, tuple) else logits


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """Return how images are prepared for a model, under timm's keys: `input_size`, `mean`, `std`, `crop_pct`, ..."""
    return data_config(getattr(model, "pretrained_cfg", {}))


def data_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing that a `pretrained_cfg` describes, with timm's defaults for what it leaves out."""
    return {key: cfg.get(key) or default for key, default in DEFAULTS.items()}


def resized(model: nn.Module, img_size: int | tuple[int, int]) -> nn.Module:
    """Set the input size of a model in place, also in its `pretrained_cfg`, and return the model.

    A network without positions, such as a ResNet, takes any size, and only `pretrained_cfg` changes.
    """
    size = Grid.of(img_size)
    if tuple(preprocessing(model)["input_size"][1:]) == tuple(size):
        return model
    network: Any = model  # torch types every attribute of a module as tensor or module
    if hasattr(network, "set_input_size"):
        network.set_input_size(tuple(size))
    network.pretrained_cfg = {**network.pretrained_cfg, "input_size": (network.pretrained_cfg["input_size"][0], *size)}
    return network
