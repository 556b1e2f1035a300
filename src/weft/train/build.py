"""From a recipe and opened data to the network and the batches it is fed."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import nn

from weft.data import ImageDataset, Source, Splits, eval_transform, make_loader, train_transform
from weft.data.loader import ImageLoader
from weft.errors import DataError, UsageError
from weft.grid import Grid
from weft.hub import create_model
from weft.models.zoo import ZOO
from weft.recipes import Recipe
from weft.train.runtime import Runtime
from weft.version import __version__

RECORDED = ("torch", "torchvision", "timm", "numpy", "pillow")


def default_name(recipe: Recipe) -> str:
    """MODEL-DATA, with nothing in it that a path could stumble over."""
    text = f"{recipe.model}-{Path(recipe.data.source or '').resolve().name}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text)[:100]


def build_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The network of a recipe, initialised from its seed, at the recipe's image size."""
    name, arguments = recipe.model or "", dict(recipe.model_args)
    if recipe.img_size is not None and name in ZOO:
        arguments["img_size"] = recipe.img_size
    torch.manual_seed(recipe.seed)
    model = create_model(name, pretrained=recipe.pretrained, num_classes=num_classes, **arguments)
    return model if recipe.img_size is None else resized(model, recipe.img_size)


def resized(model: nn.Module, img_size: int | tuple[int, int]) -> nn.Module:
    """The same model, taking images of another size, and saying so in its `pretrained_cfg`.

    A network without positions, such as a ResNet, has nothing to resize and takes any size.
    """
    size = Grid.of(img_size)
    if tuple(preprocessing(model)["input_size"][1:]) == tuple(size):
        return model
    network: Any = model  # torch types every attribute of a module as tensor or module
    if hasattr(network, "set_input_size"):
        network.set_input_size(tuple(size))
    network.pretrained_cfg = {**network.pretrained_cfg, "input_size": (network.pretrained_cfg["input_size"][0], *size)}
    return network


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """How images are prepared for a model, under timm's keys: `input_size`, `mean`, `std`, `crop_pct` and others."""
    return resolve_model_data_config(model)


def training_images(recipe: Recipe, source: Source, model: nn.Module) -> ImageDataset:
    """Images varied as the recipe says, at the model's size."""
    cfg, augment = preprocessing(model), recipe.augment
    in_chans, *size = cfg["input_size"]
    transform = train_transform(
        (size[0], size[1]),
        cfg["mean"],
        cfg["std"],
        cfg["interpolation"],
        in_chans=in_chans,
        crop=augment.crop,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        rand_augment=augment.rand_augment,
        erase_prob=augment.erase_prob,
    )
    return ImageDataset(source, transform, recipe.seed)


def training_batches(recipe: Recipe, dataset: ImageDataset, model: nn.Module) -> ImageLoader:
    """Shuffled batches. One that is not full is left out: BatchNorm cannot learn from a single image.

    Raises:
        UsageError: the recipe asks for single images where that is so.
    """
    if recipe.batch_size == 1 and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        raise UsageError(f"{recipe.model} must see at least 2 images at a time to learn (BatchNorm); got batch_size 1.")
    return make_loader(
        dataset, recipe.batch_size, shuffle=True, seed=recipe.seed, workers=recipe.workers, drop_last=True
    )


def evaluation_batches(source: Source, model: nn.Module, batch_size: int, workers: int) -> ImageLoader:
    """All images in their order, as the model wants to see them.

    Raises:
        DataError: there are none.
    """
    if len(source) == 0:
        raise DataError("An evaluation needs at least one image; got none. Give every class two images or more.")
    return make_loader(
        ImageDataset(source, eval_transform(preprocessing(model))), batch_size, shuffle=False, workers=workers
    )


def environment(runtime: Runtime, splits: Splits) -> dict[str, Any]:
    """What a run ran on, for the record in its recipe."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weft": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in RECORDED},
        "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "train_images": len(splits.train),
        "val_images": len(splits.val),
        "excluded_images": len(splits.bad),
        "classes": list(splits.classes),
    }
