"""Backbone: timm's model contract, implemented once for all networks.

A family implements how an image becomes tokens, level by level (`encode`), how these become features (`finish`), on
which grids the tokens are (`grids_of`), and which learned positions belong to which grid (`positions`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.position import guess_grid, resize_positions
from weft.layers.tokens import to_map
from weft.lazy import LazyModule

timm_features: Any = LazyModule("timm.models._features")  # its import takes longer than that of torch


class CamTarget(NamedTuple):
    """The last map of a network, for Grad-CAM.

    Attributes:
        module: module whose output it is, as a map (b c h w) or as tokens (b n c).
        prefix: number of tokens in front that have no place on the map.
        grid_of: function of the arguments of the module's call -> height and width of the map.
    """

    module: nn.Module
    prefix: int
    grid_of: Callable[[tuple[Any, ...]], tuple[int, int]]


def per_stage(count: int, **values: Any) -> list[SimpleNamespace]:
    """Return the values of each stage, by name: a single value is that of all, a sequence must have `count` entries."""
    columns = {}
    for name, value in values.items():
        columns[name] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
        if len(columns[name]) != count:
            raise UsageError(
                f"{name} must have one value per stage, {count} in all; got {len(columns[name])}: {value!r}."
            )
    return [SimpleNamespace(**{name: column[i] for name, column in columns.items()}) for i in range(count)]


def head_width(embed_dim: int, num_heads: int, where: str = "") -> int:
    """Return the width of one attention head.

    Raises:
        UsageError: `embed_dim` cannot be cut into `num_heads` equal parts.
    """
    if embed_dim % num_heads:
        raise UsageError(f"embed_dim{where} must be divisible by num_heads{where}; got {embed_dim} and {num_heads}.")
    return embed_dim // num_heads


class Backbone(nn.Module, ABC):
    """An image classifier that is also a backbone.

    image -> `encode` -> tokens and grid of each level -> `finish` -> features -> `pool` -> `head` -> logits

    Args:
        img_size: pixels, an int or (height, width).
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        num_features: channels of the last level.
        global_pool: how tokens become one vector, one of `pools`; '' for not at all.
        pools: what this family can do.
        drop_rate: dropout in front of the head.
        distilled: a second head, trained on a teacher's predictions.
    """

    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]
    arguments: dict[str, Any]  # all constructor arguments, with the defaults, as the network was built
    head: nn.Module
    weft_name: str
    norm_name = "norm"  # the final norm
    num_prefix = 0  # tokens of the last level that have no place on its map, such as a class token: the first ones

    def __new__(cls, *args: Any, **kwargs: Any) -> Backbone:
        bound = inspect.signature(cls).bind_partial(*args, **kwargs)  # refuses what `__init__` has not
        bound.apply_defaults()
        network = super().__new__(cls)
        network.arguments = bound.arguments
        return network

    def __init__(
        self,
        img_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        num_features: int,
        global_pool: str,
        pools: tuple[str, ...],
        drop_rate: float,
        distilled: bool = False,
    ) -> None:
        super().__init__()
        self.img_size = Grid.of(img_size)
        self.grids: list[Grid] = []  # of tokens at this size, from the first to the last
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = num_features
        self.pools = pools
        self.global_pool = self._checked_pool(global_pool)
        self.drop_rate = drop_rate
        self.head_drop = nn.Dropout(drop_rate)
        self.grad_checkpointing = False
        self.distilled = self.distilled_training = distilled
        self.head_dist: nn.Module | None = None
        self.feature_info: list[dict[str, Any]] = []
        self.model_args: dict[str, Any] = {}  # what `create_model` was given: enough to build this model again

    # Every family implements these

    @abstractmethod
    def encode(self, image: Float[Tensor, "b in_chans height width"], levels: int | None = None) -> list[Any]:
        """Return tokens (b n c) and their grid (height, width), of each of the first `levels` levels (None: of all)."""

    @abstractmethod
    def finish(self, taps: list[Any]) -> Tensor:
        """Return normalized, unpooled features (b n num_features), from the outputs of all levels."""

    # A family may replace these, down to `group_matcher`

    def grids_of(self, img_size: Grid) -> list[Grid]:
        """Return the grids of tokens for an image size; raise a UsageError if no token is left."""
        return []

    def positions(self) -> dict[str, int]:
        """Return the names of learned positions, and the grid that each is for, as an index of `grids`."""
        return {}

    def as_fmap(self, tap: Any, level: int, norm: bool) -> Float[Tensor, "b c h w"]:
        """Return the output of a level as a map, without prefix tokens; with the final norm, if it has that width."""
        tokens, (height, width) = tap
        if norm and self.feature_info[level]["num_chs"] == self.num_features:
            tokens = getattr(self, self.norm_name)(tokens)
        return to_map(tokens[:, -height * width :], (height, width))

    def pool(self, features: Tensor) -> Tensor:
        """Features (b n c) to one vector per image (b c): the class token, if there is one and `global_pool` is
        'token', or the mean of all tokens that have a place."""
        if self.global_pool == "token" and self.num_prefix:
            return features[:, 0]
        return features[:, self.num_prefix :].mean(dim=1) if self.global_pool else features

    def drop_levels(self, count: int, keep_head: bool) -> None:
        """Drop the modules that only levels beyond the first `count` need, or only the head if that is not kept."""
        name = self.feature_info[count - 1]["module"].partition(".")[0]
        setattr(self, name, getattr(self, name)[:count])

    def default_levels(self) -> tuple[int, ...]:
        """Return the levels that `features_only` returns: all if there are at most four, else four, evenly spread."""
        count = len(self.feature_info)
        return tuple(range(count)) if count <= 4 else tuple((i + 1) * count // 4 - 1 for i in range(4))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns from parameter names to layer groups, from stem to head (timm's layer-wise decay)."""
        in_stages = [] if coarse else [(r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        blocks = [*in_stages, (r"^stages\.(\d+)\.", (0,)), (r"^blocks\.(\d+)", None), (r".", (99999,))]
        return dict(stem=r"^(?:stages\.0\.)?(?:stem|patch_embed|cls_token|pos_embed)", blocks=blocks)

    def forward_features(self, x: Float[Tensor, "b in_chans height width"]) -> Float[Tensor, "b n c"]:
        """Return unpooled features."""
        return self.finish(self.encode(x))

    def forward_head(self, x: Float[Tensor, "b n c"], pre_logits: bool = False) -> Any:
        """Features to logits (b num_classes), or to the vector in front of the head: (b head_hidden_size).

        A network with two heads returns (logits, logits of the teacher's head) in training, and their mean otherwise.
        """
        x = self.head_drop(self.pool(x))
        if pre_logits or self.num_classes == 0:
            return x
        return self.head(x) if self.head_dist is None else self.join_logits(self.head(x), self.head_dist(x))

    def forward(self, x: Float[Tensor, "b in_chans height width"]) -> Tensor | tuple[Tensor, Tensor]:
        """Images to logits (b num_classes), or those of two heads."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Float[Tensor, "b in_chans height width"],
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return features, and the maps of chosen levels.

        Args:
            x: images.
            indices: levels wanted: a list, the last n of them (int), or all (None).
            norm: apply the final norm to the maps whose width fits.
            stop_early: run only up to the last chosen level; the features are then the map of that level.
            output_fmt: 'NCHW', the only layout offered.
            intermediates_only: return only the maps.
        """
        if output_fmt != "NCHW":
            raise UsageError(f"output_fmt must be 'NCHW'; got {output_fmt!r}.")
        take, last = timm_features.feature_take_indices(len(self.feature_info), indices)
        taps = self.encode(x, last + 1 if stop_early else None)
        fmaps = [self.as_fmap(taps[level], level, norm) for level in take]
        if intermediates_only:
            return fmaps
        if len(taps) < len(self.feature_info):
            return self.as_fmap(taps[-1], len(taps) - 1, norm), fmaps
        return self.finish(taps), fmaps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the modules that only levels beyond `indices` need; return the indices, counted from 0."""
        take, last = timm_features.feature_take_indices(len(self.feature_info), indices)
        keep_head = last == len(self.feature_info) - 1 and not prune_head
        self.drop_levels(last + 1, keep_head)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm or self.feature_info[-1]["num_chs"] != self.num_features:
            setattr(self, self.norm_name, nn.Identity())
        self.num_features = self.head_hidden_size = self.feature_info[-1]["num_chs"]
        if not keep_head:
            self.reset_classifier(0)
        return list(take)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """Return the head; of a network with two: (classes, teacher)."""
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def set_distilled_training(self, enable: bool = True) -> None:
        """Set whether two heads return separate logits in training."""
        self.distilled_training = enable

    def join_logits(self, logits: Tensor, logits_dist: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits of two heads: in training both, for two losses; otherwise their mean."""
        if self.training and self.distilled_training:
            return logits, logits_dist
        return (logits + logits_dist) / 2

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for `num_classes` (0: none), on the model's device and in its dtype."""
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
        self.num_classes = num_classes
        like = next(self.parameters())
        self.build_head(num_classes)
        for module in self.head_modules():
            module.to(device=like.device, dtype=like.dtype).train(self.training)

    def build_head(self, num_classes: int) -> None:
        """Build the head, or both if there are two."""
        self.head = self.make_head(num_classes)
        if self.distilled:
            self.head_dist = self.make_head(num_classes)

    def make_head(self, num_classes: int) -> nn.Module:
        """Return a new linear layer, initialised as the heads of vision transformers; an identity for 0 classes."""
        if num_classes == 0:
            return nn.Identity()
        head = nn.Linear(self.num_features, num_classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def head_modules(self) -> tuple[nn.Module, ...]:
        """Return the one or two heads."""
        return (self.head,) if self.head_dist is None else (self.head, self.head_dist)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of blocks in the backward pass instead of storing them."""
        self.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the size of the images, an int or (height, width); learned positions are resized."""
        size = Grid.of(img_size)
        grids = self.grids_of(size)
        for name, level in self.positions().items():
            if grids[level] != self.grids[level]:
                own = self.get_parameter(name)
                resized = resize_positions(own.detach(), self.grids[level], grids[level])
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, nn.Parameter(resized, requires_grad=own.requires_grad))
        self.img_size, self.grids = size, grids
        self.model_args = {**self.model_args, "img_size": tuple(size)}
        if hasattr(self, "pretrained_cfg"):
            self.pretrained_cfg = self.default_cfg = {**self.pretrained_cfg, "input_size": (self.in_chans, *size)}

    @property
    def _model_args(self) -> dict[str, Any]:
        """Name of `model_args` in timm, whose `create_model` writes it, and whose `save_for_hf` reads it."""
        return self.model_args

    @_model_args.setter
    def _model_args(self, model_args: dict[str, Any]) -> None:
        self.model_args = model_args

    def resize_state_dict(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Fit the learned positions of a state dict to this model's size; return it, and the names that changed.

        Raises:
            CheckpointError: its positions are on no square grid.
        """
        state, resized = dict(state), []
        for name, level in self.positions().items():
            theirs, own, grid = state.get(name), self.get_parameter(name), self.grids[level]
            if theirs is None or theirs.ndim != own.ndim or theirs.numel() == 0:
                continue  # loading reports it
            if theirs.shape[1] == own.shape[1] and not resized:  # all are of one size: the first one decides
                break
            old = guess_grid(theirs.shape[1] - own.shape[1] + grid.tokens, name)
            state[name] = resize_positions(theirs, old, grid)
            resized.append(name)
        return state, resized

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, in addition to those with one axis."""
        tokens = (name for name, _ in self.named_parameters() if name.endswith(("cls_token", "dist_token")))
        return {*self.positions(), *tokens}

    def check_image_size(self, image: Tensor) -> None:
        """Raise a UsageError for images of another size than `img_size`; for networks with learned positions."""
        height, width = image.shape[-2:]
        if isinstance(height, int) and (height != self.img_size.height or width != self.img_size.width):  # not traced
            raise UsageError(
                f"{type(self).__name__} was built for {self.img_size} images but got {height}x{width}; pass "
                f"img_size=({height}, {width}) or call set_input_size: its positions belong to one size."
            )

    def run_block(self, block: nn.Module, *args: Any) -> Tensor:
        """Run one block, with gradient checkpointing if it is on."""
        if self.grad_checkpointing and torch.is_grad_enabled() and not torch.jit.is_tracing():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in ("", *self.pools):
            offered = ", ".join(repr(pool) for pool in (*self.pools, ""))
            raise UsageError(f"global_pool of {type(self).__name__} must be one of {offered}; got {global_pool!r}.")
        return global_pool
