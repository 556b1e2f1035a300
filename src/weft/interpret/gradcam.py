"""Grad-CAM by captum, for networks whose layers hand on tokens instead of maps."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.grid import Grid
from weft.layers.tokens import to_map, to_tokens
from weft.models.ceit import CeiT
from weft.models.cvt import CvT
from weft.models.grafted import Grafted
from weft.models.levit import LeViT
from weft.models.t2t import T2TViT

GridOf = Callable[[tuple[Any, ...]], tuple[int, int]]  # of the arguments of a module's call


def grad_cam(model: nn.Module, images: Float[Tensor, "b c height width"], label: int) -> Float[Tensor, "b h w"]:
    """Where the last map that still counts speaks for a class (arXiv 1610.02391), from 0 up.

    Args:
        model: in evaluation: one of weft's, folded or not, or timm's.
        images: prepared for it.
        label: the class.

    Raises:
        UsageError: captum is not installed, or nobody knows where this network has a map.
    """
    check_captum()
    captum = importlib.import_module("captum.attr")
    with _gate(model) as gate:
        found = captum.LayerGradCam(model, gate).attribute(images, target=label, relu_attributions=True)
    return found.detach()[:, 0]


def check_captum() -> None:
    """Raises a UsageError that names the extra where captum is not installed."""
    need("explain", "captum")


@contextlib.contextmanager
def _gate(model: nn.Module) -> Iterator[nn.Module]:
    """A module that hands on the map unchanged, where the network has its last one: captum wants to hold on to one."""
    module, num_prefix, grid_of = _last_map(model)
    gate = nn.Identity()

    def through(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.ndim == 4:
            return gate(output)
        grid = grid_of(args)
        if output.shape[1] - num_prefix != grid[0] * grid[1]:
            raise UsageError(
                f"Grad-CAM needs to know where {type(model).__name__} has a map; its last level has"
                f" {output.shape[1]} tokens on an unknown grid."
            )
        places = gate(to_map(output[:, num_prefix:], grid))
        return torch.cat([output[:, :num_prefix], to_tokens(places)], dim=1)

    handle = module.register_forward_hook(through)
    try:
        yield gate
    finally:
        handle.remove()


def _last_map(model: nn.Module) -> tuple[nn.Module, int, GridOf]:
    """The module whose output it is, how many tokens in front have no place, and its grid.

    Where a class token answers, the last block's other tokens never reach it: the map is that of the block before.
    """
    if isinstance(model, CeiT):
        module = model.blocks[-2] if len(model.blocks) > 1 else model.patch_embed
        return module, 1 if len(model.blocks) > 1 else 0, lambda args: model.grid
    if isinstance(model, CvT):
        stage: Any = model.stages[-1]
        module = stage.blocks[-2] if len(stage.blocks) > 1 else stage.patch_embed
        return module, model.num_prefix, lambda args: args[1]
    if isinstance(model, LeViT):
        return model.stages[-1], 0, lambda args: model.grids[-1]
    other: Any = model
    if isinstance(model, (T2TViT, Grafted)) and len(model.blocks) > 1:
        return model.blocks[-2], other.num_prefix, lambda args: other.grid
    if hasattr(other, "blocks") and hasattr(other, "patch_embed") and hasattr(other, "num_prefix_tokens"):
        grid = Grid(*other.patch_embed.grid_size)
        return other.blocks[-2 if len(other.blocks) > 1 else -1], other.num_prefix_tokens, lambda args: grid
    info = getattr(other, "feature_info", None)
    if not info:
        raise UsageError(f"Grad-CAM needs to know where {type(model).__name__} has a map; it has no feature_info.")
    return other.get_submodule(info[-1]["module"]), 0, lambda args: (1, 1)
