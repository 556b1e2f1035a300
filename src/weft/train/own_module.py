"""Training of a module of the user's own: in this process, timm builds copies of it by the name of its class."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.lazy import LazyModule
from weft.models.contract import DEFAULTS, evaluation_mode
from weft.text import reason_of

timm_models: Any = LazyModule("timm.models")


def register_module(module: nn.Module, img_size: int | tuple[int, int] | None = None) -> str:
    """Register a module with timm, so that functions that take a model name build copies of its present state.

    The module is run once, in evaluation mode, on a batch of two black images to count its outputs.

    Args:
        module: takes images (b c h w) and returns logits (b classes). Its attribute `pretrained_cfg` may describe the
            preprocessing, under timm's keys; else images are normalised as for ImageNet.
        img_size: input size in pixels; None for that of `pretrained_cfg`, or 224.

    Returns:
        The name of its class. An earlier module of this class is replaced.

    Raises:
        UsageError: the name is that of a model of timm, or the module does not return logits for images of this size.
    """
    name = type(module).__name__
    if not any(True for _ in module.parameters()):
        raise UsageError(f"A module must have parameters to train; {name} has none.")
    if timm_models.is_model(name) and timm_models.model_entrypoint(name).__module__ != __name__:
        raise UsageError(f"The class of a module must have a name of its own; {name} is a model of timm. Rename it.")
    own: Any = copy.deepcopy(module).cpu()
    cfg = {**DEFAULTS, **dict(getattr(module, "pretrained_cfg", None) or {}), "architecture": name}
    if img_size is not None:
        cfg["input_size"] = (cfg["input_size"][0], *Grid.of(img_size))
    num_classes = own.num_classes = cfg["num_classes"] = _count_outputs(own, name, tuple(cfg["input_size"]))
    linear = [(place, layer) for place, layer in own.named_modules() if isinstance(layer, nn.Linear)]
    if linear and linear[-1][1].out_features == num_classes:
        cfg.setdefault("classifier", linear[-1][0])
    if not hasattr(own, "num_features"):
        own.num_features = linear[-1][1].in_features if linear else 0
    own.pretrained_cfg, own.is_own_module = cfg, True  # the cache of features does not know its code

    def build(pretrained: bool = False, num_classes: int | None = None, **_: Any) -> nn.Module:
        model: Any = copy.deepcopy(own)
        if num_classes not in (None, own.num_classes):
            if not hasattr(model, "reset_classifier"):
                raise UsageError(
                    f"{name} must have an output per class; the dataset has {num_classes} classes, the module"
                    f" {model.num_classes} outputs. Change its last layer, or give it a method"
                    " reset_classifier(num_classes)."
                )
            model.reset_classifier(num_classes)
            model.num_classes = num_classes
        model.pretrained_cfg = model.default_cfg = {**cfg, "num_classes": model.num_classes}
        return model

    build.__name__ = name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overwriting")  # an earlier module of this class
        timm_models.register_model(build)
    return name


def _count_outputs(module: nn.Module, name: str, input_size: tuple[int, ...]) -> int:
    """Return the number of logits of a module in evaluation mode, whose modes are restored."""
    try:
        with torch.inference_mode(), evaluation_mode(module):
            output = module(torch.zeros(2, *input_size))
    except Exception as error:  # a module of the user can raise anything
        raise UsageError(
            f"A module must take images ({'x'.join(map(str, input_size))}) and return logits; {name} fails with"
            f" {type(error).__name__}: {reason_of(error)}. For another size, pass img_size."
        ) from error
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != 2 or output.shape[1] < 2:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"A module must return logits (images, classes), with two classes or more; for 2 images {name} returns"
            f" {shape}."
        )
    return output.shape[1]
