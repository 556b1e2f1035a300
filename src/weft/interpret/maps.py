"""What attention looked at, of weights that were watched during one forward pass: maps, rollout, layers.

A network is told as a list of layers, from the image to the answer; what the maps mean is then one piece of code for
all three families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.deploy import ExportedModel
from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import watched
from weft.models.ceit import CeiT
from weft.models.cvt import CvT
from weft.models.levit import AttentionDownsample, BiasedAttention, LeViT


class Layer(NamedTuple):
    """One attention.

    Attributes:
        weights: mean over the heads (b n m); of a folded network's last layer the class token's row alone (b 1 m).
        queries, keys: grids of the tokens that have a place.
        prefix: tokens in front that have none: 0, or 1 for a class token.
        is_residual: what it gathers is added to what was there.
        level: name of the feature level that ends here, '' inside one.
        joins: its input is the output of the layer before; False behind a change of tokens that is no attention.
    """

    weights: Tensor
    queries: Grid
    keys: Grid
    prefix: int
    is_residual: bool
    level: str
    joins: bool = True


class AttentionMaps(NamedTuple):
    """Of a batch; every map sums to 1.

    Attributes:
        levels: by name of the feature level: how its last layer spread its attention over the image (b h w). Of the
            class token where there is one, else the mean over all queries.
        rollout: the same through all layers (b h w), residuals counted as half (arXiv 2005.00928). Of CvT within the
            last stage, since its stages are joined by convolutions.
        depth: CeiT with LCA: how much the answer took from the class token of each layer (b depth); else None.
        focus: the map to show where there is room for one (b h w): what the class token looked at last; where none
            answers (LeViT), the rollout.
    """

    levels: dict[str, Tensor]
    rollout: Tensor
    depth: Tensor | None
    focus: Tensor


def answer_watched(model: nn.Module, images: Tensor) -> tuple[Any, list[Tensor]]:
    """What a model or an export answers, and the weights (b heads n m) of every attention of that very pass."""
    if isinstance(model, ExportedModel):
        return model.watched(images)
    with torch.inference_mode(), watched() as weights:
        return model(images), weights


def attention_maps(model: nn.Module, weights: Sequence[Tensor], img_size: Grid) -> AttentionMaps:
    """Maps of the weights that `weft.layers.attention.watched` collected in one forward pass.

    Args:
        model: CeiT, CvT or LeViT, folded or not.
        weights: (b heads n m) of every attention, in order.
        img_size: of the images in that pass.

    Raises:
        UsageError: a network of another kind.
    """
    mean = [weight.float().mean(dim=1) for weight in weights]
    depth = None
    if isinstance(model, CeiT):
        if model.lca is not None:
            depth = mean.pop()[:, 0]
        layers = list(_of_ceit(model, mean))
    elif isinstance(model, CvT):
        layers = list(_of_cvt(model, mean, img_size))
    elif isinstance(model, LeViT):
        layers = list(_of_levit(model, mean))
    else:
        raise UsageError(
            f"Attention can be shown of CeiT, CvT and LeViT; got {type(model).__name__}. Ask for Grad-CAM alone."
        )
    levels = {layer.level: _map(layer) for layer in layers if layer.level}
    through = rollout(layers, depth)
    return AttentionMaps(levels, through, depth, _map(layers[-1]) if layers[-1].prefix else through)


def rollout(layers: Sequence[Layer], depth: Float[Tensor, "b depth"] | None = None) -> Float[Tensor, "b h w"]:
    """The answer's share in every place of the first of the joined layers: a row vector, taken back layer by layer."""
    last = layers[-1]
    batch, device = last.weights.shape[0], last.weights.device
    count = last.prefix + last.queries.tokens
    share = torch.zeros(batch, 1, count, device=device)
    starts = torch.zeros(batch, len(layers), device=device)  # what each layer's class token gives to the answer
    starts[:, -1] = 1
    if depth is not None:
        starts = (starts + depth) / 2
    layer = last
    for layer, start in zip(reversed(layers), reversed(starts.unbind(dim=1)), strict=True):
        if layer is last and not layer.prefix:
            share += 1 / count
        else:
            share[..., 0] += start[:, None]
        share = _taken_back(layer, share)
        if not layer.joins:
            break
    places = share[:, 0, layer.prefix :]
    grid = layer.queries if layer.is_residual else layer.keys
    return (places / places.sum(dim=1, keepdim=True)).unflatten(1, grid)


def _taken_back(layer: Layer, share: Float[Tensor, "b 1 n"]) -> Float[Tensor, "b 1 m"]:
    """From the tokens behind a layer to those in front of it."""
    if layer.weights.shape[1] == 1 and share.shape[2] > 1:  # folded: only the class token was computed, only it counts
        gathered = share[..., :1] @ layer.weights
    else:
        gathered = share @ layer.weights
    if not layer.is_residual:
        return gathered
    return (_spread(layer, gathered) + share) / 2


def _spread(layer: Layer, share: Float[Tensor, "b 1 m"]) -> Float[Tensor, "b 1 n"]:
    """From keys on a strided grid to the tokens that each of them stands for, in equal parts."""
    if layer.keys == layer.queries:
        return share
    rows = torch.arange(layer.queries.height) * layer.keys.height // layer.queries.height
    columns = torch.arange(layer.queries.width) * layer.keys.width // layer.queries.width
    index = (rows[:, None] * layer.keys.width + columns).flatten().to(share.device)
    counts = torch.bincount(index, minlength=layer.keys.tokens).clamp(min=1)
    places = (share[..., layer.prefix :] / counts)[..., index]
    return torch.cat([share[..., : layer.prefix], places], dim=-1)


def _map(layer: Layer) -> Float[Tensor, "b h w"]:
    row = layer.weights[:, 0] if layer.prefix else layer.weights.mean(dim=1)
    places = row[:, layer.prefix :]
    return (places / places.sum(dim=1, keepdim=True)).unflatten(1, layer.keys)


def _of_ceit(model: CeiT, weights: Sequence[Tensor]) -> Iterator[Layer]:
    ends = {(i + 1) * len(weights) // 4 - 1 for i in range(4)}  # a column has no stages, but quarters
    for i, weight in enumerate(weights):
        yield Layer(weight, model.grid, model.grid, 1, True, f"blocks.{i}" if i in ends else "")


def _of_cvt(model: CvT, weights: Sequence[Tensor], img_size: Grid) -> Iterator[Layer]:
    left, grid = iter(weights), img_size
    stages: Any = model.stages
    for i, stage in enumerate(stages):
        grid = stage.patch_embed.grid(grid)
        for j, block in enumerate(stage.blocks):
            keys = grid
            if block.attn.conv_k is not None:
                conv = block.attn.conv_k.conv
                keys = grid.conv(conv.kernel_size[0], conv.stride[0], conv.padding[0])
            level = f"stages.{i}" if j == len(stage.blocks) - 1 else ""
            yield Layer(next(left), grid, keys, block.attn.num_prefix, True, level, joins=j > 0)


def _of_levit(model: LeViT, weights: Sequence[Tensor]) -> Iterator[Layer]:
    left = iter(weights)
    for i, stage in enumerate(model.stages):
        attentions = [module for module in stage.modules() if isinstance(module, BiasedAttention)]
        for j, attention in enumerate(attentions):
            shrinks = isinstance(attention, AttentionDownsample)
            keys = model.grids[i - 1] if shrinks else model.grids[i]
            level = f"stages.{i}" if j == len(attentions) - 1 else ""
            yield Layer(next(left), model.grids[i], keys, 0, not shrinks, level)
