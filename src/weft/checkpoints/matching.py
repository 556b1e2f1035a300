"""Which model of weft fits third-party weights, with which constructor arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoints.load import OWN, family_of_layout, head_prefixes, recognise, under
from weft.errors import CheckpointError, UsageError
from weft.models.building import create_model
from weft.models.building import switches as switches_of
from weft.models.families import VARIANTS
from weft.models.layout import State


def matching_model(
    state: State, places: Sequence[str], settings: Mapping[str, Any], img_size: Any, source: str | Path
) -> tuple[str, str]:
    """Return the only one of some prefixes under which weights match a model of weft, and the only such model."""
    matches: list[tuple[str, str]] = []
    for prefix in places:
        if any(prefix.startswith(outer) for outer, _ in matches):  # a part of a network that was found
            continue
        try:
            matches += [(prefix, model) for model in _models_of(under(state, prefix), settings, img_size)]
        except CheckpointError:  # the tensors do not fit together
            if prefix == places[0]:
                raise
    if len(matches) != 1:
        listed = ", ".join(f"{model} under {prefix!r}" if prefix else model for prefix, model in matches) or "none"
        raise UsageError(
            f"Without --model, {source} must match exactly one model of weft; it matches {listed}. Pass --model NAME"
            " (see `weft models`), and --prefix NAME to choose one of several sets of weights."
        )
    return matches[0]


def _models_of(weights: State, settings: Mapping[str, Any], img_size: Any) -> list[str]:
    """Return the names of weft's models that weights match; their position embeddings may be of another image size.

    `img_size`, else the size of the weights, decides between models that differ only in it.
    """
    layout = recognise(weights)
    switches, state = {**layout.switches(weights), **settings}, layout.convert(weights)[0]
    own_size: dict[str, bool] = {}
    for name, row in (VARIANTS if layout is OWN else family_of_layout(layout).variants).items():
        if not set(switches) <= set(switches_of(name)):
            continue
        try:
            network: Any = create_model(name, device="meta", **arguments_for(name, state, switches))
        except (UsageError, TypeError, ValueError, RuntimeError):
            continue
        with torch.device("meta"):
            network.reset_classifier(classes_of(state, network))
        own = {key: value.shape for key, value in network.state_dict().items()}
        wanted = {key for key in own if not key.endswith("num_batches_tracked")}
        reshaped = {key for key in wanted & set(state) if state[key].shape != own[key]}
        if wanted <= set(state) <= set(own) and reshaped <= set(network.positions()):
            own_size[name] = not reshaped if img_size is None else row.size == img_size
    return [name for name, is_own in own_size.items() if is_own] or list(own_size)


def arguments_for(name: str, state: State, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switches that a model supports as constructor arguments; one head if the weights have one."""
    if name not in VARIANTS:
        return dict(switches)
    known = switches_of(name)
    values = {key: value for key, value in switches.items() if key in known}
    if "distilled" in known and not any(key.startswith("head_dist.") for key in state):
        values.setdefault("distilled", False)
    return values


def classes_of(state: State, network: nn.Module) -> int:
    """Return the number of classes of the head of a network; 0 if a state dict has no such head."""
    prefixes_of_heads = head_prefixes(network)
    heads = [name for name in network.state_dict() if name.startswith(prefixes_of_heads)]
    # a head can be several layers: the last one has the classes
    return next((len(state[name]) for name in reversed(heads) if name in state and state[name].numel()), 0)
