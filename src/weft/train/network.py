"""Build the network of a recipe, and load the weights that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoints import load_checkpoint
from weft.checkpoints.config import CONFIG, WEIGHTS, read_config
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import PREFIX, model_dir
from weft.errors import CheckpointError, UsageError
from weft.lazy import LazyModule
from weft.machine.runtime import Runtime
from weft.models.building import build_described
from weft.models.contract import resized
from weft.models.families import VARIANTS
from weft.recipes import Recipe
from weft.train.request import start_file

timm: Any = LazyModule("timm")

BACKBONE_SIZE, LARGE_SIZE = 224, 384  # pixels


def build_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """Build the network of a recipe at its image size, initialised from its seed.

    A backbone whose public weights have no classifier and saw large images, such as DINOv2 (518 pixels), has 224.
    """
    name, arguments = recipe.model or "", dict(recipe.model_args)
    if recipe.img_size is not None and name in VARIANTS:
        arguments["img_size"] = recipe.img_size
    torch.manual_seed(recipe.seed)
    model: Any = build_described(name, arguments, create_model, pretrained=recipe.pretrained, num_classes=num_classes)
    size = recipe.img_size or (BACKBONE_SIZE if is_large_backbone(name) else None)
    if size is not None:
        model = resized(model, size)
    if recipe.data.value_range is not None:
        model.pretrained_cfg = {**dict(model.pretrained_cfg), "value_range": list(recipe.data.value_range)}
    if recipe.grad_checkpointing:
        network: Any = model  # torch types every attribute of a module as tensor or module
        network.set_grad_checkpointing(True)
    return model


def is_large_backbone(name: str) -> bool:
    """Return whether the public weights of a network of timm have no classifier, and saw images above 384 pixels."""
    cfg = None if name in VARIANTS else timm.get_pretrained_cfg(name, allow_unregistered=False)
    return cfg is not None and cfg.num_classes == 0 and min(cfg.input_size[1:]) > LARGE_SIZE


def check_sync_bn(recipe: Recipe, runtime: Runtime) -> None:
    """Raise UsageError for `sync_bn` without a GPU, where torch has no synchronized BatchNorm."""
    if recipe.sync_bn and runtime.device.type != "cuda":
        raise UsageError(
            f"sync_bn needs GPUs; got sync_bn true on device {runtime.device.type}. Pass --set sync_bn=false (to resume"
            " a run, with --override), or train with fixed statistics: --set train_mode=eval."
        )


def load_start_weights(model: nn.Module, source: str | Path, classes: Sequence[str] | None = None) -> str:
    """Load the weights that training starts from. Positions are resized; a head for other classes is not loaded.

    Args:
        model: the network; changed in place.
        source: a run directory (its best model), a model directory, one on the hub (`hf-hub:OWNER/NAME`), or a
            checkpoint of any layout that weft reads.
        classes: class names of the dataset.

    Returns:
        A sentence that says what was loaded.

    Raises:
        CheckpointError: the file is missing or does not fit the network.
    """
    if str(source).startswith(PREFIX):
        source = model_dir(source)
    path = start_file(source)
    is_described = path.name == WEIGHTS and (path.parent / CONFIG).is_file()
    label_names = read_config(path.parent)["label_names"] if is_described else None
    try:
        load_checkpoint(model, path, head="drop" if label_names and label_names != classes else "keep")
    except CheckpointError:
        load_checkpoint(model, path, head="drop")
        label_names = label_names or ["others"]
    has_other_classes = bool(label_names) and label_names != classes
    return f"Weights from {path}" + (", except the head, which has other classes." if has_other_classes else ".")
