"""Tokens (b n c) and maps (b c h w): two views of the same memory; converting one into the other copies nothing.

A map made from tokens is channels-last, which the convolution and BatchNorm kernels accept directly. Plain torch calls
instead of einops: the same views, also in `torch.fx`, with less Python time in small batches.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def to_map(tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b c h w"]:
    """Lay `n = h * w` tokens out on their grid (height, width): b (h w) c -> b c h w."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(fmap: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n c"]:
    """Read a map row by row: b c h w -> b (h w) c."""
    return fmap.permute(0, 2, 3, 1).flatten(1, 2)


def split_heads(tokens: Float[Tensor, "b n inner"], num_heads: int) -> Float[Tensor, "b heads n d"]:
    """Cut the channels into `num_heads` equal, contiguous parts: b n (heads d) -> b heads n d."""
    return tokens.unflatten(2, (num_heads, -1)).transpose(1, 2)


def join_heads(parts: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b n inner"]:
    """Undo `split_heads`: b heads n d -> b n (heads d)."""
    return parts.transpose(1, 2).flatten(2)
