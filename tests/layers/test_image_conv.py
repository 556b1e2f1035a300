"""The convolution of an image by space-to-depth is the same convolution."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.layers.image_conv import ImageConv, faster_on_gpus


@pytest.mark.parametrize(
    ("chans", "kernel_size", "stride", "padding"),
    [(3, 7, 2, 3), (3, 3, 2, 1), (3, 7, 4, 2), (3, 16, 16, 0), (1, 5, 3, 2), (4, 4, 2, 0), (3, 8, 3, 0)],
)
@pytest.mark.parametrize("size", [(32, 32), (33, 46), (47, 31)])
def test_space_to_depth_gives_the_same(chans, kernel_size, stride, padding, size):
    torch.manual_seed(0)
    conv = nn.Conv2d(chans, 6, kernel_size, stride, padding).double()
    image = torch.randn(2, chans, *size, dtype=torch.float64)
    prepared = faster_on_gpus(conv)
    assert isinstance(prepared, ImageConv)
    assert prepared.deep_weight.shape[1] % 8 == 0
    torch.testing.assert_close(prepared.by_space_to_depth(image), conv(image), rtol=0, atol=1e-12)
    assert torch.equal(prepared(image), conv(image))  # on a CPU
    assert prepared.by_space_to_depth(image).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 3, 1, 1),
        nn.Conv2d(64, 4, 3, 2, 1),
        nn.Conv2d(4, 4, 3, 2, 1, groups=2),
        nn.Conv2d(3, 4, 3, 2, 1, dilation=2),
        nn.Conv2d(3, 4, (3, 5), 2, 1),
        nn.Conv2d(3, 4, 3, 2, 1, padding_mode="reflect"),
        nn.Conv2d(3, 4, 2, 3),
    ],
)
def test_other_convolutions_stay(conv):
    assert faster_on_gpus(conv) is conv
