"""Preprocessing that the `pretrained_cfg` of a model describes; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
