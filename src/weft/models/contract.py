"""Functions for any classifier under timm's contract: preprocessing, mean of several heads, input size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weft.grid import Grid
from weft.lazy import LazyModule

if TYPE_CHECKING:
    from torch import Tensor, nn

torch: Any = LazyModule("torch")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision and timm
DEFAULTS = dict(
    input_size=(3, 224, 224), interpolation="bicubic", mean=MEAN, std=STD, crop_pct=0.875, crop_mode="center"
)  # timm's
VALUE_RANGE = "value_range"  # key of weft's own: black and white of images of more than 8 bits per channel


def preprocessing(model: Any) -> dict[str, Any]:
    """Return how images are prepared for a model, under timm's keys (`input_size`, `mean`, `std`, `crop_pct`, ...), and
    its `value_range` if it has one."""
    return data_config(getattr(model, "pretrained_cfg", {}))


def data_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing that a `pretrained_cfg` describes, with timm's defaults for what it leaves out."""
    resolved = {key: cfg.get(key) or default for key, default in DEFAULTS.items()}
    return resolved | ({VALUE_RANGE: cfg[VALUE_RANGE]} if cfg.get(VALUE_RANGE) else {})


def mean_logits(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return logits (b classes); of a model with several heads, the mean over the heads."""
    return torch.stack(logits).mean(dim=0) if isinstance(logits, tuple) else logits


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the `with` block; afterwards every module has its own mode again."""
    modes = [module.training for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode


def resized(model: nn.Module, img_size: int | tuple[int, int]) -> nn.Module:
    """Set the input size of a model in place, also in its `pretrained_cfg`, and return the model.

    A network without positions, such as a ResNet, takes any size, and only `pretrained_cfg` changes.
    """
    size = Grid.of(img_size)
    if tuple(preprocessing(model)["input_size"][1:]) == tuple(size):
        return model
    network: Any = model  # torch types every attribute of a module as tensor or module
    if hasattr(network, "set_input_size"):
        network.set_input_size(tuple(size))
    network.pretrained_cfg = {**network.pretrained_cfg, "input_size": (network.pretrained_cfg["input_size"][0], *size)}
    return network
