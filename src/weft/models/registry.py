"""Names to models: ours by their own names, every timm model by its name; ours in timm's registry as `weft_<name>`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from weft.errors import CheckpointError, UsageError, WeftError, unknown
from weft.grid import Grid
from weft.models import ceit, cvt, grafted, levit, t2t
from weft.models.arguments import TIMM, WORD, check_arguments
from weft.models.base import Backbone
from weft.models.zoo import PUBLIC, ZOO

FAMILIES: dict[type[Backbone], dict[str, dict[str, Any]]] = {
    ceit.CeiT: ceit.VARIANTS,
    cvt.CvT: cvt.VARIANTS,
    levit.LeViT: levit.VARIANTS,
    grafted.Grafted: grafted.VARIANTS,
    t2t.T2TViT: t2t.VARIANTS,
}


def _preprocessing(name: str, size: int) -> dict[str, Any]:
    """How the released code prepares an image for evaluation; at 32 pixels ours: nothing is cut away."""
    cfg: dict[str, Any] = dict(crop_pct=0.875, crop_mode="center")  # resize to 256, cut 224
    if size == 384:  # CeiT: resize to 438, cut 384; CvT: squash to 384x384
        cfg = dict(crop_pct=1.0, crop_mode="squash") if name.startswith("cvt") else dict(crop_pct=384 / 438)
    elif name.startswith("t2t"):
        cfg = dict(crop_pct=0.9)
    elif size < 64:
        cfg = dict(crop_pct=1.0)
    return dict(interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)) | cfg


def _default_cfg(family: type[Backbone], name: str, variant: dict[str, Any]) -> dict[str, Any]:
    size = variant.get("img_size", 224)
    first_conv = {
        ceit.CeiT: "patch_embed.convs.0",
        cvt.CvT: "stages.0.patch_embed.proj",
        levit.LeViT: "stem.conv1.linear",
        t2t.T2TViT: f"tokens_to_token.attention1.{'attn.qkv' if '_t_' in name else 'kqv'}",
    }
    classifier: str | tuple[str, ...] = "head"
    if family is levit.LeViT:
        classifier = ("head.linear", "head_dist.linear")
    elif variant.get("distilled", family is grafted.Grafted):
        classifier = ("head", "head_dist")
    stem = "stem.0" if variant.get("num_stages", 2) else "proj"
    return dict(
        num_classes=1000,
        input_size=(3, size, size),
        fixed_input_size=family is not cvt.CvT,
        min_input_size=(3, 32, 32) if size >= 64 else (3, 16, 16),
        pool_size=None,
        first_conv=first_conv.get(family, stem),
        classifier=classifier,
        license=ZOO[name].weights_licence or "apache-2.0",
        **({"hf_hub_id": PUBLIC[name].repo} if name in PUBLIC and PUBLIC[name].repo else {}),
        **_preprocessing(name, size),
    )


def _tagged(name: str) -> str:
    """Name of a registered configuration: with the tag of the public weights, where a hub has them."""
    repo = PUBLIC[name].repo if name in PUBLIC else ""
    if not repo:
        return f"weft_{name}"
    return f"weft_{name}.{repo.partition('.')[2] or ('in22k_ft_in1k' if repo.endswith('22k') else 'in1k')}"


def _under_our_names(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert a state dict that timm has downloaded, in the layout of whoever published it, to this model's names."""
    to_weft = importlib.import_module(
        "weft.checkpoints.load"
    ).to_weft  # checkpoints import models: resolved when needed
    network: Any = model
    return network.resize_state_dict(to_weft(state))[0]


# What timm's registry wants: `default_cfgs` beside the entry points, both under the name that timm knows.
default_cfgs = generate_default_cfgs(
    {
        _tagged(name): _default_cfg(family, name, variant)
        for family, variants in FAMILIES.items()
        for name, variant in variants.items()
    }
)


def _register(family: type[Backbone], name: str, variant: dict[str, Any]) -> None:
    def entry(pretrained: bool = False, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> nn.Module:
        given = {key: value for key, value in kwargs.items() if key in switches(name)}
        with torch.device(device) if device is not None else contextlib.nullcontext():
            model = build_model_with_cfg(
                family,
                f"weft_{name}",
                pretrained,
                pretrained_filter_fn=_under_our_names,
                feature_cfg=dict(out_indices=_feature_levels(variant), feature_cls="getter"),
                **{**variant, **kwargs},
            )
        if isinstance(model, Backbone):
            model.weft_name, model.model_args = name, given
            if "img_size" in given or "in_chans" in given:
                size = Grid.of(given.get("img_size", variant.get("img_size", 224)))
                model.pretrained_cfg = model.default_cfg = {**model.default_cfg, "input_size": (model.in_chans, *size)}
        return model if dtype is None else model.to(dtype)

    entry.__name__ = entry.__qualname__ = f"weft_{name}"
    entry.__doc__ = f"{family.__name__}, `{name}`."
    register_model(entry)


def _feature_levels(variant: dict[str, Any]) -> tuple[int, ...]:
    """Levels that `features_only` gives unless told: all stages of a pyramid, four levels spread over a column."""
    depth = variant.get("depth", 12)
    if isinstance(depth, tuple):
        return tuple(range(len(depth)))
    if variant.get("num_stages"):
        last = variant["num_stages"] + depth - 1
        return tuple(range(variant["num_stages"])) + ((last,) if depth else ())
    return tuple((i + 1) * depth // 4 - 1 for i in range(4))


# What timm's factory takes beside a network's own values.
FACTORY = ("features_only", "out_indices", "feature_cls", "device", "dtype", "pretrained_cfg_overlay")


def switches(name: str) -> list[str]:
    """The constructor values that `create_model(name)` takes."""
    family = next(family for family, variants in FAMILIES.items() if name in variants)
    return list(inspect.signature(family.__init__).parameters)[1:]


def create_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Builds a model by name; `weft.create_model` is this with public weights.

    Raises:
        UsageError: an unknown name or argument, or sizes that do not fit.
    """
    if name not in ZOO:
        if timm.is_model(name.split(".")[0]):
            return _of_timm(name, pretrained, kwargs)
        raise unknown("model", name, ZOO, "weft models")
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
    if name not in ZOO and not (WORD.match(name) and timm.is_model(name.split(".")[0])):
        raise unknown("model", name, ZOO, "weft models")
    check_arguments(name, arguments, switches(name) if name in ZOO else TIMM)
    try:
        return make(name, **arguments, **ours)
    except WeftError:
        raise
    except Exception as error:  # constructors fail in any way on values that do not fit together
        values = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no values"
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(f"{name} cannot be built with {values[:300]}: {reason or type(error).__name__}") from error


for _family, _variants in FAMILIES.items():
    for _name, _variant in _variants.items():
        _register(_family, _name, _variant)
