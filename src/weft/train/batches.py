"""Batches of augmented training images."""

from __future__ import annotations

from torch import nn

from weft.data import ImageDataset, Source, make_loader, train_transform
from weft.data.loader import ImageLoader
from weft.data.order import Share
from weft.errors import UsageError
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.progress import say
from weft.recipes import Recipe
from weft.train.objective import check_mixing

DRAFTED = 2  # a JPEG may be decoded at reduced size for training while its sides keep this many times the input size


def training_images(recipe: Recipe, source: Source, model: nn.Module) -> ImageDataset:
    """Return the training images with the augmentation of the recipe, at the input size of the model."""
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
    return ImageDataset(source, transform, recipe.seed, at_least=at_least, value_range=cfg.get("value_range"))


def training_batches(recipe: Recipe, dataset: ImageDataset, model: nn.Module, runtime: Runtime) -> ImageLoader:
    """Return shuffled batches. An incomplete last step is dropped: BatchNorm cannot train on a single image.

    Raises:
        UsageError: the batch size gives single images to BatchNorm, unequal parts of a step, or an odd number of
            images to mixup and cutmix.
    """
    assert isinstance(recipe.batch_size, int), "an automatic batch size is decided first"
    share = Share(runtime.rank, runtime.world, recipe.accumulate)
    size = recipe.batch_size // share.parts
    learns_statistics = recipe.train_mode == "train" and any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    if size <= 1 and recipe.batch_size % share.parts == 0 and learns_statistics:
        of = f" in {share.parts} parts" if share.parts > 1 else ""
        raise UsageError(
            f"{recipe.model} needs at least 2 images per forward pass to train its BatchNorm; got batch_size "
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
        is_balanced=recipe.data.sampling == "balanced",
        device=runtime.device,
        on_choice=say,
    )
    check_mixing(recipe, size, share.parts)
    return loader


def batch_arithmetic(recipe: Recipe, world: int) -> str:
    """Describe the images of a step, such as `256 images per step = 64 per device x 2 devices x 2 accumulated`."""
    assert isinstance(recipe.batch_size, int)
    each = recipe.batch_size // (world * recipe.accumulate)
    devices = f"{world} device{'s' if world > 1 else ''}"
    return f"{recipe.batch_size} images per step = {each} per device x {devices} x {recipe.accumulate} accumulated"
