"""timm's registry: weft's models are registered with timm as `weft_<name>`, and timm builds its own by name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from weft.errors import CheckpointError
from weft.models.building import FACTORY, build_described, create_model, default_cfg, note_arguments, switches, tag_of
from weft.models.families import VARIANTS, families
from weft.models.family import Family, Variant, resolve
from weft.models.timm_names import unknown_model
from weft.text import reason_of

__all__ = ["FACTORY", "build_described", "build_with_timm", "create_model", "register", "switches"]


def _tagged(name: str, variant: Variant) -> str:
    """Return the name of a registered configuration: with the tag of the public weights, if a hub has them."""
    return ".".join(filter(None, (f"weft_{name}", tag_of(variant))))


def _under_our_names(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert a state dict that timm has downloaded, in the layout of its publisher, to this model's names."""
    to_weft = importlib.import_module(
        "weft.checkpoints.load"
    ).to_weft  # checkpoints import models: resolved when needed
    network: Any = model
    return network.resize_state_dict(to_weft(state))[0]


# timm's registry reads `default_cfgs` of the module whose entry points it registers.
default_cfgs: dict[str, Any] = {}


def register(family: Family) -> None:
    """Register the models of a family with timm, as `weft_<name>`."""
    default_cfgs.update(
        generate_default_cfgs(
            {_tagged(name, variant): default_cfg(family, variant) for name, variant in family.variants.items()}
        )
    )
    for name, variant in family.variants.items():
        _register(family, name, variant)


def _register(family: Family, name: str, variant: Variant) -> None:
    def entry(pretrained: bool = False, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> nn.Module:
        given = {key: value for key, value in kwargs.items() if key in switches(name)}
        features: dict[str, Any] = {"feature_cls": "getter"}
        if kwargs.get("features_only") and "out_indices" not in kwargs:
            features["out_indices"] = _feature_levels(family, {**variant.args, **given})
        with torch.device(device) if device is not None else contextlib.nullcontext():
            model = build_model_with_cfg(
                resolve(family.network),
                f"weft_{name}",
                pretrained,
                pretrained_filter_fn=_under_our_names,
                feature_cfg=features,
                **{**variant.args, **kwargs},
            )
        note_arguments(model, name, given)
        return model if dtype is None else model.to(dtype)

    entry.__name__ = entry.__qualname__ = f"weft_{name}"
    entry.__doc__ = f"{family.name}, `{name}`."
    entry.__module__ = __name__
    register_model(entry)


def _feature_levels(family: Family, args: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the levels that `features_only` returns by default."""
    if family.feature_levels is not None:
        return resolve(family.feature_levels)(args)
    with torch.device("meta"):
        count = len(resolve(family.network)(**args).feature_info)
    return tuple(range(count)) if count <= 4 else tuple((i + 1) * count // 4 - 1 for i in range(4))


def build_with_timm(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a network of timm's, or one of weft's with timm's `features_only` and public weights.

    Raises:
        UsageError: there is no model of this name.
        CheckpointError: public weights cannot be downloaded.
    """
    if name in VARIANTS:
        return timm.create_model(f"weft_{name}", pretrained=pretrained, **kwargs)
    if timm.is_model(name.split(".")[0]):
        return _of_timm(name, pretrained, kwargs)
    raise unknown_model(name)


def _of_timm(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if not pretrained:
        return timm.create_model(name, **kwargs)
    try:
        return timm.create_model(name, pretrained=True, **kwargs)
    except (OSError, HfHubHTTPError) as error:  # no network, no such file, no room: fetching failed, not building
        raise CheckpointError(
            f"The weights of {name} must be on the hub or in its cache; {reason_of(error)}. Connect to the internet to"
            " download them, or set HF_HOME to a cache that has them."
        ) from error


for _family in families():
    register(_family)
