"""T2T-ViT: a vision transformer whose tokens grow out of overlapping tokens (arXiv 2101.11986).

A baseline of the CeiT, CvT and LeViT papers. Three times, tokens are laid out as a map, cut into overlapping windows,
and each window becomes one token ("soft split"): 7x7 pixels with stride 4, then twice 3x3 tokens with stride 2. Between
the splits a layer of attention narrows the windows to 64 channels: a Performer, linear in the number of tokens, in
`t2t_vit_*`; ordinary attention over all 3,136 of them in `t2t_vit_t_*`. Then a plain vision transformer, with fixed
sines as positions.

The CeiT paper's rows are those of the Performer, the CvT paper's those of attention; the LeViT paper has the accuracy
of the latter with the cost of the former. The released weights were trained with scores scaled by
`embed_dim ** -0.5` (`qk_scale`); today's default is that of a head.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from weft.errors import UsageError, unknown
from weft.grid import Grid
from weft.layers.tokens import to_map
from weft.models.base import Backbone, CamTarget, head_width

SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride, padding
TOKEN_TYPES = ("performer", "transformer")


class Performer(nn.Module):
    """Attention that is linear in the number of tokens: exp(q k) as a mean over random features of q and of k.

    Its output is as narrow as its values, so the values, not the input, are what it is added to.

    Args:
        in_dim: channels of a window.
        dim: channels of a token.
        drop: dropout behind the projection and the feed-forward; the released training has 0.1.
    """

    w: Tensor

    def __init__(self, in_dim: int, dim: int, drop: float = 0.1) -> None:
        super().__init__()
        self.num_random = dim // 2
        self.norm1 = nn.LayerNorm(in_dim)
        self.kqv = nn.Linear(in_dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dp = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.Dropout(drop))
        directions = nn.init.orthogonal_(torch.empty(self.num_random, dim))
        self.register_buffer("w", directions * math.sqrt(self.num_random))

    def forward(self, windows: Float[Tensor, "b n in_dim"]) -> Float[Tensor, "b n dim"]:
        """Windows to tokens."""
        k, q, v = self.kqv(self.norm1(windows)).chunk(3, dim=-1)
        k, q = self._random_features(k), self._random_features(q)
        total = k.transpose(1, 2) @ v.float()  # what all keys say, once for all queries
        weight = q @ k.sum(dim=1).unsqueeze(2)
        tokens = v + self.dp(self.proj((q @ total / (weight + 1e-8)).to(v.dtype)))
        return tokens + self.mlp(self.norm2(tokens))

    def _random_features(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n features"]:
        x = x.float()  # float32, as released
        half_square = x.square().sum(dim=-1, keepdim=True) / 2
        return torch.exp(x @ self.w.float().t() - half_square) / math.sqrt(self.num_random)


class NarrowingAttention(nn.Module):
    """One head over all windows, whose queries, keys and values are narrower than its input.

    Args:
        in_dim: channels of a window; the scores are scaled by these.
        dim: channels of a token.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.scale = in_dim**-0.5
        self.qkv = nn.Linear(in_dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, windows: Float[Tensor, "b n in_dim"]) -> Float[Tensor, "b n dim"]:
        """Return the values plus the attention output."""
        q, k, v = self.qkv(windows).unsqueeze(1).chunk(3, dim=-1)
        return (v + self.proj(F.scaled_dot_product_attention(q, k, v, scale=self.scale))).squeeze(1)


