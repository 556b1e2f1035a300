"""LeViT: a vision transformer in ConvNet's clothing for faster inference (Graham et al. 2021, arXiv 2104.01136).

Four strided convolutions leave a 14x14 map of 16-pixel places; attention works on it, then on 7x7, then 4x4. There is
no class token and no position embedding: each attention adds a learned bias per head and offset (|dy|, |dx|). Between
stages, attention itself shrinks the map: queries are taken from every second row and column. BatchNorm everywhere, so
that each norm can be folded into the linear layer before it.

Paper -> here:  C -> embed_dim   D -> key_dim   N -> num_heads   X -> depth (pairs of attention and MLP)
    shrinking attention -> AttentionDownsample   attention bias -> attention_biases   PatchConv -> Stem
Sizes: Table 2, in `weft.models.levit`.

A1 to A7 below are the rows of Table 5, the ablation of LeViT-128S: each takes one part out by constructor values.

As in the released code: LeViT-384's second shrinking attention has 16 = C/D heads, where the paper's Table 2 gives 18.
The stem's last convolution has no activation. The bias is added after the scores are scaled. In training the two heads
return separate logits (classes, teacher), in evaluation their mean. Parameter names are timm's. Neither paper nor
released code takes other image sizes; here the bias tables are resized over |dy|, |dx|, and offset 0 keeps its value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.activation import activation
from weft.layers.attention import attend_with_bias
from weft.layers.mlp import DropPath
from weft.layers.norm import ConvNorm, LinearNorm, NormLinear
from weft.layers.position import OffsetLookup, offset_index
from weft.layers.tokens import join_heads, split_heads, to_tokens
from weft.models.base import Backbone, per_stage

MakeLinear = Callable[..., nn.Module]  # `linear_bn` or `linear`


def linear_bn(in_features: int, out_features: int, ends_branch: bool = False) -> nn.Module:
    """Return a linear layer with BatchNorm, whose weight is zero at first at the end of a residual branch."""
    return LinearNorm(in_features, out_features, norm_scale=0.0 if ends_branch else 1.0)


def linear(in_features: int, out_features: int, ends_branch: bool = False) -> nn.Module:
    """Return a plain linear layer, for the network without BatchNorm (A3)."""
    return nn.Linear(in_features, out_features)


class Stem(nn.Sequential):
    """Image to map: 3x3 convolutions with BatchNorm whose widths double, an activation between them (section 4).

    Args:
        in_chans: channels of the image.
        embed_dim: channels of the map.
        strides: of the convolutions.
        act_layer: activation.
    """

    def __init__(self, in_chans: int, embed_dim: int, strides: tuple[int, ...], act_layer: type[nn.Module]) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, stride in enumerate(strides, start=1):
            out_chans = embed_dim // 2 ** (len(strides) - i)
            layers[f"conv{i}"] = ConvNorm(in_chans, out_chans, 3, stride, 1)
            if i < len(strides):
                layers[f"act{i}"] = act_layer()
            in_chans = out_chans
        super().__init__(layers)


class PatchStem(nn.Sequential):
    """Image to map by one convolution as large as its stride, with BatchNorm: the ablation without PatchConv (A2)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__(OrderedDict(conv1=ConvNorm(in_chans, embed_dim, patch_size, patch_size, 0)))


