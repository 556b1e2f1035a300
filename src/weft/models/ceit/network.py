"""CeiT: the convolution-enhanced image transformer (Yuan et al. 2021, arXiv 2103.11816).

A ViT with convolution woven in at three places, each of which a constructor value takes out again:

1. Image-to-tokens (I2T): patches are cut from a small convolutional feature map instead of the raw image.
2. Locally-enhanced feed-forward (LeFF): between the two linear layers, patch tokens go back to their grid, and a
   depthwise convolution mixes neighbours.
3. Layer-wise class-token attention (LCA): the class tokens of all blocks are stacked, and the last one attends to them.

Paper -> here:  C -> embed_dim   L -> depth   P -> patch_size   e -> mlp_ratio   k -> leff_kernel   D -> stem_chans
    x_c^(l) -> class token after block l   I2T -> ImageToTokens   LeFF -> LeFF   LCA -> LayerwiseClassAttention
Sizes: Table 2 and the released code, in `weft.models.ceit`.

As in the released code, and unlike the paper: 64 stem channels (paper: 32); no GELU after the last BatchNorm of LeFF
(`leff_final_act=True` is the paper's form), whose residual adds the normalized class token (`leff_pass_cls=False`: adds
nothing to it); a learned embedding of the layer in LCA (`lca_embed=False` leaves it out).
Everything off (`stem_convs=(), leff_kernel=0, lca=False`) is DeiT, under timm's names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import attend
from weft.layers.mlp import DropPath, Mlp
from weft.layers.tokens import join_heads, split_heads, to_map, to_tokens
from weft.models.base import Backbone, head_width

NORM_EPS = 1e-6  # of every LayerNorm, as released


class ImageToTokens(nn.Module):
    """Convolutions, BatchNorm and a max-pool, then patches of the resulting map (section 3.1).

    Args:
        in_chans: channels of the image.
        embed_dim: channels of a token.
        patch_size: pixels of the image per side and token.
        chans: channels of the convolutions.
        convs: (kernel size, stride) of each; none: plain patches of the image.
        pool: a 3x3 max-pool of stride 2 behind the convolutions.
        norm: BatchNorm in front of the pool.
    """

    def __init__(
        self,
        in_chans: int,
        embed_dim: int,
        patch_size: int,
        chans: int,
        convs: tuple[tuple[int, int], ...],
        pool: bool,
        norm: bool,
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        reduction = 1
        for kernel_size, stride in convs:
            self.convs.append(nn.Conv2d(in_chans, chans, kernel_size, stride, kernel_size // 2, bias=False))
            in_chans, reduction = chans, reduction * stride
        self.norm = nn.BatchNorm2d(chans) if convs and norm else nn.Identity()
        self.pool = nn.MaxPool2d(3, 2, 1) if convs and pool else nn.Identity()
        reduction *= 2 if convs and pool else 1
        if patch_size % reduction:
            raise UsageError(f"patch_size must be a multiple of the stem's stride; got {patch_size} and {reduction}.")
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size // reduction, patch_size // reduction)

    def grid(self, img_size: Grid) -> Grid:
        """The grid of tokens that an image of this size gives."""
        for window in (*self.convs, self.pool, self.proj):
            if isinstance(window, (nn.Conv2d, nn.MaxPool2d)):
                sides = (window.kernel_size, window.stride, window.padding)
                img_size = img_size.conv(*(side if isinstance(side, int) else int(side[0]) for side in sides))
        return img_size

    def forward(self, image: Float[Tensor, "b in_chans height width"]) -> Float[Tensor, "b n c"]:
        # Channels last: on CPU, the pool takes a twentieth of the time, and tokens are a view of the last map.
        fmap = image.contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            fmap = conv(fmap)
        return to_tokens(self.proj(self.pool(self.norm(fmap))))


class Attention(nn.Module):
    """Multi-head self-attention, as in ViT. LCA, and the last block of a folded network, compute it for one token."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, drop_rate: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, head_width(dim, num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop_rate)

    def forward(
        self, tokens: Float[Tensor, "b n c"], token: Float[Tensor, "b 1 c"] | None = None
    ) -> Float[Tensor, "b m c"]:
        """Attention from `token`, or from every token, to all tokens."""
        if token is None:
            q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        else:  # of the fused matrix, the token needs the rows that make queries, the others those of keys and values
            rows = [self.proj.in_features, 2 * self.proj.in_features]
            q_weight, kv_weight = self.qkv.weight.split(rows)
            q_bias, kv_bias = (None, None) if self.qkv.bias is None else self.qkv.bias.split(rows)
            q = F.linear(token, q_weight, q_bias)
            k, v = F.linear(tokens, kv_weight, kv_bias).chunk(2, dim=-1)
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, v))
        return self.proj_drop(self.proj(join_heads(attend(q, k, v, self.scale))))


