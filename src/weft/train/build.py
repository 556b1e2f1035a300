"""Build the network and the batches of a recipe."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data import resolve_model_data_config
from torch import nn

from weft.checkpoints import load_checkpoint
from weft.checkpoints.hub_dir import PREFIX
from weft.checkpoints.model_dir import CONFIG, WEIGHTS, model_dir, read_config
from weft.data import ImageDataset, Source, Splits, eval_transform, make_loader, open_data, train_transform
from weft.data.loading.loader import ImageLoader
from weft.data.loading.order import WHOLE, Share
from weft.errors import CheckpointError, DataError, UsageError
from weft.grid import Grid
from weft.hub import create_model
from weft.models.families import VARIANTS, plugins
from weft.models.registry import build_described
from weft.recipes import Recipe
from weft.text import printable
from weft.train.objective import check_mixing
from weft.train.progress import looking, say
from weft.train.runtime import Runtime
from weft.version import __version__

OnLost = Literal["stop", "exclude"]
DRAFTED = 2  # a JPEG may be decoded smaller for training while its sides keep this many times the input size
RECORDED = ("torch", "torchvision", "timm", "numpy", "pillow")
VARIABLES = (  # of the environment, that choose between algorithms whose last bits differ
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)


def default_name(recipe: Recipe) -> str:
    """MODEL-DATA, with nothing in it that a path could stumble over."""
    text = f"{recipe.model}-{Path(recipe.data.source or '').resolve().name}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text)[:100]


def open_splits(recipe: Recipe, quiet: bool) -> Splits:
    """The data of a recipe; told on the way how many pictures were looked at.

    Raises:
        DataError: it cannot be used.
    """
    if not quiet:
        say(f"Reads {', '.join(places_of(recipe))}.")
    with looking(quiet=quiet) as progress:
        return open_data(
            str(recipe.data.source),
            val_fraction=recipe.data.val_fraction,
            train_fraction=recipe.data.train_fraction,
            seed=recipe.seed,
            max_bad=recipe.data.max_bad,
            limit=recipe.data.limit,
            progress=progress,
        )


def places_of(recipe: Recipe) -> list[str]:
    """The settings of a recipe that name files, folders or addresses, or make weft fetch weights, and their values."""
    places = {
        "data.source": recipe.data.source,
        "start_from": recipe.start_from,
        "distill.teacher": recipe.distill.teacher,
        "pretrained": f"the public weights of {recipe.model or 'the chosen model'}" if recipe.pretrained else None,
    }
    return [f"{key}: {printable(str(value))}" for key, value in places.items() if value is not None]


def build_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The network of a recipe, initialised from its seed, at the recipe's image size."""
    name, arguments = recipe.model or "", dict(recipe.model_args)
    if recipe.img_size is not None and name in VARIANTS:
        arguments["img_size"] = recipe.img_size
    torch.manual_seed(recipe.seed)
    model = build_described(name, arguments, create_model, pretrained=recipe.pretrained, num_classes=num_classes)
    if recipe.img_size is not None:
        model = resized(model, recipe.img_size)
    if recipe.grad_checkpointing:
        network: Any = model  # torch types every attribute of a module as tensor or module
        network.set_grad_checkpointing(True)
    return model


