"""Plan: from the request of a user to recipe, network, batches and learner.

`make_plan` opens the dataset and makes the decisions that depend on it; `Plan.measured` makes those that need a
measurement, by the rules of `weft.train.decisions`. The parts are built when they are first used: `--preview` loads no
weights, and `--find-lr` uses no validation set.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from weft.checkpoints.hub import source_of
from weft.data import (
    ImageDataset,
    Source,
    Splits,
    image_size_hint,
    make_loader,
    open_data,
    train_transform,
)
from weft.data.bit_depth import value_notes
from weft.data.loader import ImageLoader
from weft.data.order import Key, Share
from weft.errors import UsageError
from weft.inference.inputs import split_plan
from weft.inference.measurement import evaluation_batches
from weft.lazy import LazyModule
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.models.families import check_name
from weft.progress import Work, say
from weft.recipes import Recipe
from weft.recipes.rules import check_rules
from weft.text import count, printable
from weft.train.candidates import ProbedNetwork
from weft.train.decisions import AFTER_TIMING, BEFORE_IMAGES, BY_IMAGES, BY_TIMING, Case, decide
from weft.train.distillation import open_teacher
from weft.train.linear_probe import fit_heads
from weft.train.loop import Batch, Learner
from weft.train.network import build_model, check_sync_bn, load_start_weights
from weft.train.refusals import refusing
from weft.train.request import NOTHING, Request

timm_layers: Any = LazyModule("timm.layers")

DRAFTED = 2  # a JPEG may be decoded at reduced size for training while its sides keep this many times the input size
FEATURE_BATCH = 32  # images per forward pass of the frozen network


@dataclass(frozen=True)
class Plan:
    """Everything that a training run consists of.

    Attributes:
        recipe: with every decision made; of `make_plan`, a batch size and a precision of `auto` are not measured yet.
        splits: training and validation images.
        runtime: device, precision and processes.
        notes: a sentence for each decision.
        loads_weights: load the public weights; not for a run whose weights come from a saved state.
        request: what the user named.
        series: series of similar images, by key, if training found some.
        candidates: results of the networks that training could start from, if they were compared.
    """

    recipe: Recipe
    splits: Splits
    runtime: Runtime
    notes: tuple[str, ...] = ()
    loads_weights: bool = True
    request: Request = NOTHING
    series: Mapping[str, str] = field(default_factory=dict)
    candidates: Sequence[ProbedNetwork] = ()

    @cached_property
    def network(self) -> nn.Module:
        """The network on its device, initialised from the seed or with public weights."""
        recipe = with_value_range(self.recipe, self.splits)
        recipe = recipe if self.loads_weights else dataclasses.replace(recipe, pretrained=False)
        with refusing(f"{recipe.model} must support these images and settings"):
            network = build_model(recipe, len(self.splits.classes)).to(self.runtime.device)
        if recipe.sync_bn and self.runtime.world > 1:
            network = timm_layers.convert_sync_batchnorm(network)  # also timm's BatchNorm with an activation
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
            device=self.runtime.device,
        )

    def measured(self, *, measure: bool = True) -> Plan:
        """Return the plan with a batch size and a precision of `auto` decided, and batches that leave out few images.

        Args:
            measure: time training steps; else a batch size of `auto` stays, for a plan that trains nothing.
        """
        rules = (*BY_TIMING, *AFTER_TIMING) if measure else AFTER_TIMING
        with refusing(f"{self.recipe.model} must support training on this machine"):
            recipe, notes = decide(rules, self.recipe, _case(self.request, self.splits, self.runtime))
        precision = self.runtime.precision if recipe.precision == "auto" else recipe.precision
        return dataclasses.replace(
            self,
            recipe=dataclasses.replace(recipe, precision=precision),
            runtime=dataclasses.replace(self.runtime, precision=precision),
            notes=(*self.notes, *notes),
        )

    def initialise(self, note: Callable[[str], None]) -> None:
        """Give the network the weights to start from, and a fitted classifier; call `note` with a sentence on each."""
        if self.recipe.start_from is not None:
            note(load_start_weights(self.network, self.recipe.start_from, self.splits.classes))
        if self.recipe.pretrained:
            note(f"Starts from the public weights {source_of(str(self.recipe.model))}.")
        if self.recipe.head_init == "probe":
            images = evaluation_batches(self.splits.train, self.network, FEATURE_BATCH, self.recipe.workers)
            num_classes, groups = len(self.splits.classes), self.splits.groups
            for probe in fit_heads(self.network, images, num_classes, self.runtime, self.recipe, groups):
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

    def all_steps(self) -> Iterator[tuple[list[Batch], list[list[Key]]]]:
        """Yield the steps of one epoch after the other, without end."""
        return itertools.chain.from_iterable(map(self.training_steps, itertools.count()))

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


def make_plan(request: Request, series: Mapping[str, str] | None = None) -> Plan:
    """Open the dataset and decide what the request leaves open, except what is measured (`Plan.measured`).

    Args:
        request: what the user asked for.
        series: series of similar images that were found in the dataset, by key.

    Raises:
        UsageError, DataError, CheckpointError: settings, data or weights that cannot be used.
    """
    recipe = request.resolved
    for name in filter(None, (recipe.model, *request.candidates)):
        check_name(name)
    runtime = Runtime.of(recipe.device, recipe.precision, deterministic=recipe.deterministic)
    recipe, notes = decide(BEFORE_IMAGES, recipe, Case(request, runtime=runtime))
    for note in notes:
        say(note)
    check_sync_bn(recipe, runtime)
    splits = open_splits(recipe, series)
    recipe, notes = decide(BY_IMAGES, recipe, _case(request, splits, runtime))
    check_rules(recipe)
    recipe = with_value_range(recipe, splits)
    notes = (*splits.notes, *notes, *value_notes(splits.values, recipe.data.value_range))
    return Plan(recipe, splits, runtime, notes, request=request, series=series or {})


def _case(request: Request, splits: Splits, runtime: Runtime) -> Case:
    return Case(request, image_size_hint(splits.train), len(splits.train), len(splits.classes), runtime)


def with_value_range(recipe: Recipe, splits: Splits) -> Recipe:
    """Return the recipe with the value range of the dataset, unless it names one or all images have 8 bits."""
    value_range = recipe.data.value_range or splits.value_range
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, value_range=value_range))


def open_splits(recipe: Recipe, series: Mapping[str, str] | None = None) -> Splits:
    """Open the dataset of a recipe, and print what is read; `series` are those that were found, by key.

    Raises:
        DataError: the dataset cannot be used.
    """
    say(f"Reading {', '.join(sources_of(recipe))}.")
    with Work("reading") as work:
        return open_data(
            str(recipe.data.source),
            split_plan(recipe, series),
            image=recipe.data.image,
            label=recipe.data.label,
            check=recipe.data.check,
            takes_next=recipe.data.damaged == "next",
            max_bad=recipe.data.max_bad,
            max_pixels=recipe.data.max_pixels,
            follow_links=recipe.data.follow_links,
            cache_bytes=recipe.data.cache_gb << 30,
            progress=work.update,
        )


def sources_of(recipe: Recipe) -> list[str]:
    """Return the settings, with values, that name files, folders or URLs to read, or weights to download."""
    sources = {
        "data.source": recipe.data.source,
        "start_from": recipe.start_from,
        "data.unknown_images": recipe.data.unknown_images,
        "distill.teacher": recipe.distill.teacher,
        "pretrained": f"the public weights of {recipe.model or 'the chosen model'}" if recipe.pretrained else None,
    }
    return [f"{key}: {printable(str(value))}" for key, value in sources.items() if value is not None]


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
    if (recipe.augment.mixup or recipe.augment.cutmix) and size % 2:
        raise UsageError(
            f"Mixup and cutmix mix pairs of images and need an even batch; got {size} images (batch_size"
            f" {recipe.batch_size} in {count(share.parts, 'part')}). Change --batch-size, or set augment.mixup and"
            " augment.cutmix to 0."
        )
    return loader


def batch_arithmetic(recipe: Recipe, world: int) -> str:
    """Describe the images of a step, such as `256 images per step = 64 per device x 2 devices x 2 accumulated`."""
    assert isinstance(recipe.batch_size, int)
    each = recipe.batch_size // (world * recipe.accumulate)
    devices = f"{world} device{'s' if world > 1 else ''}"
    return f"{recipe.batch_size} images per step = {each} per device x {devices} x {recipe.accumulate} accumulated"
