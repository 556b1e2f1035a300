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
from weft.layers.position import OffsetLookup
from weft.models.levit.network import Attention, AttentionDownsample, BiasedAttention, LeViT, PatchStem, Stem


class FoldedBias(BiasedAttention):
    """Attention with the bias of every pair of query and key, and the scale in the weights of the queries."""

    expanded: Tensor | None
    expanded_rows: Tensor | None  # the same with longer rows, for GPUs

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
        return attend_with_bias(q, k, v, self.scale, bias)

    def set_grid(self, grid: Grid) -> None:
        """Refuse another grid: the table that could be resized is gone."""
        raise UsageError("A folded network must keep its size; set the size of the original, and fold that.")


class FoldedAttention(FoldedBias, Attention):
    """Folded form of `Attention`."""


class FoldedAttentionDownsample(FoldedBias, AttentionDownsample):
    """Folded form of `AttentionDownsample`."""


def fold_attention(attn: Attention) -> nn.Module:
    """Look the bias up, and move the scale of the scores into the weights of the queries: some rows of each head."""
    key_dim, _, value_dim = attn.widths
    factor = torch.tensor([attn.scale] * key_dim + [1.0] * (key_dim + value_dim), dtype=torch.float64)
    attn.qkv = scaled_rows(cast("nn.Linear", attn.qkv), factor.repeat(attn.num_heads))
    return _with_expanded_bias(attn, FoldedAttention)


def fold_downsample(attn: AttentionDownsample) -> nn.Module:
    """Look the bias up, and move the scale of the scores into the weights of the queries."""
    q = cast("nn.Linear", attn.q.ln)
    attn._modules["q"] = scaled_rows(q, torch.full((q.out_features,), attn.scale, dtype=torch.float64))
    return _with_expanded_bias(attn, FoldedAttentionDownsample)


def _with_expanded_bias(attn: BiasedAttention, folded: type[FoldedBias]) -> nn.Module:
    bias = attn.bias()
    attn.register_buffer("expanded", None if bias is None else bias.detach().clone())
    attn.register_buffer("expanded_rows", None, persistent=False)
    attn.attention_biases, attn.scale, attn.look_up = None, 1.0, OffsetLookup()
    attn.__class__ = folded
    cast("FoldedBias", attn).prepare()
    attn.register_load_state_dict_post_hook(_prepare)
    return attn


def _prepare(module: FoldedBias, _: object) -> None:
    module.prepare()


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
    Attention: fold_attention,
    AttentionDownsample: fold_downsample,
    LeViT: fold_heads,
}
