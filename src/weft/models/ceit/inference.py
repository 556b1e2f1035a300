"""The folded form of CeiT: the same predictions with less to compute, and the rules that lead to it.

BatchNorm goes into the linear maps before it, the scale of the scores into the weights of the queries, the class token
into the position embedding, and the last block computes the class token alone, since nothing else reaches the head.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from weft.grid import Grid
from weft.layers.image_conv import faster_on_gpus
from weft.layers.norm import absorb, scaled_rows, with_weights
from weft.layers.tokens import to_map, to_tokens
from weft.models.ceit.network import Attention, Block, CeiT, ImageToTokens, LeFF


class FoldedCeiT(CeiT):
    """A CeiT whose position embedding has the class token added, and whose last block may give that token alone."""

    has_patches = True  # behind the last block

    def embed(self, image: Float[Tensor, "b in_chans height width"]) -> Float[Tensor, "b n c"]:
        """Return the tokens in front of the blocks: zeros in place of the class token, then positions.

        This also keeps the batch size out of graphs for batches of any size: OpenVINO 2026.4 reads it from the output
        of the stem's first convolution, and then drops that convolution's bias in int8.
        """
        self.check_image_size(image)
        return nn.functional.pad(self.patch_embed(image), (0, 0, 1, 0)) + self.pos_embed

    def finish(self, taps: list[tuple[Tensor, Grid]]) -> Float[Tensor, "b n c"]:
        if self.has_patches or self.lca is None:
            return super().finish(taps)
        return self.norm(self.lca(torch.stack([tokens[:, 0] for tokens, _ in taps], dim=1)))


class FoldedLeFF(nn.Module):
    """LeFF on the map from end to end, with 1x1 convolutions for its linear layers.

    The same on a CPU in torch. OpenVINO, which keeps two layouts, then changes between them at `dim` channels instead
    of `hidden_dim`: 1.3 times as fast in int8 (benchmarks/speed/choices.csv). On a GPU it computes linear layers, which
    add their bias themselves; behind a convolution that is another pass over the map.

    Args:
        leff: LeFF whose BatchNorms are merged into the linear maps.
    """

    def __init__(self, leff: LeFF) -> None:
        super().__init__()
        self.fc1, self.dwconv, self.fc2 = _as_conv(leff.fc1), leff.dwconv, _as_conv(leff.fc2)
        self.act, self.final_act, self.pass_cls = leff.act, leff.final_act, leff.pass_cls

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        hidden = self.act(_pointwise(self.fc1, to_map(tokens[:, 1:].contiguous(), grid)))
        patches = to_tokens(self.final_act(_pointwise(self.fc2, self.act(self.dwconv(hidden)))))
        cls_token = tokens[:, :1] if self.pass_cls else torch.zeros_like(tokens[:, :1])
        return torch.cat([cls_token, patches], dim=1)


class ClassTokenBlock(nn.Module):
    """The last block, for the class token alone; LeFF's convolution never sees that token.

    Args:
        block: folded block.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = block.norm1, block.attn, block.norm2
        self.mlp: nn.Module | None = block.mlp
        if block.is_local:
            self.mlp = nn.Identity() if block.mlp.pass_cls else None

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b 1 c"]:
        normed = self.norm1(tokens)
        cls_token = tokens[:, :1] + self.attn(normed, normed[:, :1])
        return cls_token if self.mlp is None else cls_token + self.mlp(self.norm2(cls_token))


def fold_stem(stem: ImageToTokens) -> nn.Module:
    """Merge BatchNorm into the last convolution."""
    if len(stem.convs):
        last = len(stem.convs) - 1
        stem.convs[last] = absorb(cast("nn.Conv2d", stem.convs[last]), stem.norm)
        if stem.proj.weight.is_cuda:
            move_bias(stem)
        stem.convs[0] = faster_on_gpus(cast("nn.Conv2d", stem.convs[0]))
    stem.norm = nn.Identity()
    return stem


def move_bias(stem: ImageToTokens) -> None:
    """Add the bias of the last convolution to that of the patches: the pool between them only selects values.

    On a GPU, adding it to the large map in front of the pool is another pass over it. On a CPU, it costs nothing there.
    """
    last = len(stem.convs) - 1
    conv = cast("nn.Conv2d", stem.convs[last])
    if conv.bias is not None:
        bias = stem.proj.weight.double().sum((2, 3)) @ conv.bias.double()
        bias = bias if stem.proj.bias is None else bias + stem.proj.bias.double()
        stem.proj = with_weights(stem.proj, stem.proj.weight, bias)
        stem.convs[last] = with_weights(conv, conv.weight, None)


def fold_attention(attn: Attention) -> nn.Module:
    """Move the scale of the scores into the weights of the queries."""
    inner = attn.proj.in_features
    attn.qkv = scaled_rows(attn.qkv, torch.tensor([attn.scale] * inner + [1.0] * (2 * inner), dtype=torch.float64))
    attn.scale = 1.0
    return attn


def fold_leff(leff: LeFF) -> nn.Module:
    """Merge each BatchNorm into the linear map before it."""
    leff.fc1, leff.norm1 = absorb(leff.fc1, leff.norm1), nn.Identity()
    leff.dwconv, leff.norm2 = absorb(leff.dwconv, leff.norm2), nn.Identity()
    leff.fc2, leff.norm3 = absorb(leff.fc2, leff.norm3), nn.Identity()
    return FoldedLeFF(leff)


def fold_network(model: CeiT) -> nn.Module:
    """Add the class token to its position embedding: both are the same for all images. If that token predicts, let the
    last block compute it alone; the map of this block is no feature level then."""
    pos_embed = model.pos_embed.clone()
    pos_embed[:, :1] += model.cls_token
    model.pos_embed = nn.Parameter(pos_embed, requires_grad=False)
    model.__class__ = FoldedCeiT
    if model.global_pool == "token":
        model.blocks[-1] = ClassTokenBlock(cast("Block", model.blocks[-1]))
        model.feature_info = model.feature_info[:-1]
        cast("FoldedCeiT", model).has_patches = False
    return model


RULES = {ImageToTokens: fold_stem, Attention: fold_attention, LeFF: fold_leff, CeiT: fold_network}


def _pointwise(conv: nn.Conv2d, fmap: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
    """Return a 1x1 convolution, on a GPU computed by a linear layer."""
    if isinstance(fmap, fx.Proxy) or not fmap.is_cuda:
        return conv(fmap)
    return nn.functional.linear(fmap.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def _as_conv(linear: nn.Linear) -> nn.Conv2d:
    """Return the 1x1 convolution that computes the same as a linear layer."""
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, device="meta")
    weight = linear.weight.detach()[:, :, None, None].contiguous(memory_format=torch.channels_last)
    conv.weight = nn.Parameter(weight, requires_grad=False)
    conv.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
    return conv
