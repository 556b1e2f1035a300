"""LeViT: a vision transformer in ConvNet's clothing for faster inference (Graham et al. 2021, arXiv 2104.01136).

Four strided convolutions leave a 14x14 map of 16-pixel places; attention works on it, then on 7x7, then 4x4. There is
no class token and no position embedding: each attention adds a learned bias per head and offset (|dy|, |dx|). Between
stages, attention itself shrinks the map: queries are taken from every second row and column. BatchNorm everywhere, so
that each norm can be folded into the linear layer before it.

Paper -> here:  C -> embed_dim   D -> key_dim   N -> num_heads   X -> depth (pairs of attention and MLP)
    shrinking attention -> AttentionDownsample   attention bias -> attention_biases   PatchConv -> Stem
Sizes: Table 2, in `weft.models.levit`.

As in the released code: LeViT-384's second shrinking attention has 16 = C/D heads, where the paper's Table 2 gives 18.
The stem's last convolution has no activation. The bias is added after the scores are scaled. In training the two heads
return separate logits (classes, teacher), in evaluation their mean. Parameter names are timm's. Neither paper nor
released code takes other image sizes; here the bias tables are resized over |dy|, |dx|, and offset 0 keeps its value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import attend_with_bias
from weft.layers.mlp import DropPath
from weft.layers.norm import ConvNorm, LinearNorm, NormLinear
from weft.layers.position import OffsetLookup, guess_grid, offset_index, resize_embedding, resize_offsets
from weft.layers.tokens import join_heads, split_heads, to_map, to_tokens
from weft.models.base import Backbone, activation, per_stage


class Stem(nn.Sequential):
    """Image to map: 3x3 convolutions with BatchNorm whose widths double, an activation between them (section 4).

    Args:
        in_chans: channels of the image.
        embed_dim: channels of the map.
        strides: of the convolutions.
        act_layer: activation.
        norm: BatchNorm and activations; False: bare convolutions with bias.
        first_chans: channels of the first convolution; None: half of the next, and so on.
    """

    def __init__(
        self,
        in_chans: int,
        embed_dim: int,
        strides: tuple[int, ...],
        act_layer: type[nn.Module],
        norm: bool,
        first_chans: int | None,
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, stride in enumerate(strides, start=1):
            is_last = i == len(strides)
            out_chans = embed_dim // 2 ** (len(strides) - i) if first_chans is None else first_chans * 2 ** (i - 1)
            out_chans = embed_dim if is_last else out_chans
            if norm:
                layers[f"conv{i}"] = ConvNorm(in_chans, out_chans, 3, stride, 1)
                if not is_last:
                    layers[f"act{i}"] = act_layer()
            else:
                layers[f"conv{i}"] = nn.Conv2d(in_chans, out_chans, 3, stride, 1)
            in_chans = out_chans
        super().__init__(layers)


class PatchStem(nn.Sequential):
    """Image to map by one convolution as large as its stride, with BatchNorm: the ablation without PatchConv (A2)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__(OrderedDict(conv1=ConvNorm(in_chans, embed_dim, patch_size, patch_size, 0)))


def _residual_end(linear: type[nn.Module], in_features: int, out_features: int) -> nn.Module:
    """The last linear layer of a residual branch: with BatchNorm it starts as nothing, its weight zero."""
    if linear is LinearNorm:
        return LinearNorm(in_features, out_features, norm_scale=0.0)
    return linear(in_features, out_features)


