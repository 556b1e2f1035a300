"""Build models by name. weft's own networks are built here without timm, whose import takes longer than torch's."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import UsageError, WeftError, unknown
from weft.grid import Grid
from weft.models.arguments import TIMM, WORD, check_arguments
from weft.models.base import Backbone
from weft.models.data_config import MEAN, STD
from weft.models.families import VARIANTS, family_named
from weft.models.family import Family, Variant, resolve
from weft.models.timm_names import unknown_model
from weft.text import reason_of

# Arguments of timm's factory, in addition to the constructor arguments of the network.
FACTORY = ("features_only", "out_indices", "feature_cls", "device", "dtype", "pretrained_cfg_overlay")
PLAIN = ("device", "dtype")  # those that need no timm


def default_cfg(family: Family, variant: Variant) -> dict[str, Any]:
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
        mean=MEAN,
        std=STD,
        crop_pct=0.875 if size >= 64 else 1.0,  # small images are not cropped
        first_conv=None,
        classifier="head",
        license=weights.licence if weights else "apache-2.0",
    ) | {**hub, **family.default_cfg, **variant.default_cfg}


def tag_of(variant: Variant) -> str:
    """Return the tag of the public weights of a model; '' if no hub has them."""
    repo = variant.weights.repo if variant.weights else ""
    return repo and (repo.partition(".")[2] or ("in22k_ft_in1k" if repo.endswith("22k") else "in1k"))


def switches(name: str) -> list[str]:
    """Return the names of the constructor arguments that `create_model(name)` takes."""
    family = family_named(name)
    assert family is not None, name
    return list(inspect.signature(resolve(family.network).__init__).parameters)[1:]


def create_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a model by name; `weft.create_model` is this with public weights.

    Raises:
        UsageError: an unknown name or argument, or sizes that do not fit.
    """
    if name in VARIANTS:
        offered = [*switches(name), *FACTORY]
        for key in kwargs:
            if key not in offered:
                raise unknown(f"argument of {name}", key, offered, ", ".join(offered))
        if not pretrained and not any(key in kwargs for key in FACTORY if key not in PLAIN):
            return _network(name, **{key: value for key, value in kwargs.items() if value is not None})
    return resolve("weft.models.registry:build_with_timm")(name, pretrained, kwargs)


def _network(name: str, *, device: Any = None, dtype: Any = None, **given: Any) -> nn.Module:
    """Build a network of weft's, with the same attributes as `timm.create_model("weft_<name>")` gives it."""
    family, variant = family_named(name), VARIANTS[name]
    assert family is not None
    cfg = _pretrained_cfg(name, family, variant)
    channels, *size = cfg["input_size"]
    defaults: dict[str, Any] = dict(num_classes=cfg["num_classes"], in_chans=channels)
    if cfg["fixed_input_size"]:
        defaults["img_size"] = tuple(size)
    arguments = {**defaults, **variant.args, **given}
    with torch.device(device) if device is not None else contextlib.nullcontext():
        model: Any = resolve(family.network)(**arguments)
    model.pretrained_cfg = model.default_cfg = cfg
    model.pretrained_model_args = {}
    model._traits = {
        "img_size": tuple(Grid.of(arguments["img_size"])) if "img_size" in arguments else None,
        "fixed_input_size": cfg["fixed_input_size"],
        "first_conv": cfg["first_conv"],
    }
    model._model_args = dict(given)
    note_arguments(model, name, given)
    return model if dtype is None else model.to(dtype)


def note_arguments(model: nn.Module, name: str, given: Mapping[str, Any]) -> None:
    """Note in a network how it was built: its name, its arguments, and the size of its images.

    Args:
        model: the network.
        name: its name.
        given: the constructor arguments that `create_model` was given.
    """
    if isinstance(model, Backbone):
        model.weft_name, model.model_args = name, dict(given)
        if "img_size" in given or "in_chans" in given:
            size = Grid.of(given.get("img_size", VARIANTS[name].size))
            model.pretrained_cfg = model.default_cfg = {**model.default_cfg, "input_size": (model.in_chans, *size)}


def _pretrained_cfg(name: str, family: Family, variant: Variant) -> dict[str, Any]:
    """Return the `pretrained_cfg` that timm makes of `default_cfg`."""
    tag = tag_of(variant)
    more = dict(architecture=f"weft_{name}", custom_load=False, crop_mode="center") | ({"tag": tag} if tag else {})
    return {**more, **default_cfg(family, variant)}


class _NoRandomInit(TorchFunctionMode):
    """Fill with zeros instead of random values.

    `torch.nn.init.trunc_normal_` samples until all values are within its bounds: zeros are, uninitialised memory may
    never be. After `MOST` calls the values are random, so that every such loop ends.
    """

    RANDOM = frozenset(("uniform_", "normal_", "kaiming_uniform_", "erfinv_"))
    MOST = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in self.RANDOM and self.calls < self.MOST:
            self.calls += 1
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def without_random_init() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which networks are built without random values, for weights that replace all of them.

    It applies to one thread. For a network of 22 million parameters it saves 0.2 s.
    """
    return _NoRandomInit()


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
    if name not in VARIANTS and not (WORD.match(name) and resolve("timm:is_model")(name.split(".")[0])):
        raise unknown_model(name)
    check_arguments(name, arguments, switches(name) if name in VARIANTS else TIMM)
    try:
        return make(name, **arguments, **ours)
    except WeftError:
        raise
    except Exception as error:  # constructors fail in any way on values that do not fit together
        values = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no values"
        raise UsageError(f"{name} cannot be built with {values[:300]}: {reason_of(error)}.") from error
