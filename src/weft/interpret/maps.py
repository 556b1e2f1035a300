"""Attention maps, attention rollout and shares of layers, from the attention weights of one forward pass.

Each family describes its network as a list of attention layers, from the image to the prediction
(`weft.layers.attention.AttentionTrace`); the maps are computed from that list, for all families alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import CheckpointError, UsageError, WeftError
from weft.grid import Grid
from weft.layers.attention import AttentionLayer, AttentionTrace, record_attention
from weft.models.families import families, family_of
from weft.models.family import Family
from weft.text import reason_of


class AttentionMaps(NamedTuple):
    """Maps of a batch; each sums to 1.

    Attributes:
        levels: feature level -> attention of its last layer over the image (b h w): from the class token if there is
            one, else the mean over all queries.
        rollout: attention rollout (b h w), residuals weighted by one half (arXiv 2005.00928). For CvT within the last
            stage, because convolutions join its stages.
        depth: share of each layer's class token in the prediction (b layers), if the network has LCA; else None.
        saliency: the map to show if there is room for one (b h w): the last attention of the class token; without a
            class token the rollout.
    """

    levels: dict[str, Tensor]
    rollout: Tensor
    depth: Tensor | None
    saliency: Tensor


def run_with_attention(model: nn.Module, images: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the outputs of a model, and all attention weights (b heads n m) of the same forward pass."""
    with torch.inference_mode(), record_attention() as weights:
        return model(images), weights


def attention_maps(model: nn.Module | None, weights: Sequence[Tensor], img_size: Grid) -> AttentionMaps:
    """Return the attention maps of one forward pass.

    Args:
        model: network of a family with an `attention` function, folded or not.
        weights: attention weights (b heads n m) of every layer, in order.
        img_size: size of the images in that pass.

    Raises:
        UsageError: the network is of no such family, or its number of layers is not that of the record.
        CheckpointError: the weights are not those of the layers of the network, as of an export of another network.
    """
    family = family_of(model)
    if family is None or not family.has_attention:
        shown = ", ".join(family.name for family in families() if family.has_attention)
        raise UsageError(
            f"Attention maps need a network of {shown}; got {type(model).__name__}. Ask for Grad-CAM alone."
        )
    try:
        return _maps(family, model, weights, img_size)
    except WeftError:
        raise
    except (IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The attention weights must be those of {family.name}, one per layer; the {len(weights)} of this pass do"
            f" not fit ({reason_of(error)}). If this is an export, export the model again."
        ) from error


def _maps(family: Family, model: Any, weights: Sequence[Tensor], img_size: Grid) -> AttentionMaps:
    mean = [weight.float().mean(dim=1) for weight in weights]
    trace: AttentionTrace = family.code("attention", "attention")(model, mean, img_size)
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
    return family is not None and family.has_attention


def rollout(layers: Sequence[AttentionLayer], depth: Float[Tensor, "b depth"] | None = None) -> Float[Tensor, "b h w"]:
    """Return the share of each place in the prediction: a row vector, multiplied back through the joined layers."""
    last = layers[-1]
    batch, device = last.weights.shape[0], last.weights.device
    count = last.prefix + last.queries.tokens
    share = torch.zeros(batch, 1, count, device=device)
    starts = torch.zeros(batch, len(layers), device=device)  # share of each layer's class token in the prediction
    starts[:, -1] = 1
    if depth is not None:
        starts = (starts + depth) / 2
    layer = last
    for layer, start in zip(reversed(layers), reversed(starts.unbind(dim=1)), strict=True):
        if layer is last and not layer.prefix:
            share += 1 / count
        else:
            share[..., 0] += start[:, None]
        share = _backwards(layer, share)
        if not layer.joins:
            break
    places = share[:, 0, layer.prefix :]
    grid = layer.queries if layer.is_residual else layer.keys
    return (places / places.sum(dim=1, keepdim=True)).unflatten(1, grid)


def _backwards(layer: AttentionLayer, share: Float[Tensor, "b 1 n"]) -> Float[Tensor, "b 1 m"]:
    """Return the shares of a layer's inputs, from those of its outputs."""
    if layer.weights.shape[1] == 1 and share.shape[2] > 1:  # folded: the class token alone was computed
        gathered = share[..., :1] @ layer.weights
    else:
        gathered = share @ layer.weights
    if not layer.is_residual:
        return gathered
    return (_spread(layer, gathered) + share) / 2


def _spread(layer: AttentionLayer, share: Float[Tensor, "b 1 m"]) -> Float[Tensor, "b 1 n"]:
    """Return the shares of all tokens, from those of keys on a strided grid, in equal parts."""
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