class LeFF(nn.Module):
    """Locally-enhanced feed-forward (section 3.2): expand, depthwise convolution on the grid, project.

    The paper's linear layers are 1x1 convolutions in the released code; they are linear here, and the grid is only
    another view of the same memory.

    Args:
        dim: channels of a token.
        hidden_dim: channels between the linear layers.
        kernel_size: of the depthwise convolution, odd.
        norm: BatchNorm after each of the three.
        final_act: GELU also after the last BatchNorm, as in the paper.
        pass_cls: the branch returns its class token unchanged, so that the residual adds the normalized token (released
            code); False: the residual does not change the class token, as in the paper.
    """

    def __init__(
        self, dim: int, hidden_dim: int, kernel_size: int, norm: bool, final_act: bool, pass_cls: bool
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.norm1 = nn.BatchNorm2d(hidden_dim) if norm else nn.Identity()
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, kernel_size, 1, kernel_size // 2, groups=hidden_dim)
        self.norm2 = nn.BatchNorm2d(hidden_dim) if norm else nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.norm3 = nn.BatchNorm2d(dim) if norm else nn.Identity()
        self.act = nn.GELU()
        self.final_act = nn.GELU() if final_act else nn.Identity()
        self.pass_cls = pass_cls

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        patches = tokens[:, 1:].contiguous()
        hidden = self.act(self.norm1(to_map(self.fc1(patches), grid)))
        hidden = self.act(self.norm2(self.dwconv(hidden)))
        patches = self.final_act(self.norm3(to_map(self.fc2(to_tokens(hidden)), grid)))
        cls_token = tokens[:, :1] if self.pass_cls else torch.zeros_like(tokens[:, :1])
        return torch.cat([cls_token, to_tokens(patches)], dim=1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); the feed-forward is LeFF, or a plain MLP without one."""

    def __init__(self, dim: int, attn: nn.Module, mlp: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)
        self.is_local = isinstance(mlp, LeFF)

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> Float[Tensor, "b n c"]:
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        normed = self.norm2(tokens)
        return tokens + self.drop_path(self.mlp(normed, grid) if self.is_local else self.mlp(normed))


class LayerwiseClassAttention(nn.Module):
    """LCA (section 3.3): the class token of the last layer attends to the class tokens of all layers.

    Args:
        dim: channels of a token.
        depth: number of layers.
        num_heads: heads of the attention.
        mlp_ratio: hidden width of the feed-forward over `dim`.
        qkv_bias: bias in q, k, v.
        embed: learned embedding per layer, zero at first (released code; not in the paper).
    """

    def __init__(self, dim: int, depth: int, num_heads: int, mlp_ratio: float, qkv_bias: bool, embed: bool) -> None:
        super().__init__()
        self.layer_embed = nn.Parameter(torch.zeros(1, depth, dim)) if embed else None
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, num_heads, qkv_bias, drop_rate=0.0)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, cls_tokens: Float[Tensor, "b l c"]) -> Float[Tensor, "b 1 c"]:
        if self.layer_embed is not None:
            cls_tokens = cls_tokens + self.layer_embed
        normed = self.norm1(cls_tokens)
        last = cls_tokens[:, -1:] + self.attn(normed, normed[:, -1:])
        return last + self.mlp(self.norm2(last))


class CeiT(Backbone):
    """Convolution-enhanced image transformer; a classifier and a backbone under timm's contract.

    image -> `embed` (`patch_embed` is I2T; class token, positions) -> `blocks` (attention, LeFF) -> `finish` (`lca` of
    the class tokens of all blocks, `norm`) -> `pool` -> `head`

    Args:
        img_size: pixels, an int or (height, width); not necessarily a multiple of `patch_size`.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: 'token' (the class token), 'avg' (mean of the patch tokens) or ''.
        patch_size: pixels per side of one token.
        stem_convs, stem_chans, stem_pool, stem_norm: see `ImageToTokens`.
        embed_dim: channels of a token.
        depth: number of blocks.
        num_heads: heads of attention, also in LCA; must divide `embed_dim`.
        mlp_ratio: hidden width of the feed-forward over `embed_dim`, also in LCA.
        qkv_bias: bias in q, k, v.
        leff_kernel: of the depthwise convolution, odd; 0: a plain MLP.
        leff_norm, leff_final_act, leff_pass_cls: see `LeFF`.
        lca: layer-wise class-token attention; False: the class token of the last block.
        lca_embed: see `LayerwiseClassAttention`.
        drop_rate: dropout of embeddings, projections and in front of the head, in [0, 1).
        drop_path_rate: stochastic depth of the last block, growing linearly from 0, in [0, 1).

    Raises:
        UsageError: the image is smaller than one patch, or sizes do not divide.
    """

    num_prefix = 1

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        patch_size: int = 16,
        stem_convs: tuple[tuple[int, int], ...] = ((7, 2),),
        stem_chans: int = 64,
        stem_pool: bool = True,
        stem_norm: bool = True,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        leff_kernel: int = 3,
        leff_norm: bool = True,
        leff_final_act: bool = False,
        leff_pass_cls: bool = True,
        lca: bool = True,
        lca_embed: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim, global_pool, ("token", "avg"), drop_rate)
        if leff_kernel and leff_kernel % 2 == 0:
            raise UsageError(f"leff_kernel must be odd, so that the map keeps its size, or 0; got {leff_kernel}.")
        self.patch_embed = ImageToTokens(in_chans, embed_dim, patch_size, stem_chans, stem_convs, stem_pool, stem_norm)
        self.patch_size = patch_size
        self.grids = self.grids_of(self.img_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid.tokens, embed_dim))
        self.pos_drop = nn.Dropout(drop_rate)

        hidden_dim = int(embed_dim * mlp_ratio)
        self.blocks = nn.ModuleList()
        for i, drop_path in enumerate(torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()):
            attn = Attention(embed_dim, num_heads, qkv_bias, drop_rate)
            mlp: nn.Module = Mlp(embed_dim, hidden_dim, drop=drop_rate)
            if leff_kernel:
                mlp = LeFF(embed_dim, hidden_dim, leff_kernel, leff_norm, leff_final_act, leff_pass_cls)
            self.blocks.append(Block(embed_dim, attn, mlp, drop_path))
            self.feature_info.append(dict(num_chs=embed_dim, reduction=patch_size, module=f"blocks.{i}"))
        self.lca: nn.Module | None = None
        if lca:
            self.lca = LayerwiseClassAttention(embed_dim, depth, num_heads, mlp_ratio, qkv_bias, lca_embed)
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self._init_weights()
        self.build_head(num_classes)

    def encode(
        self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None
    ) -> list[tuple[Tensor, Grid]]:
        """Tokens behind each block, the class token first, and their grid."""
        tokens, taps = self.embed(image), []
        for block in self.blocks[:levels]:
            tokens = self.run_block(block, tokens, self.grid)
            taps.append((tokens, self.grid))
        return taps

    def finish(self, taps: list[tuple[Tensor, Grid]]) -> Float[Tensor, "b n c"]:
        """Patch tokens of the last block; in front, the class token that LCA made of those of all blocks."""
        tokens, _ = taps[-1]
        if self.lca is not None:
            # The last block's patch tokens stay connected: its LeFF gets a gradient of zero, as released, not none.
            cls_token = self.lca(torch.stack([tap[:, 0] for tap, _ in taps], dim=1))
            tokens = torch.cat([cls_token, tokens[:, 1:]], dim=1)
        return self.norm(tokens)

    def embed(self, image: Float[Tensor, "b in_chans height width"]) -> Float[Tensor, "b n c"]:
        """Return the tokens in front of the blocks, the class token first."""
        self.check_image_size(image)
        patches = self.patch_embed(image)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.pos_drop(tokens + self.pos_embed)

    @property
    def grid(self) -> Grid:
        """The grid of the patch tokens."""
        return self.grids[0]

    def grids_of(self, img_size: Grid) -> list[Grid]:
        """Return the one grid of all blocks."""
        grid = self.patch_embed.grid(img_size)
        if grid.tokens == 0:
            raise UsageError(
                f"img_size must leave at least one patch of {self.patch_size}x{self.patch_size}; got {img_size}. "
                f"Use images of at least {self.patch_size} pixels per side."
            )
        return [grid]

    def positions(self) -> dict[str, int]:
        """Return the position embedding; one position is that of the class token."""
        return {"pos_embed": 0}

    def drop_levels(self, count: int, keep_head: bool) -> None:
        """Drop the last blocks, and without a head LCA."""
        super().drop_levels(count, keep_head)
        self.lca = self.lca if keep_head else None

    def _init_weights(self) -> None:
        """As released: linear layers and embeddings by a truncated normal, convolutions and LeFF by torch's default."""
        for name, module in self.named_modules():
            in_leff = isinstance(self.get_submodule(name.rpartition(".")[0]), LeFF)
            if isinstance(module, nn.Linear) and not in_leff:
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
