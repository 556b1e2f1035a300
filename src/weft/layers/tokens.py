"""Tokens (b n c) and maps (b c h w) are one memory layout seen two ways: turning one into the other copies nothing.

A map made from tokens is channels-last, which the convolution and BatchNorm kernels take as it is.
"""

from __future__ import annotations

import torch.fx
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

torch.fx.wrap("rearrange")  # einops reads shapes in Python: symbolic tracing keeps the call whole


def to_map(tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b c h w"]:
    """Lays `n = h * w` tokens out on their grid (height, width)."""
    return rearrange(tokens, "b (h w) c -> b c h w", h=grid[0], w=grid[1])


def to_tokens(fmap: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n c"]:
    """Reads a map row by row."""
    return rearrange(fmap, "b c h w -> b (h w) c")


def split_heads(tokens: Float[Tensor, "b n inner"], num_heads: int) -> Float[Tensor, "b heads n d"]:
    """Cuts the channels into `num_heads` equal, contiguous parts."""
    return rearrange(tokens, "b n (heads d) -> b heads n d", heads=num_heads)


def join_heads(parts: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b n inner"]:
    """Undoes `split_heads`."""
    return rearrange(parts, "b heads n d -> b n (heads d)")
