"""The folded form of CvT: the same predictions with less to compute, and the rules that lead to it.

BatchNorm goes into the depthwise convolutions, the scale of the scores into the weights of the queries, and the last
block computes the class token alone, since nothing else reaches the head.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.layers.attention import attend
from weft.layers.image_conv import faster_on_gpus
from weft.layers.norm import absorb, scaled_rows
from weft.layers.tokens import join_heads, split_heads, to_map
from weft.models.cvt.network import Block, ConvAttention, ConvProjection, CvT, Stage, TokenEmbed


class ClassTokenBlock(nn.Module):
    """The last block, for the class token alone, which skips the convolution of the queries.

    Args:
        block: folded block.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.attn.conv_q = None

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b 1 c"]:
        attn, normed = self.attn, self.norm1(tokens)
        cls_token, places = normed[:, :1], normed[:, 1:]
        k = v = normed
        if attn.conv_k is not None and attn.conv_v is not None:
            fmap = to_map(places.contiguous(), grid)
            k, v = (torch.cat([cls_token, conv(fmap)], dim=1) for conv in (attn.conv_k, attn.conv_v))
        q, k, v = (split_heads(part, attn.num_heads) for part in (attn.q(cls_token), attn.k(k), attn.v(v)))
        cls_token = tokens[:, :1] + attn.proj(join_heads(attend(q, k, v, attn.scale)))
        return cls_token + self.mlp(self.norm2(cls_token))


def fold_embedding(embed: TokenEmbed) -> nn.Module:
    """Prepare the convolution of the image for GPUs; those of maps stay as they are."""
    embed.proj = faster_on_gpus(embed.proj)
    return embed


def fold_projection(projection: ConvProjection) -> nn.Module:
    """Merge BatchNorm into the convolution."""
    projection.conv, projection.bn = absorb(projection.conv, projection.bn), nn.Identity()
    return projection


def fold_attention(attn: ConvAttention) -> nn.Module:
    """Move the scale of the scores into the weights of the queries."""
    attn.q = scaled_rows(attn.q, torch.full((attn.q.out_features,), attn.scale, dtype=torch.float64))
    attn.scale = 1.0
    return attn


def keep_class_token(model: CvT) -> CvT:
    """Let the last block compute the class token alone; its map is no feature level any more."""
    if model.global_pool == "token" and model.num_prefix:
        blocks = cast("Stage", model.stages[-1]).blocks
        if len(blocks):
            blocks[-1] = ClassTokenBlock(cast("Block", blocks[-1]))
            model.feature_info = model.feature_info[:-1]
    return model


RULES = {
    TokenEmbed: fold_embedding,
    ConvProjection: fold_projection,
    ConvAttention: fold_attention,
    CvT: keep_class_token,
}
