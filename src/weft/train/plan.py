"""Plan: from recipe and dataset to network, batches and learner, in one step.

The parts are built when they are first used: `--preview` loads no weights, and `--find-lr` uses no validation set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from weft.data import Splits, image_size_hint, open_data
from weft.data.loading.loader import ImageLoader
from weft.errors import UsageError
from weft.inference.inputs import evaluation_batches
from weft.models.families import default_model
from weft.progress import reading, say
from weft.recipes import Recipe
from weft.recipes.load import default_recipe
from weft.runtime import Runtime
from weft.system import file_name
from weft.text import printable
from weft.train import few_images
from weft.train.arguments import load_plan_recipe as load_plan_recipe
from weft.train.batch_size_finder import find_batch_size
from weft.train.batches import training_batches, training_images
from weft.train.distillation import open_teacher
from weft.train.loop import Learner
from weft.train.network import build_model, with_start_network
from weft.train.objective import check_balance
from weft.train.precision_finder import find_precision
from weft.train.refusals import refusing
from weft.train.sync_batchnorm import sync_batchnorm

IMAGES_SEEN = 400_000  # training images, repetitions included, that a small problem needs from scratch
EPOCHS = (10, 100)  # smallest and largest default
MAX_LEFT_OUT = 0.05  # of the training images, by an incomplete last step of each epoch, without a note


@dataclass(frozen=True)
class Plan:
    """Everything that a training run consists of.

    Attributes:
        recipe: with every decision made.
        splits: training and validation images.
        runtime: device, precision and processes.
        notes: a sentence for each decision.
        is_resumed: the weights come from a saved state, so public weights are not loaded.
    """

    recipe: Recipe
    splits: Splits
    runtime: Runtime
    notes: tuple[str, ...] = ()
    is_resumed: bool = False

    @cached_property
    def network(self) -> nn.Module:
        """The network on its device, initialised from the seed or with public weights."""
        recipe = dataclasses.replace(self.recipe, pretrained=False) if self.is_resumed else self.recipe
        with refusing(f"{recipe.model} must support these images and settings"):
            network = build_model(recipe, len(self.splits.classes)).to(self.runtime.device)
        if recipe.sync_bn and self.runtime.world > 1:
            network = sync_batchnorm(network, self.runtime.device)
        return network

    @cached_property
    def batches(self) -> ImageLoader:
        """Batches of augmented training images: the share of this process."""
        images = training_images(self.recipe, self.splits.train, self.network)
        return training_batches(self.recipe, images, self.network, self.runtime)

    @cached_property
    def val_batches(self) -> ImageLoader:
        """Batches of validation images: the share of this process."""
        order = self.batches.order
        return evaluation_batches(
            self.splits.val,
            self.network,
            order.batch_size,
            self.recipe.workers,
            share=dataclasses.replace(order.share, accumulate=1),
            on_lost=self.recipe.data.on_lost,
        )

    def build(self) -> nn.Module:
        """Build network and batches, so that their errors come before a run starts; return the network."""
        network, _ = self.network, self.val_batches
        return network

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a full epoch."""
        return self.batches.order.steps_per_epoch

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.recipe.steps or self.steps_per_epoch * (self.recipe.epochs or 0)

    def learner(self) -> Learner:
        """Build network, optimizer, loss and teacher, at step 0.

        Raises:
            UsageError, CheckpointError: settings or a teacher that do not fit the network.
        """
        recipe, teacher = self.recipe, None
        if recipe.distill.teacher is not None:
            teacher = open_teacher(recipe, self.network, self.splits.classes, self.runtime)
        counts = self.steps_per_epoch, self.steps, len(self.splits.classes)
        with refusing(f"{recipe.model} must support training with these settings"):
            return Learner(self.network, recipe, self.runtime, *counts, self.splits.train.labels, teacher)


