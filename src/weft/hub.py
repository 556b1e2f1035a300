"""`create_model` with public weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoints.public import fetch_pretrained
from weft.models import registry
from weft.models.families import VARIANTS


def create_model(
    name: str, *, pretrained: bool = False, cache_dir: str | Path | None = None, **kwargs: Any
) -> nn.Module:
    """Builds a model by name.

    Args:
        name: one of `list_models()`, or any model name of timm.
        pretrained: load the public weights. Positions are fitted to `img_size`, the first convolution to `in_chans`;
            with another `num_classes` than 1000 the head is fresh.
        cache_dir: where downloaded weights are kept; None for huggingface_hub's own place.
        **kwargs: constructor values of the network, such as `num_classes`, `img_size` (int or (height, width)),
            `in_chans`, `drop_path_rate`, and every ablation switch; and timm's `features_only`, `out_indices`,
            `device`, `dtype`.

    Raises:
        UsageError: an unknown name or argument, or sizes that do not fit.
        CheckpointError: there are no public weights, or they cannot be had.
    """
    if pretrained and name in VARIANTS:
        kwargs["pretrained_cfg_overlay"] = dict(state_dict=fetch_pretrained(name, cache_dir))
    elif cache_dir is not None:
        kwargs["cache_dir"] = cache_dir
    return registry.create_model(name, pretrained=pretrained, **kwargs)
