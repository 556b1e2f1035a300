"""CvT: convolutional token embedding and convolutional projection (Wu et al. 2021, arXiv 2103.15808).

A pyramid of three stages. Each begins with a strided convolution that embeds overlapping patches of the map before it;
inside, queries, keys and values are made by a depthwise convolution on the map and a linear layer, keys and values on a
map of half the size. Convolution tells tokens where they are: there is no position embedding.

Paper -> here:  D_i -> embed_dim   H_i -> num_heads   R_i -> mlp_ratio   number of blocks -> depth
    s (stride of keys and values) -> kv_stride   convolutional projection -> ConvAttention.conv_{q,k,v}
Sizes: Table 2, in `weft.models.cvt`. Projection: section 3.2, figure 2.

As in the released code, and unlike the usual formula: scores are scaled by embed_dim**-0.5, not by the width of a head
(`scale_by="head_dim"` is the usual form); the MLP's activation is x * sigmoid(1.702 x), 'quick_gelu'; the class token,
last stage only, skips the depthwise convolution. Within a stage, the tokens and their map are views of the same memory.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.activation import QuickMlp, activation
from weft.layers.attention import attend
from weft.layers.mlp import DropPath, Mlp
from weft.layers.tokens import join_heads, split_heads, to_map, to_tokens
from weft.models.base import Backbone, head_width, per_stage


class TokenEmbed(nn.Module):
    """Convolutional token embedding (section 3.1): a strided convolution, then LayerNorm over the channels."""

    def __init__(self, in_chans: int, dim: int, kernel_size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride, padding)
        self.norm = nn.LayerNorm(dim)

    def grid(self, before: Grid) -> Grid:
        """The grid of tokens made from a map of this size."""
        return before.conv(self.proj.kernel_size[0], self.proj.stride[0], int(self.proj.padding[0]))

    def forward(self, fmap: Float[Tensor, "b in_chans height width"]) -> Float[Tensor, "b c h w"]:
        fmap = self.proj(fmap.contiguous(memory_format=torch.channels_last))  # tokens are then a view of the map
        return to_map(self.norm(to_tokens(fmap)), (fmap.shape[2], fmap.shape[3]))


class ConvProjection(nn.Module):
    """Depthwise convolution and BatchNorm on the map: the first half of the convolutional projection."""

    def __init__(self, dim: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel_size, stride, kernel_size // 2, groups=dim, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(dim)

    def forward(self, fmap: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m c"]:
        if self.conv.stride != (1, 1) and torch.is_autocast_enabled("cpu"):
            # oneDNN has no backward kernel in bf16 for these; its reference takes 21 ms where fp32 takes 2
            with torch.autocast("cpu", enabled=False):
                return to_tokens(self.bn(self.conv(fmap.float())))
        return to_tokens(self.bn(self.conv(fmap)))


class ConvAttention(nn.Module):
    """Attention whose queries, keys and values come from the map (section 3.2).

    Args:
        dim: channels of a token.
        num_heads: heads; must divide `dim`.
        conv: project by convolution; False: by a linear layer at each place, for keys and values without a stride.
        kernel_size: of the depthwise convolutions.
        kv_stride: stride of those for keys and values.
        qkv_bias: bias in the linear layers of q, k, v.
        scale: factor of the scores.
        num_prefix: class tokens in front of the sequence, 0 or 1.
        drop_rate: dropout of the projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        conv: bool,
        kernel_size: int,
        kv_stride: int,
        qkv_bias: bool,
        scale: float,
        num_prefix: int,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.num_heads, self.scale, self.num_prefix = num_heads, scale, num_prefix
        self.conv_q = ConvProjection(dim, kernel_size, 1) if conv else None
        self.conv_k = ConvProjection(dim, kernel_size, kv_stride) if conv else None
        self.conv_v = ConvProjection(dim, kernel_size, kv_stride) if conv else None
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop_rate)

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        q, k, v = self.project(tokens, grid)
        q, k, v = (split_heads(part, self.num_heads) for part in (self.q(q), self.k(k), self.v(v)))
        gathered = attend(q, k, v, self.scale)
        return self.proj_drop(self.proj(join_heads(gathered)))

    def project(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the linear layers of q (b n c), k and v (b m c); the class token skips convolution."""
        if self.conv_q is None or self.conv_k is None or self.conv_v is None:
            return tokens, tokens, tokens
        if self.num_prefix == 0:
            fmap = to_map(tokens, grid)
            return self.conv_q(fmap), self.conv_k(fmap), self.conv_v(fmap)
        cls_token, places = tokens[:, :1], tokens[:, 1:].contiguous()  # one copy here saves one in each convolution
        q, k, v = (conv(to_map(places, grid)) for conv in (self.conv_q, self.conv_k, self.conv_v))
        return torch.cat([cls_token, q], dim=1), torch.cat([cls_token, k], dim=1), torch.cat([cls_token, v], dim=1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, attn: ConvAttention, mlp: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens), grid))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Stage(nn.Module):
    """Token embedding and the blocks on its grid.

    Args:
        patch_embed: the token embedding.
        blocks: the blocks.
        dim: channels of a token.
        with_cls_token: put a learned token in front.
        pos_grid: learn a position per token of this grid; None: no positions.
        drop_rate: dropout of the embedded tokens.
    """

    def __init__(
        self,
        patch_embed: TokenEmbed,
        blocks: list[Block],
        dim: int,
        with_cls_token: bool,
        pos_grid: Grid | None,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if with_cls_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, pos_grid.tokens, dim)) if pos_grid else None
        self.pos_drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(blocks)

    def embed(self, fmap: Float[Tensor, "b in_chans height width"]) -> tuple[Float[Tensor, "b n c"], tuple[int, int]]:
        """Tokens in front of the blocks, the class token first, and their grid."""
        fmap = self.patch_embed(fmap)
        tokens = to_tokens(fmap)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return self.pos_drop(tokens), (fmap.shape[2], fmap.shape[3])


class CvT(Backbone):
    """Convolutional vision transformer; a classifier and a backbone under timm's contract.

    image -> `stages`: `embed` (`patch_embed` and, in the last stage, the class token), then `blocks` (convolutional
    attention, MLP) -> `finish` (`norm`) -> `pool` -> `head`. Between two stages the tokens are a map again.

    Without position embeddings a built model takes images of any size. Values per stage may be given as one for all.

    Args:
        img_size: pixels, an int or (height, width); fixed only where a stage has a position embedding.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: 'token' (the class token), 'avg' (mean of the last tokens; no class token is built) or ''.
        embed_dim: channels per stage.
        depth: blocks per stage.
        num_heads: heads per stage; must divide `embed_dim`.
        mlp_ratio: hidden width of the MLP over `embed_dim`, per stage.
        embed_kernel, embed_stride, embed_padding: of the token embedding, per stage; kernels equal to the strides with
            no padding are plain patches.
        conv_proj: convolutional projection, per stage; False: linear.
        proj_kernel: its kernel size, odd, per stage.
        kv_stride: its stride for keys and values, per stage.
        qkv_bias: bias in the linear layers of q, k, v, per stage.
        pos_embed: learned position embedding, per stage.
        scale_by: 'embed_dim' (released) or 'head_dim': scores are multiplied by that width to the power -0.5.
        act_layer: activation of the MLP, a timm name.
        drop_rate: dropout of embeddings, projections and in front of the head, in [0, 1).
        drop_path_rate: stochastic depth per stage, growing linearly from 0 inside it; a single number is for the last
            stage, the others have none (released recipes).

    Raises:
        UsageError: the image is too small for the strides, or sizes do not divide.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: tuple[int, ...] = (64, 192, 384),
        depth: tuple[int, ...] = (1, 2, 10),
        num_heads: tuple[int, ...] = (1, 3, 6),
        mlp_ratio: float | tuple[float, ...] = 4.0,
        embed_kernel: tuple[int, ...] = (7, 3, 3),
        embed_stride: tuple[int, ...] = (4, 2, 2),
        embed_padding: tuple[int, ...] = (2, 1, 1),
        conv_proj: bool | tuple[bool, ...] = True,
        proj_kernel: int | tuple[int, ...] = 3,
        kv_stride: int | tuple[int, ...] = 2,
        qkv_bias: bool | tuple[bool, ...] = True,
        pos_embed: bool | tuple[bool, ...] = False,
        scale_by: str = "embed_dim",
        act_layer: str = "quick_gelu",
        drop_rate: float = 0.0,
        drop_path_rate: float | tuple[float, ...] = 0.0,
    ) -> None:
        pools = ("token", "avg") if global_pool == "token" else ("avg",)
        super().__init__(img_size, in_chans, num_classes, embed_dim[-1], global_pool, pools, drop_rate)
        self.num_prefix = 1 if global_pool == "token" else 0
        count = len(embed_dim)
        if scale_by not in ("embed_dim", "head_dim"):
            raise UsageError(f"scale_by must be 'embed_dim' or 'head_dim'; got {scale_by!r}.")
        if not isinstance(drop_path_rate, (tuple, list)):
            drop_path_rate = (*[0.0] * (count - 1), drop_path_rate)
        rows = per_stage(
            count, dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, embed_kernel=embed_kernel,
            embed_stride=embed_stride, embed_padding=embed_padding, conv_proj=conv_proj, proj_kernel=proj_kernel,
            kv_stride=kv_stride, qkv_bias=qkv_bias, pos_embed=pos_embed, drop_path_rate=drop_path_rate,
        )  # fmt: skip

        self.stages = nn.ModuleList()
        grid, reduction, chans = self.img_size, 1, in_chans
        for i, row in enumerate(rows):
            dim, num_prefix = row.dim, self.num_prefix if i == count - 1 else 0
            head_dim = head_width(dim, row.num_heads, f"[{i}]")
            if row.proj_kernel % 2 == 0:
                raise UsageError(
                    f"proj_kernel[{i}] must be odd, so that queries keep their grid; got {row.proj_kernel}."
                )
            patch_embed = TokenEmbed(chans, dim, row.embed_kernel, row.embed_stride, row.embed_padding)
            grid = patch_embed.grid(grid)
            scale = (dim if scale_by == "embed_dim" else head_dim) ** -0.5
            blocks = []
            for drop_path in torch.linspace(0, row.drop_path_rate, row.depth, device="cpu").tolist():
                attn = ConvAttention(
                    dim, row.num_heads, row.conv_proj, row.proj_kernel, row.kv_stride, row.qkv_bias, scale, num_prefix,
                    drop_rate,
                )  # fmt: skip
                mlp: nn.Module = QuickMlp(dim, int(dim * row.mlp_ratio), drop_rate)
                if act_layer != "quick_gelu":
                    mlp = Mlp(dim, int(dim * row.mlp_ratio), act_layer=activation(act_layer), drop=drop_rate)
                blocks.append(Block(dim, attn, mlp, drop_path))
            pos_grid = grid if row.pos_embed else None
            self.stages.append(Stage(patch_embed, blocks, dim, num_prefix > 0, pos_grid, drop_rate))
            chans, reduction = dim, reduction * row.embed_stride
            self.feature_info.append(dict(num_chs=dim, reduction=reduction, module=f"stages.{i}"))
        self.norm = nn.LayerNorm(embed_dim[-1])
        self.grids = self.grids_of(self.img_size)
        self._init_weights()
        self.build_head(num_classes)

    def encode(
        self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None
    ) -> list[tuple[Tensor, tuple[int, int]]]:
        """Per stage: its tokens (b n c), a class token first, and their grid."""
        if self.positions():
            self.check_image_size(image)
        taps: list[tuple[Tensor, tuple[int, int]]] = []
        for stage in self._stages(levels):
            tokens, grid = stage.embed(to_map(*taps[-1]) if taps else image)
            for block in stage.blocks:
                tokens = self.run_block(block, tokens, grid)
            taps.append((tokens, grid))
        return taps

    def finish(self, taps: list[tuple[Tensor, tuple[int, int]]]) -> Float[Tensor, "b n c"]:
        """Normed tokens of the last stage, the class token first."""
        return self.norm(taps[-1][0])

    def grids_of(self, img_size: Grid) -> list[Grid]:
        """Return the grid of each stage."""
        grids: list[Grid] = []
        for stage in self._stages():
            grids.append(stage.patch_embed.grid(grids[-1] if grids else img_size))
        if grids[-1].tokens == 0:
            raise UsageError(
                f"img_size must leave at least one token in the last stage; got {img_size}, which leaves "
                f"{', '.join(map(str, grids))}. Use larger images: one last token covers "
                f"{self.feature_info[-1]['reduction']} pixels per side."
            )
        return grids

    def positions(self) -> dict[str, int]:
        """Return the position embeddings of stages that have one."""
        return {f"stages.{i}.pos_embed": i for i, stage in enumerate(self.stages) if stage.pos_embed is not None}

    def drop_levels(self, count: int, keep_head: bool) -> None:
        """Drop the last stages, and the class token with them."""
        super().drop_levels(count, keep_head)
        if self._stages()[-1].cls_token is None:
            self.num_prefix, self.pools, self.global_pool = 0, ("avg",), "avg" if self.global_pool else ""

    def make_head(self, num_classes: int) -> nn.Module:
        """The linear head; its bias keeps torch's default, as released."""
        if num_classes == 0:
            return nn.Identity()
        head = nn.Linear(self.num_features, num_classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        return head

    def _init_weights(self) -> None:
        """As released: linear layers and the class token by a truncated normal, convolutions by torch's default."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("cls_token", "pos_embed")):
                nn.init.trunc_normal_(parameter, std=0.02)

    def _stages(self, count: int | None = None) -> list[Stage]:
        return cast("list[Stage]", list(self.stages)[:count])
