"""A strided convolution of an image, in the form that a GPU computes fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

GROUP = 8  # channels that Tensor Cores multiply together in 16 bits


class ImageConv(nn.Conv2d):
    """A convolution whose stride is at least 2; on a GPU in 16 bits it is computed by space-to-depth.

    The three channels of an image leave five of eight Tensor Core lanes idle, and cuDNN copies the image to fill them.
    With space-to-depth, the values of stride x stride pixels become the channels of one position, and the convolution
    of these positions has stride 1, a smaller kernel and the same outputs. On other devices it is a usual convolution.

    Args:
        conv: the convolution; its weights are shared.
    """

    deep_weight: Tensor  # of the convolution after space-to-depth, with padded channels: derived from `weight`

    def __init__(self, conv: nn.Conv2d) -> None:
        kernel_size, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        super().__init__(conv.in_channels, conv.out_channels, kernel_size, stride, padding, device="meta")
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel = -(-kernel_size // stride)  # of the convolution after space-to-depth
        self.more_chans = next(n for n in range(GROUP) if (conv.in_channels + n) * stride**2 % GROUP == 0)
        self.register_buffer("deep_weight", None, persistent=False)
        self.prepare()
        self.register_load_state_dict_post_hook(_prepare)

    def prepare(self) -> None:
        """Derive the weights of the convolution after space-to-depth."""
        stride = self.stride[0]
        wider = self.kernel * stride - self.kernel_size[0]
        weight = F.pad(self.weight.detach(), (0, wider, 0, wider, 0, self.more_chans))
        parts = weight.unflatten(3, (self.kernel, stride)).unflatten(2, (self.kernel, stride))
        self.deep_weight = parts.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).contiguous()

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """Return the convolution of images."""
        weight = self.deep_weight  # a symbolic trace knows device and dtype of buffers alone
        has_16_bits = weight.dtype.itemsize == 2 or (
            weight.dtype == torch.float32 and torch.is_autocast_enabled("cuda")
        )
        return self.by_space_to_depth(input) if weight.is_cuda and has_16_bits else super().forward(input)

    def by_space_to_depth(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """Return the convolution, computed by space-to-depth."""
        kernel_size, stride, padding = self.kernel_size[0], self.stride[0], int(self.padding[0])
        height, width = (
            ((side + 2 * padding - kernel_size) // stride + self.kernel) * stride for side in image.shape[-2:]
        )
        right, below = width - padding - image.shape[-1], height - padding - image.shape[-2]
        padded = F.pad(image, (padding, right, padding, below, 0, self.more_chans))
        parts = padded.unflatten(3, (-1, stride)).unflatten(2, (-1, stride))
        positions = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).permute(0, 3, 1, 2)  # b (c sy sx) y x, channels last
        return F.conv2d(positions, self.deep_weight, self.bias)


def _prepare(module: ImageConv, _: object) -> None:
    module.prepare()


def faster_on_gpus(conv: nn.Conv2d) -> nn.Conv2d:
    """Return an `ImageConv` for a square, strided convolution of few channels without dilation; else `conv` itself."""
    is_square = len({*conv.kernel_size}) == len({*conv.stride}) == len({*map(str, conv.padding)}) == 1
    is_plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    has_few = conv.in_channels < GROUP and conv.stride[0] > 1 and conv.kernel_size[0] >= conv.stride[0]
    return ImageConv(conv) if is_square and is_plain and has_few and conv.padding != "valid" else conv
