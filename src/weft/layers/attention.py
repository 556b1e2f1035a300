"""Scaled dot-product attention, and recording of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from weft.grid import Grid
from weft.machine.processor import onednn_flags

_PLAIN_SCORES = 1024 * 1024  # above this many scores per head, memory counts for more than time
_HAS_AMX = "amx_bf16" in onednn_flags()
_recorder: ContextVar[list[Tensor] | None] = ContextVar("attention weights", default=None)


class AttentionLayer(NamedTuple):
    """Attention weights of one layer, and what their rows and columns stand for.

    Attributes:
        weights: mean over the heads (b n m); in the last layer of a folded network the class token's row alone (b 1 m).
        queries, keys: grids of the tokens that have a place on the map.
        prefix: number of tokens in front of these: 0, or 1 for a class token.
        is_residual: whether the layer's output is added to its input.
        level: name of the feature level that ends with this layer; '' inside a level.
        joins: whether its input is the output of the layer before; False if other modules change the tokens between.
    """

    weights: Tensor
    queries: Grid
    keys: Grid
    prefix: int
    is_residual: bool
    level: str
    joins: bool = True


class AttentionTrace(NamedTuple):
    """All attention of one forward pass.

    Attributes:
        layers: from the image to the prediction.
        layer_shares: share of each layer's class token in the prediction (b layers), if attention over layers computes
            one (CeiT's LCA); else None.
    """

    layers: Sequence[AttentionLayer]
    layer_shares: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return softmax(scale q k^T) v, computed by torch's fastest way for the device and precision.

    Args:
        q: queries (b heads n d).
        k: keys (b heads m d).
        v: values (b heads m d).
        scale: factor of the scores.

    Returns:
        Values gathered per query (b heads n d).

    torch's fused kernel never stores the scores, and is the fastest way on GPUs and, in float32, on CPUs. In bfloat16
    on CPUs, its backward is slower than that of plain matrix multiplication (10 against 3 ms for 16 images of 197
    tokens in three heads), and so is its forward without AMX (4.4 against 2.6 ms; with AMX 1.4 against 1.9; all in
    benchmarks/training/kernels.csv). There, plain matrix multiplication is used as long as the scores are small.
    """
    if _record() is not None or _is_plain_faster(q, k):
        return _plain_attention(q, k, v, scale, None)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Return softmax(scale q k^T + bias) v for values wider than keys.

    torch's fused kernel is used for inference on GPUs alone. CPUs have none for such values, and its fallback checks
    every score for rows that are masked completely; its gradient of the bias was not measured.

    Args:
        q: queries (b heads n d).
        k: keys (b heads m d).
        v: values (b heads m e).
        scale: factor of the scores.
        bias: bias of each pair of query and key (heads n m), or None. On a GPU it is copied, unless it has the dtype of
            q and is a view of rows whose length is a multiple of 16.

    Returns:
        Values gathered per query (b heads n e).
    """
    if not _is_fused_with_bias(q):
        return _plain_attention(q, k, v, scale, bias)
    mask = None if bias is None else bias.to(q.dtype)[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    q = q if scale == 1.0 else q * scale  # a folded network has it in its weights
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    return torch.matmul(recorded(scores.softmax(dim=-1)), v)


@contextlib.contextmanager
def record_attention() -> Iterator[list[Tensor]]:
    """Record the weights (b heads n m) of every attention that is computed inside the `with` block, in order.

    The record belongs to the context of the caller: other threads that run the same network are not recorded, nor is a
    compiled network.
    """
    weights: list[Tensor] = []
    token = _recorder.set(weights)
    try:
        yield weights
    finally:
        _recorder.reset(token)


def recorded(weights: Tensor) -> Tensor:
    """Return attention weights unchanged, after adding them to the record of `record_attention`, if there is one."""
    record = _record()
    if record is not None:
        record.append(weights.detach())
    return weights


def _record() -> list[Tensor] | None:
    """Return the record of this context; None in a compiled graph, where PyTorch 2.11 cannot read a ContextVar."""
    return None if torch.compiler.is_compiling() else _recorder.get()


def _is_fused_with_bias(q: Tensor) -> bool:
    if isinstance(q, fx.Proxy) or _record() is not None:
        return False
    return q.is_cuda and not torch.is_grad_enabled()


def _is_plain_faster(q: Tensor, k: Tensor) -> bool:
    if isinstance(q, fx.Proxy):  # a symbolic trace knows neither device nor sizes
        return False
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or q.shape[-2] * k.shape[-2] > _PLAIN_SCORES:
        return False
    return torch.is_grad_enabled() or not _HAS_AMX