def begin_from(model: nn.Module, source: str | Path, classes: Sequence[str] | None = None) -> str:
    """Loads weights to start from: positions resized, a head of other classes left as it is.

    Args:
        model: the network, built.
        source: a run directory (its best model), a model directory, one on the hub (`hf-hub:OWNER/NAME`), or a
            checkpoint of any layout that weft reads.
        classes: what the model is to tell apart.

    Returns:
        What was loaded, in a sentence.

    Raises:
        CheckpointError: there is nothing there, or it does not fit.
    """
    if str(source).startswith(PREFIX):
        source = model_dir(source)
    folders = (Path(source) / "best", Path(source))
    path = next((folder / WEIGHTS for folder in folders if (folder / WEIGHTS).is_file()), Path(source))
    if path.is_dir() or not path.exists():
        raise CheckpointError(
            f"--from must name a run, a model directory or a checkpoint file; {source} is none of these."
        )
    is_described = path.name == WEIGHTS and (path.parent / CONFIG).is_file()
    theirs = read_config(path.parent)["label_names"] if is_described else None
    try:
        load_checkpoint(model, path, head="drop" if theirs and theirs != classes else "keep")
    except CheckpointError:
        load_checkpoint(model, path, head="drop")
        theirs = theirs or ["others"]
    has_own_head = bool(theirs) and theirs != classes
    return f"Weights from {path}" + (", but for the head, whose classes are others." if has_own_head else ".")


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
        cfg["interpolation"] if augment.interpolation == "auto" else augment.interpolation,
        in_chans=in_chans,
        crop=augment.crop,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        rand_augment=augment.rand_augment,
        erase_prob=augment.erase_prob,
        crop_pct=cfg["crop_pct"],
        crop_mode=cfg["crop_mode"],
    )
    at_least = DRAFTED * max(size) if recipe.data.draft else None
    return ImageDataset(source, transform, recipe.seed, at_least=at_least, on_lost=recipe.data.on_lost)


def training_batches(recipe: Recipe, dataset: ImageDataset, model: nn.Module, runtime: Runtime) -> ImageLoader:
    """Shuffled batches. A step that is not full is left out: BatchNorm cannot learn from a single image.

    Raises:
        UsageError: the recipe asks for single images where that is so, for parts of a step that are not equal, or for
            pairs of an odd number of images.
    """
    assert isinstance(recipe.batch_size, int), "an automatic batch size is decided first"
    share = Share(runtime.rank, runtime.world, recipe.accumulate)
    size = recipe.batch_size // share.parts
    learns_statistics = recipe.train_mode == "train" and any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    if size <= 1 and recipe.batch_size % share.parts == 0 and learns_statistics:
        of = f" in {share.parts} parts" if share.parts > 1 else ""
        raise UsageError(
            f"{recipe.model} must see at least 2 images at a time to learn (BatchNorm); got batch_size "
            f"{recipe.batch_size}{of}."
        )
    loader = make_loader(
        dataset,
        recipe.batch_size,
        shuffle=True,
        seed=recipe.seed,
        workers=recipe.workers,
        drop_last=True,
        repeats=recipe.augment.repeats,
        share=share,
    )
    check_mixing(recipe, size, share.parts)
    return loader


def evaluation_batches(
    source: Source, model: nn.Module, batch_size: int, workers: int, *, share: Share = WHOLE, on_lost: OnLost = "stop"
) -> ImageLoader:
    """All images in their order, as the model wants to see them; of several processes, this one's part.

    Raises:
        DataError: there are none.
    """
    if len(source) == 0:
        raise DataError("An evaluation needs at least one image; got none. Give every class two images or more.")
    images = ImageDataset(source, eval_transform(preprocessing(model)), on_lost=on_lost)
    return make_loader(images, batch_size, shuffle=False, workers=workers, share=share)


def batch_arithmetic(recipe: Recipe, world: int) -> str:
    """How the images of a step are spread, as `256 images per step = 64 per device x 2 devices x 2 in turn`."""
    assert isinstance(recipe.batch_size, int)
    each = recipe.batch_size // (world * recipe.accumulate)
    devices = f"{world} device{'s' if world > 1 else ''}"
    return f"{recipe.batch_size} images per step = {each} per device x {devices} x {recipe.accumulate} accumulated"


def name_of(source: Source, index: int) -> str:
    """The name of an image, printable, also where the image itself is gone."""
    return printable(source.keys[index])


def machine(runtime: Runtime) -> dict[str, Any]:
    """All that the bits of a run depend on beside recipe and data."""
    return {
        "weft": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in RECORDED},
        "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": runtime.world,
        **{name: os.environ.get(name, "unset") for name in VARIABLES},
    }


def environment(runtime: Runtime, splits: Splits) -> dict[str, Any]:
    """What a run ran on, for the record in its recipe."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(runtime),
        "train_images": len(splits.train),
        "val_images": len(splits.val),
        "excluded_images": len(splits.bad),
        "classes": list(splits.classes),
        **({"plugins": plugins()} if plugins() else {}),
    }
