"""Learned positions: resized to another grid (on an equal grid the values are unchanged), and looked up by offset."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.errors import CheckpointError
from weft.grid import Grid
from weft.layers.tokens import to_map, to_tokens


def resize_positions(positions: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resize learned positions: an embedding (1 n c) of tokens, or a table (heads n) over offsets of tokens."""
    return (resize_offsets if positions.ndim == 2 else resize_embedding)(positions, old, new)


def resize_embedding(embed: Float[Tensor, "1 n c"], old: Grid, new: Grid) -> Float[Tensor, "1 m c"]:
    """Resize a learned position embedding bicubically; of prefix tokens, first in the sequence, it is unchanged."""
    if old == new:
        return embed
    prefix, tokens = embed.tensor_split([embed.shape[1] - old.tokens], dim=1)
    fmap = F.interpolate(to_map(tokens.float(), old).contiguous(), size=tuple(new), mode="bicubic")
    return torch.cat([prefix, to_tokens(fmap).to(embed.dtype)], dim=1)


def guess_grid(num_tokens: int, what: str) -> Grid:
    """Return the square grid of `num_tokens`: a state dict does not say its height and width.

    Raises:
        CheckpointError: `num_tokens` is not a square.
    """
    side = math.isqrt(max(num_tokens, 0))
    if side == 0 or side * side != num_tokens:
        raise CheckpointError(
            f"{what} must hold positions of a square grid to be resized; got {num_tokens}, which is no square. "
            "Build the model at the image size of the weights, load them, then call set_input_size."
        )
    return Grid(side, side)


def offset_index(queries: Grid, keys: Grid, stride: int) -> Int[Tensor, "n m"]:
    """Return the index of each (query, key) pair in a bias table over |dy|, |dx|.

    Query (y, x) sits on key (stride * y, stride * x). The table has one entry per position of the key grid, read row by
    row: entry |dy| * width + |dx|, so entry 0 is the pair of one and the same place.
    """
    rows = (stride * torch.arange(queries.height)[:, None] - torch.arange(keys.height)).abs()
    columns = (stride * torch.arange(queries.width)[:, None] - torch.arange(keys.width)).abs()
    index = rows[:, None, :, None] * keys.width + columns[None, :, None, :]
    return index.reshape(queries.tokens, keys.tokens)


def resize_offsets(table: Float[Tensor, "heads n"], old: Grid, new: Grid) -> Float[Tensor, "heads m"]:
    """Resize a bias table over |dy|, |dx| bicubically.

    The corners are aligned: offset 0 stays offset 0, bit for bit, and the largest offset stays the largest.
    """
    if old == new:
        return table
    values = table.detach() if table.is_meta else table.detach().cpu()  # not every device has float64
    fmap = values.double().reshape(1, -1, *old)
    resized = F.interpolate(fmap, size=tuple(new), mode="bicubic", align_corners=True)
    resized[..., 0, 0] = fmap[..., 0, 0]
    return resized.reshape(-1, new.tokens).to(table)


class OffsetLookup:
    """Biases of all (query, key) pairs from a table over |dy|, |dx|: `table[:, offsets]`.

    Without gradients on a CPU, the biases are kept until the table changes: a lookup takes longer than a comparison of
    the table, which notices every change. (On a GPU it would wait for the kernels before it.) Copies of a network start
    without kept biases.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, table: Float[Tensor, "heads places"], offsets: Int[Tensor, "n m"]) -> Float[Tensor, "heads n m"]:
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or type(table) is not nn.Parameter
        if is_traced or torch.is_grad_enabled() or table.device.type != "cpu":
            return table[:, offsets]
        if self._last is not None:
            last_table, last_offsets, biases = self._last
            is_same_kind = last_offsets is offsets and last_table.dtype == table.dtype
            is_same_mode = biases.is_inference() == torch.is_inference_mode_enabled()
            if is_same_kind and is_same_mode and torch.equal(last_table, table):
                return biases
        self._last = table.detach().clone(), offsets, table[:, offsets]
        return self._last[2]

    def __reduce__(self) -> tuple[type[OffsetLookup], tuple[()]]:
        return OffsetLookup, ()