def leaves_batch_size(
    data: str | Path | None, recipe: str | Path | None, settings: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> bool:
    """Return whether the arguments of `train` leave the batch size to weft: no recipe and no batch size are given."""
    is_given = given.get("batch_size") is not None or "batch_size" in (settings or {})
    return not is_given and recipe is None and default_recipe(data) is None


def make_plan(
    recipe: Recipe,
    runtime: Runtime,
    *,
    quiet: bool,
    tune_batch_size: bool = True,
    fit_batch_size: bool = False,
    on_decided: Callable[[Recipe], None] = lambda recipe: None,
    reload: Callable[[str, str], Recipe] | None = None,
) -> Plan:
    """Open the dataset and decide what the recipe leaves open: model, image size, epochs, batch size.

    Args:
        recipe: as loaded.
        runtime: device, precision and processes.
        quiet: print no progress and no notes.
        tune_batch_size: measure the batch size and the precision if they are `auto`.
        fit_batch_size: reduce the batch size if an incomplete last step would leave out many images.
        on_decided: called with the recipe once model and epochs are decided, before anything is measured.
        reload: loads the recipe again from another base recipe and with a model; None if the user named a recipe
            or initial weights.

    Raises:
        UsageError, DataError: settings or data that cannot be used.
    """
    if recipe.extend is not None:
        raise UsageError("extend is for weft train alone, without --find-lr and --preview; omit it.")
    splits = open_splits(recipe, quiet)
    size, reasons = image_size_hint(splits.train), []
    if reload is not None:
        if recipe.model is not None:
            note = few_images.note_on_scratch(recipe.model, size, len(splits.train))
        else:
            model, note = few_images.choice(size, len(splits.train))
            recipe = recipe if model is None else reload(few_images.RECIPE, model)
        reasons = [note] if note else []
    recipe, note = with_start_network(recipe)
    if note:
        reasons.append(note)
    is_auto = recipe.precision == "auto"
    if is_auto:
        recipe = dataclasses.replace(recipe, precision=runtime.precision)
    recipe, decisions = fill_in(recipe, size, len(splits.train), runtime.world)
    decisions = [*reasons, *decisions]
    on_decided(recipe)
    fit_batch_size |= recipe.batch_size == "auto"
    if tune_batch_size and recipe.batch_size == "auto":
        with refusing(f"{recipe.model} must support training on this machine"):
            batch_size, note = find_batch_size(recipe, len(splits.classes), len(splits.train), runtime)
        recipe, decisions = dataclasses.replace(recipe, batch_size=batch_size), [*decisions, note]
    if is_auto and tune_batch_size:
        with refusing(f"{recipe.model} must support training on this machine"):
            runtime, note = find_precision(recipe, len(splits.classes), runtime)
        recipe, decisions = dataclasses.replace(recipe, precision=runtime.precision), [*decisions, note]
    recipe, note = use_all_images(recipe, len(splits.train), runtime.world, may_change=fit_batch_size)
    if note:
        decisions.append(note)
    return Plan(recipe, splits, runtime, (*splits.notes, *decisions))


def fill_in(recipe: Recipe, image_size: tuple[int, int], num_images: int, world: int = 1) -> tuple[Recipe, list[str]]:
    """Decide what the recipe leaves open: model, image size, epochs; and limit the batch size to the dataset.

    Args:
        recipe: as loaded.
        image_size: typical (height, width) of the images in pixels.
        num_images: number of training images.
        world: number of processes.

    Returns:
        The complete recipe, and a sentence for each decision.
    """
    if recipe.epochs == 0 and recipe.head_init != "probe":
        raise UsageError("epochs must be at least 1, or 0 with --set head_init=probe; got 0.")
    check_balance(recipe)
    notes: list[str] = []
    images = f"images of about {image_size[0]}x{image_size[1]} pixels"
    if recipe.model is None:
        model, img_size = default_model(min(image_size), num_images)
        recipe = dataclasses.replace(recipe, model=model, img_size=recipe.img_size or img_size)
        notes.append(f"Model {model}, for {num_images:,} {images}; another: --model NAME.")
    if recipe.epochs is None and recipe.steps is None:
        epochs = min(max(round(IMAGES_SEEN / num_images), EPOCHS[0]), EPOCHS[1])
        recipe = dataclasses.replace(recipe, epochs=epochs)
        notes.append(f"{epochs} epochs, for {num_images:,} images; another number: --epochs N.")
    if isinstance(recipe.batch_size, int) and recipe.batch_size > num_images:
        parts = _batch_divisor(recipe, world)
        fitting = max(num_images // parts * parts, 1)
        recipe = dataclasses.replace(recipe, batch_size=fitting)
        notes.append(f"Batch size {fitting}: the training set has {num_images} images.")
    return recipe, notes


def use_all_images(recipe: Recipe, num_images: int, world: int = 1, *, may_change: bool) -> tuple[Recipe, str]:
    """Reduce the batch size to one that leaves out fewer images, if an incomplete last step leaves out many.

    The last step of an epoch is dropped if it is incomplete, since BatchNorm cannot train on a single image.

    Args:
        recipe: with its batch size.
        num_images: number of training images.
        world: number of processes.
        may_change: whether the batch size was left to weft; else only the note is returned.

    Returns:
        The recipe, and a sentence if many images would be left out; else an empty text.
    """
    size = recipe.batch_size
    if recipe.epochs == 0 or not isinstance(size, int) or num_images % size <= MAX_LEFT_OUT * num_images:
        return recipe, ""
    divisor = _batch_divisor(recipe, world)
    smallest = max(size // 2, 2 * world * recipe.accumulate)
    sizes = [other for other in range(size, smallest - 1, -1) if other % divisor == 0]
    best = min(sizes, key=lambda other: num_images % other, default=size)
    used, used_by_best = (num_images - num_images % one for one in (size, best))
    if best != size and may_change:
        note = (
            f"Batch size {best}: an epoch uses {used_by_best} of {num_images} training images; with {size}, {used}."
            " Another: --batch-size N."
        )
        return dataclasses.replace(recipe, batch_size=best), note
    advice = f"; with --batch-size {best} it is {used_by_best}" if best != size else ""
    return recipe, (
        f"An epoch uses {used} of {num_images} training images, different ones each time, since batches of {size} leave"
        f" {num_images % size} over{advice}."
    )


def _batch_divisor(recipe: Recipe, world: int) -> int:
    """Return the number that must divide the batch size: parts of a step, and pairs of images if they are mixed."""
    return world * recipe.accumulate * (2 if recipe.augment.mixup or recipe.augment.cutmix else 1)


def default_name(recipe: Recipe) -> str:
    """Return MODEL-DATA, with only characters that are safe in a path."""
    return file_name(f"{recipe.model}-{Path(recipe.data.source or '').resolve().name}")


def open_splits(recipe: Recipe, quiet: bool) -> Splits:
    """Open the dataset of a recipe, and print what is read.

    Raises:
        DataError: the dataset cannot be used.
    """
    if not quiet:
        say(f"Reading {', '.join(sources_of(recipe))}.")
    with reading(quiet=quiet) as progress:
        return open_data(
            str(recipe.data.source),
            val_fraction=recipe.data.val_fraction,
            train_fraction=recipe.data.train_fraction,
            folds=recipe.data.folds,
            fold=recipe.data.fold or 1,
            group=recipe.data.group,
            image=recipe.data.image,
            label=recipe.data.label,
            seed=recipe.seed,
            max_bad=recipe.data.max_bad,
            limit=recipe.data.limit,
            follow_links=recipe.data.follow_links,
            progress=progress,
        )


def sources_of(recipe: Recipe) -> list[str]:
    """Return the settings, with values, that name files, folders or URLs to read, or weights to download."""
    sources = {
        "data.source": recipe.data.source,
        "start_from": recipe.start_from,
        "extend": recipe.extend,
        "data.other": recipe.data.other,
        "distill.teacher": recipe.distill.teacher,
        "pretrained": f"the public weights of {recipe.model or 'the chosen model'}" if recipe.pretrained else None,
    }
    return [f"{key}: {printable(str(value))}" for key, value in sources.items() if value is not None]
