"""A family of networks of your own, in one file: every verb of weft takes it with `--plugin examples/my_family.py`.

    weft train digits --plugin examples/my_family.py --model mixed_nano_32 --out runs/mine
    weft serve runs/mine --plugin examples/my_family.py

The network is a small hybrid: a convolutional stem, then blocks of a depthwise convolution, self-attention and an MLP
on one grid of tokens. docs/your-own-network.md explains each part.
"""

from collections.abc import Sequence

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace, attend
from weft.layers.norm import ConvNorm
from weft.layers.tokens import join_heads, split_heads, to_map, to_tokens
from weft.models.base import Backbone, CamTarget, head_width
from weft.models.family import Family, Variant


class Attention(nn.Module):
    """Multi-head self-attention; `attend` takes the fastest kernel, and lets weft record the weights."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_width(dim, num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(tokens).chunk(3, dim=-1))
        return self.proj(join_heads(attend(q, k, v, self.scale)))


class Block(nn.Module):
    """Depthwise convolution, attention and MLP, each with a residual."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        # A BatchNorm behind a convolution in an nn.Sequential is folded without a rule of your own.
        self.local = nn.Sequential(nn.Conv2d(dim, dim, 3, 1, 1, groups=dim, bias=False), nn.BatchNorm2d(dim))
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = tokens + self.drop_path(to_tokens(self.local(to_map(tokens, grid))))
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Mixed(Backbone):
    """The network. Its constructor arguments are what `--set model_args.NAME=VALUE` changes.

    Args:
        img_size: pixels, an int or (height, width); any size works, since no position is learned.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: 'avg' or ''.
        embed_dim: channels of a token.
        depth: number of blocks.
        num_heads: attention heads; must divide `embed_dim`.
        mlp_ratio: hidden width of the MLP over `embed_dim`.
        drop_rate: dropout before the head, in [0, 1).
        drop_path_rate: stochastic depth of the last block, growing linearly from 0, in [0, 1).
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depth: int = 4,
        num_heads: int = 3,
        mlp_ratio: float = 2.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim, global_pool, ("avg",), drop_rate)
        if self.grid(self.img_size).tokens == 0:
            raise UsageError(f"img_size must be at least 4 pixels; got {self.img_size}.")
        half = embed_dim // 2
        self.stem = nn.Sequential(ConvNorm(in_chans, half, 3, 2, 1), nn.GELU(), ConvNorm(half, embed_dim, 3, 2, 1))
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, rate) for rate in rates)
        self.norm = nn.LayerNorm(embed_dim)
        self.feature_info = [dict(num_chs=embed_dim, reduction=4, module=f"blocks.{i}") for i in range(depth)]
        self.build_head(num_classes)

    @staticmethod
    def grid(img_size: Grid) -> Grid:
        """Return the grid of tokens for an image size."""
        return img_size.conv(3, 2, 1).conv(3, 2, 1)

    def encode(self, image: Tensor, levels: int | None = None) -> list[tuple[Tensor, tuple[int, int]]]:
        """Return the tokens behind each of the first `levels` blocks, and their grid."""
        fmap = self.stem(image)
        tokens, grid, taps = to_tokens(fmap), (fmap.shape[2], fmap.shape[3]), []
        for block in self.blocks[:levels]:
            tokens = self.run_block(block, tokens, grid)
            taps.append((tokens, grid))
        return taps

    def finish(self, taps: list[tuple[Tensor, tuple[int, int]]]) -> Tensor:
        """Return the normalized tokens of the last block, which the base class averages."""
        return self.norm(taps[-1][0])


def attention(model: Mixed, weights: Sequence[Tensor], img_size: Grid) -> AttentionTrace:
    """Describe the attention layers of one forward pass, for `weft explain` and the overlay of `weft serve`."""
    grid, last = Mixed.grid(img_size), len(weights) - 1
    levels = [f"blocks.{i}" if i == last else "" for i in range(len(weights))]
    return AttentionTrace([AttentionLayer(w, grid, grid, 0, True, at) for w, at in zip(weights, levels, strict=True)])


def cam_target(model: Mixed) -> CamTarget:
    """Name the last map, for Grad-CAM."""
    return CamTarget(model.blocks[-1], 0, lambda args: args[1])


FAMILY = Family(
    name="Mixed",
    network=Mixed,
    variants={
        "mixed_nano_32": Variant(dict(img_size=32)),
        "mixed_micro_32": Variant(dict(img_size=32, embed_dim=48, depth=3)),
    },
    default_cfg=dict(first_conv="stem.0.linear", fixed_input_size=False),
    candidates={"small": {"model": "mixed_nano_32"}},
    has_attention=True,
)
