"""Plan: from the request of a user to recipe, network, batches and learner.

`make_plan` opens the dataset and makes the decisions that depend on it; `Plan.measured` makes those that need a
measurement. The parts are built when they are first used: `--preview` loads no weights, and `--find-lr` uses no
validation set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from weft.checkpoints.hub import source_of
from weft.data import Splits, image_size_hint, open_data
from weft.data.bit_depth import value_notes
from weft.data.loader import ImageLoader
from weft.data.order import Key
from weft.inference.inputs import evaluation_batches, split_plan
from weft.models.families import check_name, default_model
from weft.progress import counting, reading, say
from weft.recipes import Recipe
from weft.recipes.rules import check_rules
from weft.runtime import Runtime
from weft.text import printable
from weft.train import few_images
from weft.train.batches import training_batches, training_images
from weft.train.distillation import open_teacher
from weft.train.linear_probe import balance_of, fit_heads
from weft.train.loop import Batch, Learner
from weft.train.network import build_model, check_sync_bn, load_start_weights, synchronized, with_start_network
from weft.train.refusals import refusing
from weft.train.request import Request
from weft.train.timing import find_batch_size, find_precision

IMAGES_SEEN = 400_000  # training images, repetitions included, that a small problem needs from scratch
EPOCHS = (10, 100)  # smallest and largest default
FEATURE_BATCH = 32  # images per forward pass of the frozen network
MAX_LEFT_OUT = 0.05  # of the training images, by an incomplete last step of each epoch, without a note


@dataclass(frozen=True)
class Plan:
    """Everything that a training run consists of.

    Attributes:
        recipe: with every decision made; of `make_plan`, a batch size and a precision of `auto` are not measured yet.
        splits: training and validation images.
        runtime: device, precision and processes.
        notes: a sentence for each decision.
        loads_weights: load the public weights; not for a run whose weights come from a saved state.
        fits_batches: the batch size is weft's to change, so that an epoch leaves out few images.
    """

    recipe: Recipe
    splits: Splits
    runtime: Runtime
    notes: tuple[str, ...] = ()
    loads_weights: bool = True
    fits_batches: bool = False

    @cached_property
    def network(self) -> nn.Module:
        """The network on its device, initialised from the seed or with public weights."""
        recipe = with_value_range(self.recipe, self.splits)
        recipe = recipe if self.loads_weights else dataclasses.replace(recipe, pretrained=False)
        with refusing(f"{recipe.model} must support these images and settings"):
            network = build_model(recipe, len(self.splits.classes)).to(self.runtime.device)
        if recipe.sync_bn and self.runtime.world > 1:
            network = synchronized(network)
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
        )

    def measured(self, *, measure: bool = True) -> Plan:
        """Return the plan with a batch size and a precision of `auto` decided, and batches that leave out few images.

        Args:
            measure: time training steps; else a batch size of `auto` stays, for a plan that trains nothing.
        """
        recipe, runtime, images = self.recipe, self.runtime, len(self.splits.train)
        notes, fits_batches = [*self.notes], self.fits_batches or recipe.batch_size == "auto"
        is_auto = recipe.precision == "auto"
        recipe = dataclasses.replace(recipe, precision=runtime.precision) if is_auto else recipe
        with refusing(f"{recipe.model} must support training on this machine"):
            if measure and recipe.batch_size == "auto":
                batch_size, note = find_batch_size(recipe, len(self.splits.classes), images, runtime)
                recipe = dataclasses.replace(recipe, batch_size=batch_size)
                notes.append(note)
            if measure and is_auto:
                runtime, note = find_precision(recipe, len(self.splits.classes), runtime)
                recipe = dataclasses.replace(recipe, precision=runtime.precision)
                notes.append(note)
        recipe, note = use_all_images(recipe, images, runtime.world, may_change=fits_batches)
        notes += [note] if note else []
        return dataclasses.replace(self, recipe=recipe, runtime=runtime, notes=tuple(notes))

    def initialise(self, note: Callable[[str], None]) -> None:
        """Give the network the weights that training starts from: given or public ones, and a fitted classifier.

        Args:
            note: called with a sentence for each.
        """
        if self.recipe.start_from is not None:
            note(load_start_weights(self.network, self.recipe.start_from, self.splits.classes))
        if self.recipe.pretrained:
            note(f"Starts from the public weights {source_of(str(self.recipe.model))}.")
        if self.recipe.head_init == "probe":
            self._fit_heads(note)

    def _fit_heads(self, note: Callable[[str], None]) -> None:
        """Fit the classifiers of the network to the features of the training images, with a note on each."""
        images = evaluation_batches(self.splits.train, self.network, FEATURE_BATCH, self.recipe.workers)
        with counting(len(self.splits.train), task_name="features") as count:
            probes = fit_heads(
                self.network,
                images,
                len(self.splits.classes),
                self.runtime,
                balance=balance_of(self.recipe),
                groups=self.splits.groups,
                seed=self.recipe.seed,
                label_smoothing=self.recipe.loss.label_smoothing if self.steps else 0.0,
                is_mirrored=self.recipe.augment.hflip,
                on_batch=count,
            )
        for probe in probes:
            note(probe.describe(self.splits.classes))

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

    def training_steps(self, epoch: int, first: int = 0) -> Iterator[tuple[list[Batch], list[list[Key]]]]:
        """Yield, for each step of an epoch, the micro-batches of this process, and the keys of their images.

        Args:
            epoch, first: index of the epoch and of the first step, from 0.
        """
        batches, parts, step = self.batches, list[Batch](), first
        batches.start_at(epoch, first)
        for images, labels in batches:
            parts.append((self.runtime.put(images), self.runtime.put(labels)))
            if len(parts) == self.recipe.accumulate:
                yield parts, batches.order.parts(epoch, step)
                parts, step = [], step + 1

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


def make_plan(request: Request) -> Plan:
    """Open the dataset and decide what the request leaves open, except what is measured (`Plan.measured`).

    Args:
        request: what the user asked for.

    Raises:
        UsageError, DataError, CheckpointError: settings, data or weights that cannot be used.
    """
    asked = request.resolved
    if asked.model is not None:
        check_name(asked.model)
    runtime = Runtime.of(asked.device, asked.precision, deterministic=asked.deterministic)
    # of the first process: the hub may reply to one only
    recipe, note = runtime.gather(few_images.with_available_weights(request))[0]
    if note:
        say(note)
    check_sync_bn(recipe, runtime)
    splits = open_splits(recipe)
    size, count = image_size_hint(splits.train), len(splits.train)
    recipe, on_weights = runtime.gather(few_images.with_start_weights(request, recipe, size, count))[0]
    recipe, on_network = with_start_network(recipe)
    recipe, decisions = fill_in(recipe, size, count, runtime.world)
    recipe = with_value_range(recipe, splits)
    range_notes = value_notes(splits.values, recipe.data.value_range)
    notes = [note for note in (on_weights, on_network, *decisions, *range_notes) if note]
    return Plan(recipe, splits, runtime, (*splits.notes, *notes), fits_batches=request.leaves_batch_size)


def fill_in(recipe: Recipe, image_size: tuple[int, int], num_images: int, world: int = 1) -> tuple[Recipe, list[str]]:
    """Decide what the recipe leaves open: model, image size, epochs; and limit the batch size to the dataset.

    Args:
        recipe: as loaded.
        image_size: typical (height, width) of the images in pixels.
        num_images: number of training images.
        world: number of processes.

    Returns:
        The complete recipe, and a sentence for each decision.

    Raises:
        UsageError: its settings contradict each other.
    """
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
    check_rules(recipe)
    return recipe, notes


def with_value_range(recipe: Recipe, splits: Splits) -> Recipe:
    """Return the recipe with the value range of the dataset, unless it names one or all images have 8 bits."""
    value_range = recipe.data.value_range or splits.value_range
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, value_range=value_range))


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


def open_splits(recipe: Recipe) -> Splits:
    """Open the dataset of a recipe, and print what is read.

    Raises:
        DataError: the dataset cannot be used.
    """
    say(f"Reading {', '.join(sources_of(recipe))}.")
    with reading() as progress:
        return open_data(
            str(recipe.data.source),
            split_plan(recipe),
            image=recipe.data.image,
            label=recipe.data.label,
            max_bad=recipe.data.max_bad,
            max_pixels=recipe.data.max_pixels,
            follow_links=recipe.data.follow_links,
            progress=progress,
        )


def sources_of(recipe: Recipe) -> list[str]:
    """Return the settings, with values, that name files, folders or URLs to read, or weights to download."""
    sources = {
        "data.source": recipe.data.source,
        "start_from": recipe.start_from,
        "data.other": recipe.data.other,
        "distill.teacher": recipe.distill.teacher,
        "pretrained": f"the public weights of {recipe.model or 'the chosen model'}" if recipe.pretrained else None,
    }
    return [f"{key}: {printable(str(value))}" for key, value in sources.items() if value is not None]
