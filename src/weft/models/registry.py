"""Build models by name: weft's own and all of timm's; weft's are registered with timm as `weft_<name>`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from weft.errors import CheckpointError, UsageError, WeftError, unknown
from weft.grid import Grid
from weft.models.arguments import TIMM, WORD, check_arguments
from weft.models.base import Backbone
from weft.models.families import VARIANTS, families, family_named
from weft.models.family import Family, Variant, resolve


def _default_cfg(family: Family, variant: Variant) -> dict[str, Any]:
    """Return timm's default_cfg of a model: preprocessing as in the released code, names of first and last layers."""
    size, weights = variant.size, variant.weights
    hub = {"hf_hub_id": weights.repo} if weights and weights.repo else {}
    return dict(
        num_classes=1000,
        input_size=(3, size, size),
        fixed_input_size=True,
        min_input_size=(3, 32, 32) if size >= 64 else (3, 16, 16),
        pool_size=None,
        interpolation="bicubic",
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        crop_pct=0.875 if size >= 64 else 1.0,  # small images are not cropped
        first_conv=None,
        classifier="head",
        license=weights.licence if weights else "apache-2.0",
    ) | {**hub, **family.default_cfg, **variant.default_cfg}


def _tagged(name: str, variant: Variant) -> str:
    """Return the name of a registered configuration: with the tag of the public weights, if a hub has them."""
    repo = variant.weights.repo if variant.weights else ""
    if not repo:
        return f"weft_{name}"
    return f"weft_{name}.{repo.partition('.')[2] or ('in22k_ft_in1k' if repo.endswith('22k') else 'in1k')}"


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
            {_tagged(name, variant): _default_cfg(family, variant) for name, variant in family.variants.items()}
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
        if isinstance(model, Backbone):
            model.weft_name, model.model_args = name, given
            if "img_size" in given or "in_chans" in given:
                size = Grid.of(given.get("img_size", variant.size))
                model.pretrained_cfg = model.default_cfg = {**model.default_cfg, "input_size": (model.in_chans, *size)}
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


# Arguments of timm's factory, in addition to the constructor arguments of the network.
FACTORY = ("features_only", "out_indices", "feature_cls", "device", "dtype", "pretrained_cfg_overlay")


def switches(name: str) -> list[str]:
    """Return the names of the constructor arguments that `create_model(name)` takes."""
    family = family_named(name)
    assert family is not None, name
    return list(inspect.signature(resolve(family.network).__init__).parameters)[1:]


def create_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Builds a model by name; `weft.create_model` is this with public weights.

    Raises:
        UsageError: an unknown name or argument, or sizes that do not fit.
    """
    if name not in VARIANTS:
        if timm.is_model(name.split(".")[0]):
            return _of_timm(name, pretrained, kwargs)
        raise unknown("model", name, VARIANTS, "weft models (of a plugin: --plugin FILE)")
    offered = [*switches(name), *FACTORY]
    for key in kwargs:
        if key not in offered:
            raise unknown(f"argument of {name}", key, offered, ", ".join(offered))
    return timm.create_model(f"weft_{name}", pretrained=pretrained, **kwargs)


def _of_timm(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if not pretrained:
        return timm.create_model(name, **kwargs)
    try:
        return timm.create_model(name, pretrained=True, **kwargs)
    except (OSError, HfHubHTTPError) as error:  # no network, no such file, no room: fetching failed, not building
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise CheckpointError(
            f"The weights of {name} must be on the hub or in its cache; {reason} Go online once, or set HF_HOME to a"
            " cache that has them."
        ) from error


def build_described(
    name: str, arguments: Mapping[str, Any], make: Callable[..., nn.Module] = create_model, **ours: Any
) -> nn.Module:
    """Builds a model from constructor values that a file has.

    Args:
        name: of the model.
        arguments: constructor values; checked by `weft.models.arguments`.
        make: builds it; `weft.create_model` where public weights may be asked for.
        **ours: more arguments of `make`, which are not checked.

    Raises:
        UsageError: an unknown name, or values that are not plain or do not fit.
        CheckpointError: public weights are asked for and cannot be had.
    """
    if name not in VARIANTS and not (WORD.match(name) and timm.is_model(name.split(".")[0])):
        raise unknown("model", name, VARIANTS, "weft models (of a plugin: --plugin FILE)")
    check_arguments(name, arguments, switches(name) if name in VARIANTS else TIMM)
    try:
        return make(name, **arguments, **ours)
    except WeftError:
        raise
    except Exception as error:  # constructors fail in any way on values that do not fit together
        values = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no values"
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(f"{name} cannot be built with {values[:300]}: {reason or type(error).__name__}") from error


for _family in families():
    register(_family)
