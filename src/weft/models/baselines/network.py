"""Grafted hybrids: the first stages of ResNet-50 under the last layers of DeiT-S (LeViT paper, section 3, Table 1).

The experiment that LeViT grew from: with a fixed time budget, how many convolutional stages should come before the
transformer? The map behind `num_stages` stages is average-pooled to one place per 16x16 pixels, projected to DeiT-S's
width, and gets class token (and distillation token) and positions there.

With 0 stages this is DeiT-S, with 4 and no layers it is ResNet-50. The paper's parameter counts for 1 to 3 stages are
those with a second head for the teacher (`distilled=True`), the default here. Layers and blocks are timm's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import timm
import torch
from jaxtyping import Float
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.tokens import to_tokens
from weft.models.base import Backbone

STAGE_CHANS = (64, 256, 512, 1024, 2048)  # behind the stem and each stage of ResNet-50
STAGE_STRIDES = (4, 4, 8, 16, 32)


class Grafted(Backbone):
    """ResNet-50's first stages, then DeiT-S's last layers; a classifier and a backbone under timm's contract.

    Args:
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
        num_classes: width of the heads; 0 for none.
        global_pool: 'token' (the class token; with no layers, the mean of the map), 'avg' (mean of the tokens) or ''.
        num_stages: stages of ResNet-50 kept, 0 (patches of 16x16 pixels) to 4.
        depth: layers of DeiT-S kept.
        embed_dim: channels of a token.
        num_heads: heads; must divide `embed_dim`.
        distilled: a second token and head; in training both return logits, in evaluation their mean.
        drop_rate: dropout in front of the heads, in [0, 1).
        drop_path_rate: stochastic depth of the last layer, growing linearly from 0, in [0, 1).

    Raises:
        UsageError: the image is smaller than one token, or `num_stages` is out of range.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        num_stages: int = 2,
        depth: int = 6,
        embed_dim: int = 384,
        num_heads: int = 6,
        distilled: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if not 0 <= num_stages <= 4:
            raise UsageError(f"num_stages must be 0 to 4, the stages of ResNet-50; got {num_stages}.")
        if depth == 0 and num_stages == 0:
            raise UsageError("num_stages and depth must not both be 0: no network is left. Keep a stage or a layer.")
        with_tokens = depth > 0
        width = embed_dim if with_tokens else STAGE_CHANS[num_stages]
        with_two = distilled and with_tokens
        super().__init__(img_size, in_chans, num_classes, width, global_pool, ("token", "avg"), drop_rate, with_two)
        self.num_stages = num_stages
        self.cls_token: nn.Parameter | None = None
        self.dist_token: nn.Parameter | None = None
        self.pos_embed: nn.Parameter | None = None
        self.num_prefix = (2 if self.distilled else 1) if with_tokens else 0
        self.stem, self.stages = nn.Sequential(), nn.ModuleList()
        if num_stages:
            resnet: Any = timm.create_model("resnet50", in_chans=in_chans, num_classes=0)
            self.stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.act1, resnet.maxpool)
            self.stages = nn.ModuleList(getattr(resnet, f"layer{i + 1}") for i in range(num_stages))
        self.grids = self.grids_of(self.img_size)
        self.norm: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList()
        for i in range(num_stages):
            self.feature_info.append(
                dict(num_chs=STAGE_CHANS[i + 1], reduction=STAGE_STRIDES[i + 1], module=f"stages.{i}")
            )
        if with_tokens:
            self._build_transformer(embed_dim, depth, num_heads, drop_path_rate)
        self.build_head(num_classes)

    def _build_transformer(self, embed_dim: int, depth: int, num_heads: int, drop_path_rate: float) -> None:
        reduction = max(16, STAGE_STRIDES[self.num_stages])
        self.pool_map: nn.Module = nn.Identity()
        if self.num_stages:  # one place per 16x16 pixels, then a projection
            self.pool_map = nn.AvgPool2d(reduction // STAGE_STRIDES[self.num_stages])
            self.proj = nn.Conv2d(STAGE_CHANS[self.num_stages], embed_dim, 1)
        else:
            self.proj = nn.Conv2d(self.in_chans, embed_dim, 16, 16)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.dist_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if self.distilled else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix + self.grid.tokens, embed_dim))
        norm_layer = cast("type[nn.Module]", partial(nn.LayerNorm, eps=1e-6))
        for i, drop_path in enumerate(torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()):
            block = Block(embed_dim, num_heads, qkv_bias=True, drop_path=drop_path, norm_layer=norm_layer)
            self.blocks.append(block)
            self.feature_info.append(dict(num_chs=embed_dim, reduction=reduction, module=f"blocks.{i}"))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)

    def forward_head(self, x: Float[Tensor, "b n c"], pre_logits: bool = False) -> Any:
        """Features to logits; with two heads in training: to (logits, logits of the teacher's head)."""
        if self.head_dist is None or self.global_pool != "token":
            x = self.head_drop(self.pool(x))
            return x if pre_logits else self.head(x)
        cls_token, dist_token = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits or self.num_classes == 0:
            return (cls_token + dist_token) / 2
        return self.join_logits(self.head(cls_token), self.head_dist(dist_token))

    def encode(self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None) -> list[Tensor]:
        """Maps of the convolutional stages, then tokens of the layers, distillation token second."""
        if self.pos_embed is not None:
            self.check_image_size(image)
        taps, fmap = [], self.stem(image)
        for stage in self.stages[:levels]:
            fmap = self.run_block(stage, fmap)
            taps.append(fmap)
        num_blocks = len(self.blocks) if levels is None else max(0, levels - len(self.stages))
        if self.pos_embed is None or num_blocks == 0:
            return taps
        tokens = to_tokens(self.proj(self.pool_map(fmap)))
        prefix = [token for token in (self.cls_token, self.dist_token) if token is not None]
        tokens = torch.cat([*(token.expand(tokens.shape[0], -1, -1) for token in prefix), tokens], dim=1)
        tokens = tokens + self.pos_embed
        for block in self.blocks[:num_blocks]:
            tokens = self.run_block(block, tokens)
            taps.append(tokens)
        return taps

    def finish(self, taps: list[Tensor]) -> Float[Tensor, "b n c"]:
        return self.norm(taps[-1]) if len(self.blocks) else to_tokens(taps[-1])

    def as_fmap(self, tap: Any, level: int, norm: bool) -> Float[Tensor, "b c h w"]:
        return tap if level < len(self.stages) else super().as_fmap((tap, self.grid), level, norm)

    @property
    def grid(self) -> Grid:
        """The grid of the tokens."""
        return self.grids[0]

    def grids_of(self, img_size: Grid) -> list[Grid]:
        """Return the grid of the tokens."""
        if self.num_stages == 0:
            grid = img_size.conv(16, 16, 0)
        else:
            grid = img_size.conv(7, 2, 3).conv(3, 2, 1)
            for _ in range(self.num_stages - 1):
                grid = grid.conv(3, 2, 1)
            window = max(1, 16 // STAGE_STRIDES[self.num_stages])
            grid = grid.conv(window, window, 0)
        if grid.tokens == 0:
            raise UsageError(f"img_size must leave at least one token of 16x16 pixels; got {img_size}.")
        return [grid]

    def positions(self) -> dict[str, int]:
        """Return the position embedding, which includes the prefix tokens."""
        return {} if self.pos_embed is None else {"pos_embed": 0}

    def drop_levels(self, count: int, keep_head: bool) -> None:
        """Drop the last blocks and stages; with convolutional stages alone there are no tokens and no second head."""
        num_blocks = max(0, count - len(self.stages))
        self.stages, self.blocks = self.stages[:count], self.blocks[:num_blocks]
        if num_blocks == 0:
            self.cls_token = self.dist_token = self.pos_embed = self.head_dist = None
            self.pool_map, self.proj = nn.Identity(), nn.Identity()
            self.num_prefix, self.distilled = 0, False

    def default_levels(self) -> tuple[int, ...]:
        """All convolutional stages, and the last layer; without stages four layers, evenly spread."""
        num_stages, depth = len(self.stages), len(self.blocks)
        return (*range(num_stages), num_stages + depth - 1) if num_stages and depth else super().default_levels()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^stem\.",
            blocks=[
                (r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)", None),
                (r"^(?:proj\.|cls_token|dist_token|pos_embed)", (9,)),
                (r"^blocks\.(\d+)", (10,)),
                (r"^(?:norm|head|head_dist)\.", (99999,)),
            ],
        )
