"""Modules of the user's own: any `nn.Module` that returns logits, under a name for the rest of this process.

A registered module is a model like those of timm: `create_model`, `train`, `load_model_dir` and the functions behind
the verbs build it by its name, as a copy of the registered module. A plugin (docs/your-own-network.md) does the same
for the command line and for other processes.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.lazy import LazyModule
from weft.models.contract import evaluation_mode
from weft.models.data_config import DEFAULTS
from weft.text import reason_of

timm: Any = LazyModule("timm")

IMG_SIZE = 224
_modules: dict[str, nn.Module] = {}


def register_module(
    module: nn.Module, *, name: str | None = None, img_size: int | tuple[int, int] | None = None
) -> str:
    """Register a module, so that functions that take a model name also take this module's.

    The module is run once, in evaluation mode, on a batch of two black images to count its outputs. It is neither
    changed nor kept on its device: models are built as copies of its present state.

    Args:
        module: takes images (b c h w) and returns logits (b classes). Its attribute `pretrained_cfg` may describe the
            preprocessing, under timm's keys; else images are normalised as for ImageNet.
        name: letters, digits, '_' and '-'; the name of its class by default. An earlier module of it is replaced.
        img_size: input size in pixels; None for that of `pretrained_cfg`, or 224.

    Returns:
        The name.

    Raises:
        UsageError: the name is that of another model, or the module does not return logits for images of this size.
    """
    name = name or type(module).__name__
    if not re.fullmatch(r"[A-Za-z][\w-]{0,99}", name):
        raise UsageError(f"The name of a module must have letters, digits, '_' and '-' only; got {name!r}.")
    if timm.is_model(name) and name not in _modules:
        raise UsageError(f"The name of a module must be free; {name} is a model. Pass name='my_{name}'.")
    if not any(True for _ in module.parameters()):
        raise UsageError(f"A module must have parameters to train; {name} has none.")
    own = copy.deepcopy(module).cpu()
    cfg = {**DEFAULTS, **dict(getattr(module, "pretrained_cfg", None) or {})}
    if img_size is not None:
        cfg["input_size"] = (cfg["input_size"][0], *Grid.of(img_size))
    num_classes = _count_outputs(own, name, tuple(cfg["input_size"]))
    network: Any = own
    network.num_classes = num_classes
    linear = [(place, layer) for place, layer in own.named_modules() if isinstance(layer, nn.Linear)]
    if linear and linear[-1][1].out_features == num_classes:
        cfg.setdefault("classifier", linear[-1][0])
    if not hasattr(network, "num_features"):
        network.num_features = linear[-1][1].in_features if linear else 0
    network.pretrained_cfg = network.default_cfg = {**cfg, "architecture": name, "num_classes": num_classes}
    is_known = name in _modules
    _modules[name] = network
    if is_known:
        return name

    def build(pretrained: bool = False, num_classes: int | None = None, **_: Any) -> nn.Module:
        model: Any = copy.deepcopy(_modules[name])
        if num_classes is not None and num_classes != model.num_classes:
            if not hasattr(model, "reset_classifier"):
                raise UsageError(
                    f"{name} must have an output per class; the dataset has {num_classes} classes, the module"
                    f" {model.num_classes} outputs. Change its last layer, or give it a method"
                    " reset_classifier(num_classes)."
                )
            model.reset_classifier(num_classes)
            model.num_classes = num_classes
            model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "num_classes": num_classes}
        return model

    build.__name__ = name
    timm.models.register_model(build)
    return name


def is_registered(name: str) -> bool:
    """Return whether a name is that of a registered module."""
    return name in _modules


def _count_outputs(module: nn.Module, name: str, input_size: tuple[int, ...]) -> int:
    """Return the number of logits of a module in evaluation mode, whose modes are restored."""
    size = "x".join(map(str, input_size))
    try:
        with torch.inference_mode(), evaluation_mode(module):
            output = module(torch.zeros(2, *input_size))
    except Exception as error:  # a module of the user can raise anything
        raise UsageError(
            f"A module must take images ({size}) and return logits; {name} fails with {type(error).__name__}:"
            f" {reason_of(error)}. For another size, pass img_size."
        ) from error
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != 2 or output.shape[1] < 2:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"A module must return logits (images, classes), with two classes or more; for 2 images {name} returns"
            f" {shape}."
        )
    return output.shape[1]
