"""What attention looked at, of weights that were watched during one forward pass: maps, rollout, layers.

A network is told as a list of layers, from the image to the answer; what the maps mean is then one piece of code for
all three families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.deploy import ExportedModel
from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace, watched
from weft.models.families import families, family_of
from weft.models.family import resolve


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


def attention_maps(model: nn.Module | None, weights: Sequence[Tensor], img_size: Grid) -> AttentionMaps:
    """Maps of the weights that `weft.layers.attention.watched` collected in one forward pass.

    Args:
        model: CeiT, CvT or LeViT, folded or not.
        weights: (b heads n m) of every attention, in order.
        img_size: of the images in that pass.

    Raises:
        UsageError: a network of another kind.
    """
    family = family_of(model)
    if family is None or family.attention is None:
        shown = ", ".join(family.name for family in families() if family.attention is not None)
        raise UsageError(
            f"Attention maps need a network of {shown}; got {type(model).__name__}. Ask for Grad-CAM alone."
        )
    mean = [weight.float().mean(dim=1) for weight in weights]
    trace: AttentionTrace = resolve(family.attention)(model, mean, img_size)
    layers, expected = trace.layers, len(trace.layers) + (trace.layer_shares is not None)
    if len(weights) != expected:
        raise UsageError(
            f"The attention of {family.name} must have {expected} layers, by its record; this pass computed"
            f" {len(weights)}. A family whose network has another softmax must describe it in `attention`."
        )
    levels = {layer.level: _map(layer) for layer in layers if layer.level}
    through = rollout(layers, trace.layer_shares)
    return AttentionMaps(levels, through, trace.layer_shares, _map(layers[-1]) if layers[-1].prefix else through)


def has_attention(model: object) -> bool:
    """Return whether weft can show the attention of a network."""
    family = family_of(model)
    return family is not None and family.attention is not None


def rollout(layers: Sequence[AttentionLayer], depth: Float[Tensor, "b depth"] | None = None) -> Float[Tensor, "b h w"]:
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


def _taken_back(layer: AttentionLayer, share: Float[Tensor, "b 1 n"]) -> Float[Tensor, "b 1 m"]:
    """From the tokens behind a layer to those in front of it."""
    if layer.weights.shape[1] == 1 and share.shape[2] > 1:  # folded: only the class token was computed, only it counts
        gathered = share[..., :1] @ layer.weights
    else:
        gathered = share @ layer.weights
    if not layer.is_residual:
        return gathered
    return (_spread(layer, gathered) + share) / 2


def _spread(layer: AttentionLayer, share: Float[Tensor, "b 1 m"]) -> Float[Tensor, "b 1 n"]:
    """From keys on a strided grid to the tokens that each of them stands for, in equal parts."""
    if layer.keys == layer.queries:
        return share
    rows = torch.arange(layer.queries.height) * layer.keys.height // layer.queries.height
    columns = torch.arange(layer.queries.width) * layer.keys.width // layer.queries.width
    index = (rows[:, None] * layer.keys.width + columns).flatten().to(share.device)
    counts = torch.bincount(index, minlength=layer.keys.tokens).clamp(min=1)
    places = (share[..., layer.prefix :] / counts)[..., index]
    return torch.cat([share[..., : layer.prefix], places], dim=-1)


def _map(layer: AttentionLayer) -> Float[Tensor, "b h w"]:
    row = layer.weights[:, 0] if layer.prefix else layer.weights.mean(dim=1)
    places = row[:, layer.prefix :]
    return (places / places.sum(dim=1, keepdim=True)).unflatten(1, layer.keys)
