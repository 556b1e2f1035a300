"""Convert a third-party checkpoint to a weft model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from weft.checkpoints.files import read_contents
from weft.checkpoints.load import (
    OWN,
    LoadReport,
    family_of_layout,
    find_prefix,
    given_prefix,
    head_prefixes,
    load_checkpoint,
    prefixes,
    recognise,
    under,
)
from weft.checkpoints.model_dir import CONTENTS, save_model_dir
from weft.checkpoints.source_folder import read_metadata, weights_in
from weft.errors import CheckpointError, UsageError
from weft.files import check_output
from weft.models.building import create_model
from weft.models.building import switches as switches_of
from weft.models.contract import preprocessing, resized
from weft.models.families import VARIANTS
from weft.models.layout import State


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    head: Literal["keep", "drop"] = "keep",
    state_dict: str | None = None,
    import_foreign: bool = False,
    prefix: str | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
) -> LoadReport:
    """Read weights in any layout that `load_checkpoint` supports, and write a model directory.

    Args:
        source: the checkpoint file, or a folder with one. Class names and preprocessing next to it, as transformers,
            timm and weft write them, are kept.
        out: the model directory.
        model: name of the model; None to find weft's model that matches the weights.
        num_classes: number of classes of the head; None for that of the weights.
        img_size: input size in pixels; None for that of the model. Position embeddings are resized.
        head: 'drop' replaces the head by a new one with random weights.
        state_dict, import_foreign, prefix: as in `load_checkpoint`.
        settings: constructor arguments, in addition to those that the layout requires.
        force: replace an existing model directory.

    Returns:
        The model that was written, and what was loaded into it.

    Raises:
        UsageError: no model or several models match the weights, or `out` exists.
        CheckpointError: the file is refused, or does not match the model.
    """
    out = Path(out)
    check_output(out, CONTENTS, force=force)
    file = weights_in(Path(source))
    state, part, others = read_contents(file, state_dict=state_dict, import_foreign=import_foreign)
    settings = dict(settings or {})
    places = prefixes(state, len(state) // 3)
    if prefix is not None:
        places = [prefix := given_prefix(state, prefix)]
    if model is None:
        prefix, model = _matching(state, places, settings, img_size, source)
    default: Any = create_model(model, device="meta")
    if prefix is None:
        prefix = find_prefix(default, state, head=head)
    weights = under(state, prefix)
    layout = recognise(weights)
    required, weights = layout.switches(weights), layout.convert(weights)[0]
    switches = {**required, **settings}

    names, cfg, files = read_metadata(file.parent)
    size_beside = tuple(cfg.pop("input_size", ()))[1:]
    if img_size is None and size_beside not in ((), tuple(preprocessing(default)["input_size"][1:])):
        img_size = size_beside
    if img_size is not None and model in VARIANTS:
        switches["img_size"] = img_size
    arguments = _arguments_for(model, weights, switches) | settings  # an unknown setting is refused
    classes = num_classes
    if classes is None:
        classes = _classes_of(weights, create_model(model, device="meta", **arguments))
    network: Any = create_model(model, num_classes=classes, **arguments)
    if img_size is not None and model not in VARIANTS:
        network = resized(network, img_size)
    # a setting that contradicts the layout is intended: the weights may have been trained with it
    contradicts = any(required.get(key, value) != value for key, value in settings.items())
    report = load_checkpoint(network, state, head=head, switches="ignore" if contradicts else "check", prefix=prefix)
    network.pretrained_cfg = network.default_cfg = {**network.pretrained_cfg, **cfg}
    if head == "drop" or len(names or ()) != classes:
        names = None
    save_model_dir(network, out, label_names=names, force=force)
    return replace(report, model=model, switches=switches, part=part, others=others, files=files, label_names=names)


def _matching(
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
            network: Any = create_model(name, device="meta", **_arguments_for(name, state, switches))
        except (UsageError, TypeError, ValueError, RuntimeError):
            continue
        with torch.device("meta"):
            network.reset_classifier(_classes_of(state, network))
        own = {key: value.shape for key, value in network.state_dict().items()}
        wanted = {key for key in own if not key.endswith("num_batches_tracked")}
        reshaped = {key for key in wanted & set(state) if state[key].shape != own[key]}
        if wanted <= set(state) <= set(own) and reshaped <= set(network.positions()):
            own_size[name] = not reshaped if img_size is None else row.size == img_size
    return [name for name, is_own in own_size.items() if is_own] or list(own_size)


def _arguments_for(name: str, state: State, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switches that a model supports as constructor arguments; one head if the weights have one."""
    if name not in VARIANTS:
        return dict(switches)
    known = switches_of(name)
    values = {key: value for key, value in switches.items() if key in known}
    if "distilled" in known and not any(key.startswith("head_dist.") for key in state):
        values.setdefault("distilled", False)
    return values


def _classes_of(state: State, network: nn.Module) -> int:
    """Return the number of classes of the head of a network; 0 if a state dict has no such head."""
    prefixes_of_heads = head_prefixes(network)
    heads = [name for name in network.state_dict() if name.startswith(prefixes_of_heads)]
    # a head can be several layers: the last one has the classes
    return next((len(state[name]) for name in reversed(heads) if name in state and state[name].numel()), 0)