class TokenTransformer(nn.Module):
    """A layer of attention and a feed-forward of equal width; arguments as those of `Performer`."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim)
        self.attn = NarrowingAttention(in_dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dim, dim)

    def forward(self, windows: Float[Tensor, "b n in_dim"]) -> Float[Tensor, "b n dim"]:
        """Windows to tokens."""
        tokens = self.attn(self.norm1(windows))
        return tokens + self.mlp(self.norm2(tokens))


class TokensToToken(nn.Module):
    """An image to tokens, by three soft splits.

    Args:
        token_type: the layers between the splits, one of TOKEN_TYPES.
        in_chans: channels of the image.
        token_dim: channels between the splits.
        embed_dim: channels of the tokens that come out.
    """

    def __init__(self, token_type: str, in_chans: int, token_dim: int, embed_dim: int) -> None:
        super().__init__()
        layer = Performer if token_type == "performer" else TokenTransformer
        self.attention1 = layer(in_chans * 7 * 7, token_dim)
        self.attention2 = layer(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    def forward(self, image: Float[Tensor, "b in_chans height width"], grid: Grid) -> Float[Tensor, "b n embed_dim"]:
        """One token for 16x16 pixels; `grid` is the size of the image."""
        fmap = image
        for layer, split in zip((self.attention1, self.attention2), SPLITS, strict=False):
            grid = grid.conv(*split)
            fmap = to_map(layer(soft_split(fmap, *split)), grid)
        return self.project(soft_split(fmap, *SPLITS[-1]))


def soft_split(
    fmap: Float[Tensor, "b c h w"], kernel: int, stride: int, padding: int
) -> Float[Tensor, "b windows c_kernel_kernel"]:
    """Overlapping windows, each laid out as one vector."""
    return F.unfold(fmap, kernel, stride=stride, padding=padding).transpose(1, 2)


class T2TViT(Backbone):
    """T2T-ViT, a classifier and a backbone under timm's contract.

    Args:
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: 'token', 'avg' (mean of the other tokens) or ''.
        token_type: layers between the soft splits, 'performer' or 'transformer'.
        token_dim: channels between the soft splits.
        embed_dim, depth, num_heads, mlp_ratio, qkv_bias: of the transformer behind them.
        qk_scale: of the scores there; None for that of a head. The released weights need `embed_dim ** -0.5`.
        drop_rate: dropout in front of the head.
        drop_path_rate: of the last block, growing from 0.

    Raises:
        UsageError: values that do not fit.
    """

    pos_embed: Tensor

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        token_type: str = "performer",
        token_dim: int = 64,
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        qk_scale: float | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if token_type not in TOKEN_TYPES:
            raise unknown("token_type", token_type, TOKEN_TYPES, ", ".join(TOKEN_TYPES))
        head_width(embed_dim, num_heads)
        super().__init__(img_size, in_chans, num_classes, embed_dim, global_pool, ("token", "avg"), drop_rate)
        self.num_prefix = 1
        self.grids = self.grids_of(self.img_size)
        self.tokens_to_token = TokensToToken(token_type, in_chans, token_dim, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.register_buffer("pos_embed", sines(1 + self.grid.tokens, embed_dim))
        self.blocks = nn.ModuleList()
        for i, drop_path in enumerate(torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()):
            block = Block(
                embed_dim,
                num_heads,
                mlp_ratio,
                qkv_bias=qkv_bias,
                drop_path=drop_path,
                norm_layer=cast("type[nn.Module]", nn.LayerNorm),
            )
            if qk_scale is not None:  # timm's fused attention knows only that of a head
                attn = cast("Any", block.attn)
                attn.scale, attn.fused_attn = qk_scale, False
            self.blocks.append(block)
            self.feature_info.append(dict(num_chs=embed_dim, reduction=16, module=f"blocks.{i}"))
        self.norm: nn.Module = nn.LayerNorm(embed_dim)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.build_head(num_classes)

    @property
    def grid(self) -> Grid:
        """The grid of the tokens."""
        return self.grids[0]

    def grids_of(self, img_size: Grid) -> list[Grid]:
        grid = img_size
        for split in SPLITS:
            grid = grid.conv(*split)
        if grid.tokens == 0:
            raise UsageError(f"img_size must leave at least one token of 16x16 pixels; got {img_size}.")
        return [grid]

    def encode(self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None) -> list[Any]:
        """Tokens behind each block, class token first."""
        self.check_image_size(image)
        tokens = self.tokens_to_token(image, self.img_size)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.pos_embed
        taps = []
        for block in self.blocks[:levels]:
            tokens = self.run_block(block, tokens)
            taps.append((tokens, self.grid))
        return taps

    def finish(self, taps: list[Any]) -> Float[Tensor, "b n c"]:
        return self.norm(taps[-1][0])

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^(?:tokens_to_token\.|cls_token)",
            blocks=[(r"^blocks\.(\d+)", None), (r"^(?:norm|head)\.", (99999,))],
        )


def sines(count: int, dim: int) -> Float[Tensor, "1 count dim"]:
    """Positions in a row as sines (even channels) and cosines (odd ones) of wavelengths from 2 pi to 20,000 pi."""
    channels = torch.arange(dim, device="cpu")
    angles = torch.arange(count, device="cpu")[:, None] / torch.pow(10_000.0, 2 * (channels // 2) / dim)
    return torch.where(channels % 2 == 0, angles.sin(), angles.cos()).float()[None].to(torch.get_default_device())


def cam_target(model: T2TViT) -> CamTarget:
    """Return the last map that reaches the class token: that of the block before the last."""
    if len(model.blocks) > 1:
        return CamTarget(model.blocks[-2], model.num_prefix, lambda args: model.grid)
    return CamTarget(model.tokens_to_token, 0, lambda args: model.grid)