class BiasedAttention(nn.Module, ABC):
    """A bias per head and offset: what both kinds of attention add to their scores (equation 1).

    Args:
        key_dim: width of a head in queries and keys.
        num_heads: heads.
        grid: of the keys; the table has an entry per place of it.
        stride: queries are every `stride`-th row and column of the keys.
        with_bias: learn the table; False: no bias.
    """

    offsets: Tensor

    def __init__(self, key_dim: int, num_heads: int, grid: Grid, stride: int, with_bias: bool) -> None:
        super().__init__()
        self.key_dim, self.scale, self.num_heads = key_dim, key_dim**-0.5, num_heads
        self.grid, self.stride = grid, stride
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, grid.tokens)) if with_bias else None
        self.register_buffer("offsets", offset_index(grid.strided(stride), grid, stride), persistent=False)
        self.look_up = OffsetLookup()

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m c"]: ...

    def attend(
        self, q: Float[Tensor, "b heads n d"], k: Float[Tensor, "b heads m d"], v: Float[Tensor, "b heads m e"]
    ) -> Float[Tensor, "b heads n e"]:
        """Return softmax(q k / sqrt(d) + bias) v."""
        return attend_with_bias(q, k, v, self.scale, self.bias())

    def bias(self) -> Float[Tensor, "heads n m"] | None:
        """Return the bias of every pair of query and key."""
        return None if self.attention_biases is None else self.look_up(self.attention_biases, self.offsets)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the keys; the table is not resized here."""
        self.grid = grid
        self.offsets = offset_index(grid.strided(self.stride), grid, self.stride).to(self.offsets.device)


class Attention(BiasedAttention):
    """Multi-head attention with a bias per head and offset (equation 1).

    Args: as in `BiasedAttention`, and
        dim: channels of a token.
        attn_ratio: width of a head in values over `key_dim`.
        make_linear: makes the linear layers.
        act_layer: activation in front of the projection.
    """

    def __init__(
        self,
        dim: int,
        key_dim: int,
        num_heads: int,
        attn_ratio: float,
        grid: Grid,
        make_linear: MakeLinear,
        act_layer: type[nn.Module],
        with_bias: bool,
    ) -> None:
        super().__init__(key_dim, num_heads, grid, 1, with_bias)
        value_dim = int(attn_ratio * key_dim)
        self.widths = [key_dim, key_dim, value_dim]
        self.qkv = make_linear(dim, num_heads * sum(self.widths))
        end = make_linear(num_heads * value_dim, dim, ends_branch=True)
        self.proj = nn.Sequential(OrderedDict(act=act_layer(), ln=end))

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        # The rows of q, k and v alternate head by head, as in the released weights.
        q, k, v = split_heads(self.qkv(tokens), self.num_heads).split(self.widths, dim=-1)
        return self.proj(join_heads(self.attend(q, k, v)))


class AttentionDownsample(BiasedAttention):
    """Shrinking attention: queries from every second row and column, other width, no residual (section 4).

    Args: as in `Attention`, and
        out_dim: channels that leave.
    """

    def __init__(
        self,
        dim: int,
        out_dim: int,
        key_dim: int,
        num_heads: int,
        attn_ratio: float,
        grid: Grid,
        make_linear: MakeLinear,
        act_layer: type[nn.Module],
        with_bias: bool,
    ) -> None:
        super().__init__(key_dim, num_heads, grid, 2, with_bias)
        value_dim = int(attn_ratio * key_dim)
        self.widths = [key_dim, value_dim]
        self.kv = make_linear(dim, num_heads * sum(self.widths))
        self.q = nn.Sequential(OrderedDict(ln=make_linear(dim, num_heads * key_dim)))
        self.proj = nn.Sequential(OrderedDict(act=act_layer(), ln=make_linear(num_heads * value_dim, out_dim)))

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m out"]:
        k, v = split_heads(self.kv(tokens), self.num_heads).split(self.widths, dim=-1)
        # Cut with channels last: the gradient of a cut map would come channels first, and stay so through the blocks.
        every_second = tokens.unflatten(1, self.grid)[:, :: self.stride, :: self.stride].flatten(1, 2)
        q = split_heads(self.q(every_second), self.num_heads)
        return self.proj(join_heads(self.attend(q, k, v)))


class MLP(nn.Sequential):
    """Two linear layers with an activation between (section 4)."""

    def __init__(self, dim: int, ratio: float, make_linear: MakeLinear, act_layer: type[nn.Module]) -> None:
        hidden_dim = int(dim * ratio)
        ln1, ln2 = make_linear(dim, hidden_dim), make_linear(hidden_dim, dim, ends_branch=True)
        super().__init__(OrderedDict(ln1=ln1, act=act_layer(), ln2=ln2))


class Block(nn.Module):
    """x + attention(x), then x + mlp(x); with `pre_norm`, each sees LayerNorm(x) (no BatchNorm: A3)."""

    def __init__(self, dim: int, attn: Attention, mlp: MLP, drop_path: float, pre_norm: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim) if pre_norm else nn.Identity()
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim) if pre_norm else nn.Identity()
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))


class Downsample(nn.Module):
    """Shrinking attention, then a residual MLP."""

    def __init__(
        self, dim: int, attn: AttentionDownsample, out_dim: int, mlp: MLP, drop_path: float, pre_norm: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim) if pre_norm else nn.Identity()
        self.attn_downsample = attn
        self.norm2 = nn.LayerNorm(out_dim) if pre_norm else nn.Identity()
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m out"]:
        tokens = self.attn_downsample(self.norm1(tokens))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Stage(nn.Module):
    """Shrinking attention, but in the first stage, and the blocks on its grid."""

    def __init__(self, downsample: nn.Module, blocks: list[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m out"]:
        return self.blocks(self.downsample(tokens))


class LeViT(Backbone):
    """LeViT; a classifier and a backbone under timm's contract. Values per stage may be given as one for all.

    image -> `stem` (convolutions; the map becomes tokens) -> `stages`: `downsample` (shrinking attention; not in the
    first), then `blocks` (attention with biases, MLP) -> `finish` -> `pool` -> `head` and `head_dist`

    Args:
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
        num_classes: width of the heads; 0 for none.
        global_pool: 'avg' (mean of the tokens) or ''.
        stem_strides: strides of the stem's convolutions.
        stem: 'conv', or 'patch': one large convolution (A2).
        embed_dim: channels per stage; a single stage is the ablation without a pyramid (A1).
        key_dim: width of a head in queries and keys.
        depth: blocks per stage.
        num_heads: heads per stage.
        attn_ratio: width of a head in values over `key_dim`.
        mlp_ratio: hidden width of the MLP over `embed_dim`.
        down_num_heads: heads of the shrinking attentions, one fewer than stages; None: C/D of the stage before.
        down_attn_ratio, down_mlp_ratio: the ratios there.
        norm: 'batch', or 'layer': LayerNorm in front of each branch, none behind the linear layers (A3).
        act_layer: activation, a timm name.
        attn_act_layer: activation behind attention; None: as `act_layer`; 'identity': none (A7).
        attn_bias: learn the attention biases (False with `pos_embed=True`: A5).
        pos_embed: add a learned position to the stem's tokens.
        distilled: a second head; in training both return logits, in evaluation their mean (False: A4).
        drop_rate: dropout in front of the heads, in [0, 1).
        drop_path_rate: stochastic depth of every residual, in [0, 1).

    Raises:
        UsageError: the image is too small for the strides, or sizes do not fit.
    """

    norm_name = "final_norm"

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        stem_strides: tuple[int, ...] = (2, 2, 2, 2),
        stem: str = "conv",
        embed_dim: tuple[int, ...] = (128, 256, 384),
        key_dim: int = 16,
        depth: tuple[int, ...] = (2, 3, 4),
        num_heads: tuple[int, ...] = (4, 6, 8),
        attn_ratio: float = 2.0,
        mlp_ratio: float = 2.0,
        down_num_heads: tuple[int, ...] | None = None,
        down_attn_ratio: float = 4.0,
        down_mlp_ratio: float = 2.0,
        norm: str = "batch",
        act_layer: str = "hard_swish",
        attn_act_layer: str | None = None,
        attn_bias: bool = True,
        pos_embed: bool = False,
        distilled: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim[-1], global_pool, ("avg",), drop_rate, distilled)
        if norm not in ("batch", "layer") or stem not in ("conv", "patch"):
            raise UsageError(f"norm must be 'batch' or 'layer' and stem 'conv' or 'patch'; got {norm!r} and {stem!r}.")
        count = len(embed_dim)
        rows = per_stage(count, dim=embed_dim, depth=depth, num_heads=num_heads)
        if down_num_heads is None:
            down_num_heads = tuple(dim // key_dim for dim in embed_dim[:-1])
        down_rows = per_stage(count - 1, down_num_heads=down_num_heads)
        attn_act_layer = self.arguments["attn_act_layer"] = attn_act_layer or act_layer
        act, attn_act = activation(act_layer), activation(attn_act_layer)
        make_linear = linear_bn if norm == "batch" else linear
        self.pre_norm = pre_norm = norm == "layer"

        reduction = self.stem_stride = math.prod(stem_strides)
        if stem == "patch":
            self.stem: nn.Module = PatchStem(in_chans, embed_dim[0], self.stem_stride)
        else:
            self.stem = Stem(in_chans, embed_dim[0], stem_strides, act)
        self.num_stages = count
        self.grids = self.grids_of(self.img_size)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grids[0].tokens, embed_dim[0])) if pos_embed else None
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

        stages: list[Stage] = []
        for i, row in enumerate(rows):
            downsample: nn.Module = nn.Identity()
            if i:
                before, num_down_heads = embed_dim[i - 1], down_rows[i - 1].down_num_heads
                shrink = AttentionDownsample(
                    before, row.dim, key_dim, num_down_heads, down_attn_ratio, self.grids[i - 1], make_linear, attn_act,
                    attn_bias,
                )  # fmt: skip
                mlp = MLP(row.dim, down_mlp_ratio, make_linear, act)
                downsample = Downsample(before, shrink, row.dim, mlp, drop_path_rate, pre_norm)
                reduction *= 2
            blocks = []
            for _ in range(row.depth):
                attn = Attention(
                    row.dim, key_dim, row.num_heads, attn_ratio, self.grids[i], make_linear, attn_act, attn_bias
                )
                blocks.append(Block(row.dim, attn, MLP(row.dim, mlp_ratio, make_linear, act), drop_path_rate, pre_norm))
            stages.append(Stage(downsample, blocks))
            self.feature_info.append(dict(num_chs=row.dim, reduction=reduction, module=f"stages.{i}"))
        self.stages = nn.Sequential(*stages)
        self.final_norm = nn.LayerNorm(embed_dim[-1]) if pre_norm else nn.Identity()
        self.build_head(num_classes)

    def encode(
        self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None
    ) -> list[tuple[Tensor, Grid]]:
        """Tokens of the stages, and their grids."""
        self.check_image_size(image)
        tokens = to_tokens(self.stem(image.contiguous(memory_format=torch.channels_last)))  # a view of the map
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        taps = []
        for stage, grid in zip(self.stages[:levels], self.grids, strict=False):
            tokens = self.run_block(stage, tokens)
            taps.append((tokens, grid))
        return taps

    def finish(self, taps: list[tuple[Tensor, Grid]]) -> Float[Tensor, "b n c"]:
        """Tokens of the last stage; there is no norm behind BatchNorm."""
        return self.final_norm(taps[-1][0])

    def make_head(self, num_classes: int) -> nn.Module:
        """Return BatchNorm and a linear layer; without BatchNorm in the network only the linear layer."""
        if num_classes == 0 or self.pre_norm:
            return super().make_head(num_classes)
        return NormLinear(self.num_features, num_classes)

    def grids_of(self, img_size: Grid) -> list[Grid]:
        """Return the grid of each stage."""
        grid = img_size
        for conv in self.stem.modules():
            if isinstance(conv, nn.Conv2d):
                grid = grid.conv(conv.kernel_size[0], conv.stride[0], int(conv.padding[0]))
        if grid.tokens == 0:
            raise UsageError(
                f"img_size must leave at least one place behind the stem; got {img_size}. "
                f"Use images of at least {self.stem_stride} pixels per side."
            )
        return [grid.strided(2**i) for i in range(self.num_stages)]

    def attentions(self) -> Iterator[tuple[str, BiasedAttention, int]]:
        """Yield every attention: its name, itself, and the stage on whose grid its keys are."""
        for name, module in self.named_modules():
            if isinstance(module, BiasedAttention):  # shrinking attention reads the stage before
                yield name, module, int(name.split(".")[1]) - ("downsample" in name)

    def positions(self) -> dict[str, int]:
        """Return the bias tables, and the position embedding if there is one."""
        embed = {} if self.pos_embed is None else {"pos_embed": 0}
        with_bias = ((name, level) for name, attn, level in self.attentions() if attn.attention_biases is not None)
        return embed | {f"{name}.attention_biases": level for name, level in with_bias}

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the size of the images; bias tables and the position embedding are resized."""
        grids = self.grids_of(Grid.of(img_size))
        for _, attn, level in self.attentions():
            attn.set_grid(grids[level])
        super().set_input_size(img_size)
