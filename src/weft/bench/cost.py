"""Count parameters and multiply-adds of a network."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
        params: number of parameters.
        macs: multiply-adds of one image in evaluation: linear layers, convolutions and both products of attention;
            norms, activations, softmax and pooling are not counted.
    """

    params: int
    macs: int


def cost(model: nn.Module, img_size: int | tuple[int, int], in_chans: int = 3) -> Cost:
    """Counts on a copy without memory (meta device): nothing is computed, the model is not changed.

    Args:
        model: any image model.
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
    """
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    ghost = copy.deepcopy(model).to("meta").eval().requires_grad_(False)  # torch's counter asks inputs for gradients
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        ghost(torch.zeros(1, in_chans, height, width, device="meta"))
    return Cost(sum(parameter.numel() for parameter in ghost.parameters()), counter.get_total_flops() // 2)
