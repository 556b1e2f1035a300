"""Attention by whichever of torch's ways is fastest where it runs, and a look at its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_PLAIN_SCORES = 1024 * 1024  # above this many scores per head, memory counts for more than time
_seen: list[Tensor] | None = None  # of whoever watches


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v.

    Args:
        q: queries (b heads n d).
        k: keys (b heads m d).
        v: values (b heads m d).
        scale: factor of the scores.

    Returns:
        Values gathered per query (b heads n d).

    torch's fused kernel never stores the scores, and is the fastest way on GPUs and, in float32, on CPUs. In bfloat16
    its CPU kernel loses to plain matrix products: 4.4 to 2.6 ms forward and 13.3 to 4.1 ms backward for 16 pictures of
    197 tokens in three heads (benchmarks/training/kernels.csv), so these are taken as long as the scores are small.
    """
    if _seen is not None or _products_are_faster(q, k):
        q = q if scale == 1.0 else q * scale  # a folded network has it in its weights
        return torch.matmul(noted(torch.matmul(q, k.transpose(-2, -1)).softmax(dim=-1)), v)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


@contextlib.contextmanager
def watched() -> Iterator[list[Tensor]]:
    """The weights (b heads n m) of every attention computed meanwhile, in its order; for one thread at a time."""
    global _seen
    before, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = before


def noted(weights: Tensor) -> Tensor:
    """The weights as they came, shown to whoever watches."""
    if _seen is not None:
        _seen.append(weights.detach())
    return weights


def _products_are_faster(q: Tensor, k: Tensor) -> bool:
    if isinstance(q, fx.Proxy):  # a symbolic trace knows neither device nor sizes
        return False
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-2] * k.shape[-2] <= _PLAIN_SCORES
