"""Build models by name. weft's own networks are built without timm, whose import takes longer than torch's.

The entry points of `weft.models.registry` call `build_network`, so that timm builds the same models.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import CheckpointError, UsageError, WeftError, unknown
from weft.grid import Grid
from weft.lazy import LazyModule
from weft.models.arguments import check_arguments
from weft.models.base import Backbone
from weft.models.contract import MEAN, STD
from weft.models.families import VARIANTS, check_name, family_named
from weft.models.family import Family, Variant
from weft.text import reason_of

timm: Any = LazyModule("timm")
timm_models: Any = LazyModule("timm.models")
timm_features: Any = LazyModule("timm.models._features")

# Arguments in addition to the constructor arguments of a network.
FACTORY = ("features_only", "out_indices", "device", "dtype")


def switches(name: str) -> list[str]:
    """Return the names of the constructor arguments that `create_model(name)` takes."""
    return list(inspect.signature(_record(name)[0].network_class.__init__).parameters)[1:]


def create_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a model of weft or timm by name; `weft.create_model` is this with the public weights of weft's networks.

    Raises:
        UsageError: an unknown name or argument, or sizes that do not fit.
        CheckpointError: public weights cannot be downloaded.
    """
    if name in VARIANTS:
        return build_network(name, pretrained=pretrained, **kwargs)
    check_name(name)
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except OSError as error:  # no network, no such file, no room: fetching failed, not building
        if not pretrained:
            raise
        raise CheckpointError(
            f"The weights of {name} must be on the hub or in its cache; {reason_of(error)}. Connect to the internet to"
            " download them, or set HF_HOME to a cache that has them."
        ) from error


def build_network(
    name: str,
    *,
    pretrained: bool = False,
    pretrained_cfg: str | Mapping[str, Any] | None = None,
    pretrained_cfg_overlay: Mapping[str, Any] | None = None,
    cache_dir: Any = None,
    features_only: bool = False,
    out_indices: Any = None,
    device: Any = None,
    dtype: Any = None,
    **given: Any,
) -> nn.Module:
    """Build a network of weft.

    Args:
        name: name of the network.
        pretrained: load the weights that `pretrained_cfg` names, with timm's loader.
        pretrained_cfg, pretrained_cfg_overlay: entries or tag that replace those of the network, as in timm.
        cache_dir: directory for downloaded weights.
        features_only: return timm's `FeatureGetterNet`, which computes the maps of the levels `out_indices`.
        device, dtype: of the parameters.
        **given: constructor arguments of the network; None for the default.

    Raises:
        UsageError: an unknown argument, or sizes that do not fit.
    """
    family, variant = _record(name)
    known = [*switches(name), *FACTORY]
    for key in given:
        if key not in known:
            raise unknown(f"argument of {name}", key, known, ", ".join(known))
    given = {key: value for key, value in given.items() if value is not None}
    cfg = default_cfg(name)
    if pretrained_cfg is not None:
        cfg = timm_models.resolve_pretrained_cfg(f"weft_{name}", pretrained_cfg).to_dict()
    cfg |= pretrained_cfg_overlay or {}
    channels, *size = cfg["input_size"]
    from_cfg = dict(num_classes=cfg["num_classes"], in_chans=channels)
    if cfg["fixed_input_size"]:
        from_cfg["img_size"] = tuple(size)
    with torch.device(device) if device is not None else contextlib.nullcontext():
        network: Any = family.network_class(**{**from_cfg, **variant.args, **given})
    if pretrained:
        classes, channels = network.num_classes, network.in_chans
        timm_models.load_pretrained(network, cfg, classes, channels, _under_our_names, cache_dir=cache_dir)
    network.weft_name, network.model_args = name, given
    network.pretrained_cfg = network.default_cfg = {
        **{key: value for key, value in cfg.items() if key != "state_dict"},
        "input_size": (network.in_chans, *Grid.of(given.get("img_size", size))),
    }
    model = _feature_getter(network, out_indices) if features_only else network
    return model if dtype is None else model.to(dtype)


def default_cfg(name: str) -> dict[str, Any]:
    """Return timm's default_cfg of a network of weft: preprocessing as in the released code, first and last layers."""
    family, variant = _record(name)
    size, weights = variant.size, variant.weights
    repo = weights.repo if weights else ""
    tag = repo.partition(".")[2] or ("in22k_ft_in1k" if repo.endswith("22k") else "in1k")
    return {
        "architecture": f"weft_{name}",
        **({"hf_hub_id": repo, "tag": tag} if repo else {}),
        "custom_load": False,
        "num_classes": 1000,
        "input_size": (3, size, size),
        "fixed_input_size": True,
        "min_input_size": (3, 32, 32) if size >= 64 else (3, 16, 16),
        "pool_size": None,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "crop_pct": 0.875 if size >= 64 else 1.0,  # small images are not cropped
        "crop_mode": "center",
        "first_conv": None,
        "classifier": "head",
        "license": weights.licence if weights else "apache-2.0",
        **family.default_cfg,
        **variant.default_cfg,
    }


def _record(name: str) -> tuple[Family, Variant]:
    family = family_named(name)
    assert family is not None, name
    return family, family.variants[name]


def _under_our_names(state: dict[str, Tensor], network: Backbone) -> dict[str, Tensor]:
    """Convert a downloaded state dict, in the layout of its publisher, to a network's names and image size."""
    to_weft = importlib.import_module("weft.checkpoints.load").to_weft  # checkpoints import models
    return network.resize_state_dict(to_weft(state))[0]


def _feature_getter(network: Backbone, out_indices: Any) -> nn.Module:
    levels = network.default_levels() if out_indices is None else out_indices
    getter = timm_features.FeatureGetterNet(network, out_indices=levels)
    of_head = ("num_classes", "classifier", "global_pool")
    getter.pretrained_cfg = getter.default_cfg = {k: v for k, v in network.pretrained_cfg.items() if k not in of_head}
    return getter


class NoRandomInit(TorchFunctionMode):
    """Context in which networks are built with zeros instead of random values, for weights that replace all of them.

    It applies to one thread. For a network of 22 million parameters it saves 0.2 s. `torch.nn.init.trunc_normal_`
    samples until all values are within its bounds: zeros are, uninitialised memory may never be. After `MOST` calls the
    values are random, so that every such loop ends.
    """

    RANDOM = frozenset(("uniform_", "normal_", "kaiming_uniform_", "erfinv_"))
    MOST = 10_000
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in self.RANDOM and self.calls < self.MOST:
            self.calls += 1
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def build_described(
    name: str, arguments: Mapping[str, Any], make: Callable[..., nn.Module] = create_model, **ours: Any
) -> nn.Module:
    """Build a model from the constructor arguments in a file.

    Args:
        name: name of the model.
        arguments: constructor arguments; checked by `weft.models.arguments`.
        make: function that builds the model; `weft.create_model` also downloads public weights.
        **ours: other arguments of `make`, not checked.

    Raises:
        UsageError: an unknown name, or invalid values.
        CheckpointError: public weights cannot be downloaded.
    """
    check_name(name)
    check_arguments(name, arguments, switches(name) if name in VARIANTS else None)
    try:
        return make(name, **arguments, **ours)
    except WeftError:
        raise
    except Exception as error:  # constructors fail in any way on values that do not fit together
        values = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no values"
        raise UsageError(f"{name} cannot be built with {values[:300]}: {reason_of(error)}.") from error
