"""Grad-CAM (arXiv 1610.02391) by captum, also for networks whose layers return tokens instead of maps."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.grid import Grid
from weft.layers.tokens import to_map, to_tokens
from weft.models.base import CamTarget
from weft.models.families import family_of
from weft.models.family import resolve


def grad_cam(model: nn.Module, images: Float[Tensor, "b c height width"], label: int) -> Float[Tensor, "b h w"]:
    """Return the Grad-CAM map of a class: how much each place of the last map supports it, at least 0.

    Args:
        model: in evaluation mode: of weft, folded or not, or of timm.
        images: normalized images.
        label: index of the class.

    Raises:
        UsageError: captum is not installed, or the network has no known map.
    """
    check_captum()
    captum = importlib.import_module("captum.attr")
    with _gate(model) as gate:
        maps = captum.LayerGradCam(model, gate).attribute(images, target=label, relu_attributions=True)
    return maps.detach()[:, 0]


def check_captum() -> None:
    """Raise a UsageError that names the extra if captum is not installed."""
    need("explain", "captum")


@contextlib.contextmanager
def _gate(model: nn.Module) -> Iterator[nn.Module]:
    """Insert an identity module that sees the last map of the network: captum hooks a module."""
    module, num_prefix, grid_of = _cam_target(model)
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


def _cam_target(model: nn.Module) -> CamTarget:
    """Return the last map that contributes to the prediction.

    If a class token predicts, the last block's other tokens never reach it: the map is that of the block before.
    """
    family = family_of(model)
    if family is not None and family.cam_target is not None:
        return resolve(family.cam_target)(model)
    other: Any = model
    if hasattr(other, "blocks") and hasattr(other, "patch_embed") and hasattr(other, "num_prefix_tokens"):
        grid = Grid(*other.patch_embed.grid_size)
        block = other.blocks[-2 if len(other.blocks) > 1 else -1]
        return CamTarget(block, other.num_prefix_tokens, lambda args: grid)
    info = getattr(other, "feature_info", None)
    if not info:
        raise UsageError(f"Grad-CAM needs to know where {type(model).__name__} has a map; it has no feature_info.")
    return CamTarget(other.get_submodule(info[-1]["module"]), 0, lambda args: (1, 1))
