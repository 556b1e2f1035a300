"""Count parameters and multiply-adds of a network."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """Parameters and multiply-adds of a model.

    Attributes:
        params: number of parameters.
        macs: multiply-adds (MACs) per image in evaluation mode: of linear layers, convolutions and both matrix
            multiplications of attention; norms, activations, softmax and pooling are not counted.
    """

    params: int
    macs: int


def cost(model: nn.Module, img_size: int | tuple[int, int], in_chans: int = 3) -> Cost:
    """Count parameters and multiply-adds on a copy on the meta device, without computation; the model is unchanged.

    Args:
        model: any image model.
        img_size: input size in pixels, an int or (height, width).
        in_chans: number of input channels.
    """
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    # without gradients: torch's counter would otherwise also require them for the input
    twin = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        twin(torch.zeros(1, in_chans, height, width, device="meta"))
    return Cost(sum(parameter.numel() for parameter in twin.parameters()), counter.get_total_flops() // 2)