class BiasedAttention(nn.Module, ABC):
    """A bias per head and offset: what both kinds of attention add to their scores (equation 1).

    Args:
        num_heads: heads.
        grid: of the keys; the table has an entry per place of it.
        stride: queries are every `stride`-th row and column of the keys.
        with_bias: learn the table; False: no bias.
    """

    offsets: Tensor
    widths: list[int]  # of a head: keys first

    def __init__(self, num_heads: int, grid: Grid, stride: int, with_bias: bool) -> None:
        super().__init__()
        self.num_heads, self.grid, self.stride = num_heads, grid, stride
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, grid.tokens)) if with_bias else None
        self.register_buffer("offsets", offset_index(grid.strided(stride), grid, stride), persistent=False)
        self.look_up = OffsetLookup()

    @abstractmethod
    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m c"]: ...

    def bias(self) -> Float[Tensor, "heads n m"] | None:
        """Return the bias of every pair of query and key."""
        return None if self.attention_biases is None else self.look_up(self.attention_biases, self.offsets)

    def attend(
        self,
        q: Float[Tensor, "b heads n d"],
        k: Float[Tensor, "b heads m d"],
        v: Float[Tensor, "b heads m e"],
    ) -> Float[Tensor, "b heads n e"]:
        """softmax(q k / sqrt(d) + bias) v."""
        return attend_with_bias(q, k, v, self.widths[0] ** -0.5, self.bias())

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the keys; the table is resized."""
        if self.attention_biases is not None and grid != self.grid:
            table = resize_offsets(self.attention_biases, self.grid, grid)
            self.attention_biases = nn.Parameter(table, requires_grad=self.attention_biases.requires_grad)
        self.offsets = offset_index(grid.strided(self.stride), grid, self.stride).to(self.offsets.device)
        self.grid = grid


class Attention(BiasedAttention):
    """Multi-head attention with a bias per head and offset (equation 1).

    Args:
        dim: channels of a token.
        key_dim: width of a head in queries and keys.
        num_heads: heads.
        attn_ratio: width of a head in values over `key_dim`.
        grid: of the tokens.
        linear: makes the linear layers.
        act_layer: activation in front of the projection.
        with_bias: learn the bias; False: none.
    """

    def __init__(
        self,
        dim: int,
        key_dim: int,
        num_heads: int,
        attn_ratio: float,
        grid: Grid,
        linear: type[nn.Module],
        act_layer: type[nn.Module],
        with_bias: bool,
    ) -> None:
        super().__init__(num_heads, grid, 1, with_bias)
        value_dim = int(attn_ratio * key_dim)
        self.widths = [key_dim, key_dim, value_dim]
        self.qkv = linear(dim, num_heads * sum(self.widths))
        self.proj = nn.Sequential(OrderedDict(act=act_layer(), ln=_residual_end(linear, num_heads * value_dim, dim)))

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
        linear: type[nn.Module],
        act_layer: type[nn.Module],
        with_bias: bool,
    ) -> None:
        super().__init__(num_heads, grid, 2, with_bias)
        value_dim = int(attn_ratio * key_dim)
        self.widths = [key_dim, value_dim]
        self.kv = linear(dim, num_heads * sum(self.widths))
        self.q = nn.Sequential(OrderedDict(ln=linear(dim, num_heads * key_dim)))
        self.proj = nn.Sequential(OrderedDict(act=act_layer(), ln=linear(num_heads * value_dim, out_dim)))

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b m out"]:
        k, v = split_heads(self.kv(tokens), self.num_heads).split(self.widths, dim=-1)
        # Cut with channels last: the gradient of a cut map would come channels first, and stay so through the blocks.
        every_second = tokens.unflatten(1, self.grid)[:, :: self.stride, :: self.stride].flatten(1, 2)
        q = split_heads(self.q(every_second), self.num_heads)
        return self.proj(join_heads(self.attend(q, k, v)))


class MLP(nn.Sequential):
    """Two linear layers with an activation between (section 4)."""

    def __init__(self, dim: int, ratio: float, linear: type[nn.Module], act_layer: type[nn.Module]) -> None:
        hidden_dim = int(dim * ratio)
        super().__init__(
            OrderedDict(ln1=linear(dim, hidden_dim), act=act_layer(), ln2=_residual_end(linear, hidden_dim, dim))
        )


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

    Args:
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
        num_classes: width of the heads; 0 for none.
        global_pool: 'avg' (mean of the tokens) or ''.
        stem_strides: strides of the stem's convolutions.
        stem: 'conv', 'patch' (one large convolution, A2) or 'bare' (convolutions without BatchNorm and activation).
        stem_chans: channels of the first convolution; None: the widths double up to `embed_dim[0]`.
        embed_dim: channels per stage; a single stage is the ablation without a pyramid (A1).
        key_dim: width of a head in queries and keys.
        depth: blocks per stage.
        num_heads: heads per stage.
        attn_ratio: width of a head in values over `key_dim`.
        mlp_ratio: hidden width of the MLP over `embed_dim`.
        down_num_heads: heads of the shrinking attentions, one fewer than stages; None: C/D of the stage before.
        down_attn_ratio, down_mlp_ratio: the ratios there.
        norm: 'batch', or 'layer': LayerNorm in front of each branch, none behind the linear layers (A3).
        mlp_norm: BatchNorm in the MLPs; False: linear layers with bias.
        head_norm: BatchNorm in front of the heads.
        act_layer: activation, a timm name.
        attn_act_layer: activation behind attention; None: as `act_layer`; 'identity': none (A7).
        attn_bias: learn the attention biases (False with `pos_embed=True`: A5).
        pos_embed: add a learned position to the stem's tokens.
        distilled: a second head; in training both return logits, in evaluation their mean.
        drop_rate: dropout in front of the heads, in [0, 1).
        drop_path_rate: stochastic depth of every residual, in [0, 1).

    Raises:
        UsageError: the image is too small for the strides, or sizes do not fit.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        stem_strides: tuple[int, ...] = (2, 2, 2, 2),
        stem: str = "conv",
        stem_chans: int | None = None,
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
        mlp_norm: bool = True,
        head_norm: bool = True,
        act_layer: str = "hard_swish",
        attn_act_layer: str | None = None,
        attn_bias: bool = True,
        pos_embed: bool = False,
        distilled: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            in_chans=in_chans,
            num_classes=num_classes,
            num_features=embed_dim[-1],
            global_pool=global_pool,
            pools=("avg",),
            drop_rate=drop_rate,
            distilled=distilled,
        )
        count = len(embed_dim)
        depth, num_heads = per_stage(depth, count, "depth"), per_stage(num_heads, count, "num_heads")
        if down_num_heads is None:
            down_num_heads = tuple(dim // key_dim for dim in embed_dim[:-1])
        down_num_heads = per_stage(down_num_heads, count - 1, "down_num_heads")
        if norm not in ("batch", "layer") or stem not in ("conv", "patch", "bare"):
            raise UsageError(
                f"norm must be 'batch' or 'layer' and stem 'conv', 'patch' or 'bare'; got {norm!r} and {stem!r}."
            )
        act, attn_act = activation(act_layer), activation(attn_act_layer or act_layer)
        linear: type[nn.Module] = LinearNorm if norm == "batch" else nn.Linear
        mlp_linear = linear if mlp_norm else nn.Linear
        pre_norm = norm == "layer"

        self.embed_dim, self.head_norm = embed_dim, head_norm and norm == "batch"
        self.stem_stride = math.prod(stem_strides)
        if stem == "patch":
            self.stem: nn.Module = PatchStem(in_chans, embed_dim[0], self.stem_stride)
        else:
            self.stem = Stem(in_chans, embed_dim[0], stem_strides, act, stem == "conv", stem_chans)
        self.img_size = Grid.of(img_size)
        self.grids = self._grids_of(self.img_size, count)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grids[0].tokens, embed_dim[0])) if pos_embed else None
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

        stages, reduction = [], self.stem_stride
        for i, dim in enumerate(embed_dim):
            downsample: nn.Module = nn.Identity()
            if i:
                shrink = AttentionDownsample(
                    embed_dim[i - 1], dim, key_dim, down_num_heads[i - 1], down_attn_ratio, self.grids[i - 1], linear,
                    attn_act, attn_bias,
                )  # fmt: skip
                mlp = MLP(dim, down_mlp_ratio, mlp_linear, act)
                downsample = Downsample(embed_dim[i - 1], shrink, dim, mlp, drop_path_rate, pre_norm)
                reduction *= 2
            blocks = []
            for _ in range(depth[i]):
                attn = Attention(dim, key_dim, num_heads[i], attn_ratio, self.grids[i], linear, attn_act, attn_bias)
                blocks.append(Block(dim, attn, MLP(dim, mlp_ratio, mlp_linear, act), drop_path_rate, pre_norm))
            stages.append(Stage(downsample, blocks))
            self.feature_info.append(dict(num_chs=dim, reduction=reduction, module=f"stages.{i}"))
        self.stages = nn.Sequential(*stages)
        self.final_norm = nn.LayerNorm(embed_dim[-1]) if pre_norm else nn.Identity()
        self.build_head(num_classes)

    def make_head(self, num_classes: int) -> nn.Module:
        """Return BatchNorm and a linear layer, or only the linear layer."""
        if num_classes and self.head_norm:
            return NormLinear(self.num_features, num_classes)
        return super().make_head(num_classes)

    def _grids_of(self, img_size: Grid, count: int) -> list[Grid]:
        grid = img_size
        for conv in self.stem.modules():
            if isinstance(conv, nn.Conv2d):
                grid = grid.conv(conv.kernel_size[0], conv.stride[0], int(conv.padding[0]))
        grids = [grid]
        for _ in range(count - 1):
            grids.append(grids[-1].strided(2))
        if grid.tokens == 0:
            raise UsageError(
                f"img_size must leave at least one place behind the stem; got {img_size}. "
                f"Use images of at least {self.stem_stride} pixels per side."
            )
        return grids

    def encode(self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None) -> list[Tensor]:
        """Tokens of the stages."""
        self.check_image_size(image)
        tokens = to_tokens(self.stem(image.contiguous(memory_format=torch.channels_last)))  # a view of the map
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        taps = []
        for stage in self.stages[:levels]:
            tokens = self.run_block(stage, tokens)
            taps.append(tokens)
        return taps

    def finish(self, taps: list[Tensor]) -> Float[Tensor, "b n c"]:
        return self.final_norm(taps[-1])

    def as_fmap(self, tap: Float[Tensor, "b n c"], level: int, norm: bool) -> Float[Tensor, "b c h w"]:
        is_last = level == len(self.embed_dim) - 1
        return to_map(self.final_norm(tap) if norm and is_last else tap, self.grids[level])

    def keep_levels(self, count: int, is_whole: bool, keep_norm: bool, keep_head: bool) -> None:
        self.stages = self.stages[:count]
        if not keep_norm or not is_whole:
            self.final_norm = nn.Identity()

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        size = Grid.of(img_size)
        grids = self._grids_of(size, len(self.grids))
        for name, module in self.named_modules():
            if isinstance(module, BiasedAttention):
                module.set_grid(grids[_key_level(name)])
        if self.pos_embed is not None and grids[0] != self.grids[0]:
            embed = resize_embedding(self.pos_embed.detach(), self.grids[0], grids[0])
            self.pos_embed = nn.Parameter(embed, requires_grad=self.pos_embed.requires_grad)
        self.img_size, self.grids = size, grids
        self.record_input_size(size)

    def resize_state_dict(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        first = state.get("stages.0.blocks.0.attn.attention_biases", state.get("pos_embed"))
        if first is None or first.ndim < 2 or first.numel() == 0:
            return state, []
        num_places = first.shape[-1] if first.ndim == 2 else first.shape[1]
        if num_places == self.grids[0].tokens:
            return state, []
        old = [guess_grid(num_places, "attention_biases")]
        for _ in self.grids[1:]:
            old.append(old[-1].strided(2))
        state, resized = dict(state), []
        for name, tensor in state.items():
            if name == "pos_embed":
                state[name] = resize_embedding(tensor, old[0], self.grids[0])
                resized.append(name)
            elif name.endswith("attention_biases"):
                level = _key_level(name)
                if level < len(old) and tensor.shape[-1] == old[level].tokens:  # else: loading reports it
                    state[name] = resize_offsets(tensor, old[level], self.grids[level])
                    resized.append(name)
        return state, resized

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(("attention_biases", "pos_embed"))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        tail = (r"^(?:final_norm|head|head_dist)\.", (99999,))
        blocks = [(r"^stages\.(\d+)", None)]
        if not coarse:
            blocks = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return dict(stem=r"^(?:stem|pos_embed)", blocks=[*blocks, tail])


def _key_level(name: str) -> int:
    """The stage on whose grid the keys of this attention lie: shrinking attention reads the stage before."""
    return int(name.split(".")[1]) - ("downsample" in name)
