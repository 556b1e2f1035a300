"""Functions for any classifier under timm's contract: mean of several heads, preprocessing, input size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.grid import Grid
from weft.models.data_config import data_config as data_config
from weft.models.data_config import preprocessing as preprocessing


def mean_logits(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return logits (b classes); of a model with several heads, the mean over the heads."""
    return torch.stack(logits).mean(dim=0) if isinstance(logits, tuple) else logits


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the `with` block; afterwards every module has its own mode again."""
    modes = [module.training for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode


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
