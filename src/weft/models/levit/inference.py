"""The folded form of LeViT: the same predictions with less to compute, and the rules that lead to it.

BatchNorm goes into the linear map next to it, the bias table is looked up once for all pairs, the scale of the scores
goes into the weights of the queries, and the two heads become one that returns their mean.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import attend_with_bias
from weft.layers.image_conv import faster_on_gpus
from weft.layers.norm import scaled_rows, with_weights
from weft.layers.tokens import join_heads, split_heads
from weft.models.levit.network import Attention, AttentionDownsample, BiasedAttention, LeViT, PatchStem, Stem


class FoldedBias(BiasedAttention):
    """Attention with the bias of every pair of query and key, and the scale in the weights of the queries.

    Args:
        attn: attention whose BatchNorms are merged into its linear layers.
    """

    expanded: Tensor | None
    expanded_rows: Tensor | None  # the same with longer rows, for GPUs

    def __init__(self, attn: BiasedAttention) -> None:
        super().__init__(attn.num_heads, attn.grid, attn.stride, with_bias=False)
        bias = attn.bias()
        self.register_buffer("expanded", None if bias is None else bias.detach().clone())
        self.register_buffer("expanded_rows", None, persistent=False)
        self.prepare()
        self.register_load_state_dict_post_hook(_prepare)

    def prepare(self) -> None:
        """Derive the longer rows from the bias."""
        if self.expanded is not None:
            self.expanded_rows = nn.functional.pad(self.expanded, (0, -self.expanded.shape[-1] % 16))

    def attend(
        self, q: Float[Tensor, "b heads n d"], k: Float[Tensor, "b heads m d"], v: Float[Tensor, "b heads m e"]
    ) -> Float[Tensor, "b heads n e"]:
        """Return softmax(q k + bias) v."""
        bias = self.expanded
        if bias is not None and self.expanded_rows is not None and bias.is_cuda:
            bias = self.expanded_rows.to(q.dtype)[..., : bias.shape[-1]]
        return attend_with_bias(q, k, v, 1.0, bias)

    def set_grid(self, grid: Grid) -> None:
        """Refuse another grid: the table that could be resized is gone."""
        raise UsageError("A folded network must keep its size; set the size of the original, and fold that.")


def _prepare(module: FoldedBias, _: object) -> None:
    module.prepare()


class FoldedAttention(FoldedBias):
    """Folded form of `Attention`."""

    def __init__(self, attn: Attention) -> None:
        super().__init__(attn)
        self.widths, self.proj = attn.widths, attn.proj
        key_dim, _, value_dim = attn.widths
        factor = torch.tensor([key_dim**-0.5] * key_dim + [1.0] * (key_dim + value_dim), dtype=torch.float64)
        self.qkv = scaled_rows(cast("nn.Linear", attn.qkv), factor.repeat(attn.num_heads))

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        q, k, v = split_heads(self.qkv(tokens), self.num_heads).split(self.widths, dim=-1)
        return self.proj(join_heads(self.attend(q, k, v)))


class FoldedAttentionDownsample(FoldedBias):
    """Folded form of `AttentionDownsample`."""

    def __init__(self, attn: AttentionDownsample) -> None:
        super().__init__(attn)
        self.widths, self.kv, self.proj = attn.widths, attn.kv, attn.proj
        q = cast("nn.Linear", attn.q.ln)
        self.q = scaled_rows(q, torch.full((q.out_features,), attn.widths[0] ** -0.5, dtype=torch.float64))

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m out"]:
        k, v = split_heads(self.kv(tokens), self.num_heads).split(self.widths, dim=-1)
        every_second = tokens.unflatten(1, self.grid)[:, :: self.stride, :: self.stride].flatten(1, 2)
        q = split_heads(self.q(every_second), self.num_heads)
        return self.proj(join_heads(self.attend(q, k, v)))


def fold_heads(model: LeViT) -> nn.Module:
    """Merge two heads into the one that returns their mean."""
    if model.head_dist is not None and model.num_classes:
        heads = [cast("nn.Linear", head) for head in (model.head, model.head_dist)]
        weight, bias = (sum(getattr(head, name).double() for head in heads) / 2 for name in ("weight", "bias"))
        model.head = with_weights(heads[0], cast("Tensor", weight), cast("Tensor", bias))
    model.head_dist, model.distilled, model.distilled_training = None, False, False
    return model


def fold_stem(stem: Stem | PatchStem) -> nn.Module:
    """Prepare the convolution of the image for GPUs."""
    stem.conv1 = faster_on_gpus(cast("nn.Conv2d", stem.conv1))
    return stem


RULES = {
    Stem: fold_stem,
    PatchStem: fold_stem,
    Attention: FoldedAttention,
    AttentionDownsample: FoldedAttentionDownsample,
    LeViT: fold_heads,
}
