"""Teacher of knowledge distillation: load and check it, compute its logits per step or cache them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from weft.checkpoints import load_model_dir
from weft.checkpoints.config import CONFIG
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import PREFIX, model_dir
from weft.data.order import Key
from weft.errors import CheckpointError, UsageError
from weft.grid import Grid
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.models.contract import mean_logits, preprocessing
from weft.recipes import Recipe
from weft.train.state import sha256_of_tensors


class Teacher:
    """A frozen model that provides target logits for the student.

    It receives the same augmented and mixed images as the student (DeiT, arXiv 2012.12877, section 4), with its own
    normalisation, and resized if it has a fixed input size.

    Args:
        model: any classifier under timm's contract; set to evaluation mode.
        student_cfg: preprocessing of the images that it will receive, under timm's keys.
        runtime: device and precision.
    """

    def __init__(self, model: nn.Module, student_cfg: dict[str, Any], runtime: Runtime) -> None:
        self.model, self.runtime = model.to(runtime.device).eval().requires_grad_(False), runtime
        own = preprocessing(model)
        has_fixed_size = getattr(model, "pretrained_cfg", {}).get("fixed_input_size", False)
        self.size = Grid.of(own["input_size"][1:]) if has_fixed_size else None
        student_mean, student_std, mean, std = (
            torch.tensor(cfg[key], device=runtime.device).view(1, -1, 1, 1)
            for cfg in (student_cfg, own)
            for key in ("mean", "std")
        )
        self.scale, self.shift = student_std / std, (student_mean - mean) / std
        self.is_same = bool((self.scale == 1).all() and (self.shift == 0).all())
        self.preprocessing = {"mean": list(own["mean"]), "std": list(own["std"]), "size": self.size and [*self.size]}
        self.cached_logits: Float[Tensor, "n classes"] | None = None

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record for the state of a run of all that the outputs depend on: architecture, preprocessing, weights."""
        arguments = getattr(self.model, "model_args", {})
        name = getattr(self.model, "pretrained_cfg", {}).get("architecture") or type(self.model).__name__
        return {
            "architecture": f"{name} {json.dumps(arguments, sort_keys=True, default=str)}" if arguments else name,
            "preprocessing": self.preprocessing,
            "weights_sha256": sha256_of_tensors(self.model.state_dict()),
        }

    @torch.no_grad()
    def __call__(self, images: Float[Tensor, "b c h w"], keys: Sequence[Key] = ()) -> Float[Tensor, "b classes"]:
        """Return the logits of a batch; cached ones are looked up by the keys of the images."""
        if self.cached_logits is not None:
            return self.cached_logits[[index for _, index, _ in keys]].to(images.device)
        if not self.is_same:
            images = images * self.scale + self.shift
        if self.size is not None and images.shape[-2:] != tuple(self.size):
            images = F.interpolate(images, tuple(self.size), mode="bicubic", antialias=True)
        with self.runtime.autocast():
            return mean_logits(self.model(images)).float()

    def cache_outputs(self, recipe: Recipe, student: nn.Module, source: Any, on_batch: Callable[[int], None]) -> None:
        """Compute and cache the logits of every image of a source, with the student's evaluation preprocessing."""
        assert isinstance(recipe.batch_size, int)
        batches = evaluation_batches(source, student, recipe.batch_size, recipe.workers, device=self.runtime.device)
        logits = []
        for images, labels in batches:
            logits.append(self(self.runtime.put(images)).cpu())
            on_batch(len(labels))
        self.cached_logits = torch.cat(logits)


def open_teacher(recipe: Recipe, student: nn.Module, classes: Sequence[str], runtime: Runtime) -> Teacher:
    """Load the teacher of a recipe, and check that it fits the student and the classes of the dataset.

    Raises:
        UsageError: the teacher has other classes, or `train_mode` does not support distillation for this student.
        CheckpointError: the weights cannot be loaded.
    """
    name = recipe.distill.teacher
    assert name is not None
    if recipe.train_mode == "eval" and _has_two_heads(student):
        raise UsageError(
            "Distillation of a student with two heads needs train_mode: train, since it returns the outputs of both"
            " heads only in training mode; got train_mode eval. Set train_mode: train, or distill.teacher: null."
        )
    if _is_directory(name):
        model, names = load_model_dir(model_dir(name))
    elif Path(name).exists() or os.sep in name or "/" in name:
        raise CheckpointError(
            f"A teacher must be a model name or a model directory; {name} is neither. Create a model directory with"
            " weft convert."
        )
    else:
        model, names = create_model(name, pretrained=True), None
    if model.num_classes != len(classes):
        raise UsageError(
            f"The teacher must have the classes of the dataset; {name} has {model.num_classes}, the dataset"
            f" {len(classes)}. Fine-tune the teacher on this dataset first: weft train DATA --model NAME --set"
            " pretrained=true."
        )
    if names is not None and list(names) != list(classes):
        index = next(i for i, (theirs, ours) in enumerate(zip(names, classes, strict=True)) if theirs != ours)
        raise UsageError(
            f"The teacher must have the classes of the dataset in the same order; class {index} of {name} is"
            f" '{names[index]}', of the dataset '{classes[index]}'. Fine-tune the teacher on this dataset, or rename"
            " the classes."
        )
    return _teacher_of(model, student, runtime)


def untrained_teacher(recipe: Recipe, student: nn.Module, num_classes: int, runtime: Runtime) -> Teacher | None:
    """Return the teacher to measure time and memory, of a model name with random weights; None without distillation."""
    name = recipe.distill.teacher
    if name is None:
        return None
    model = load_model_dir(model_dir(name))[0] if _is_directory(name) else create_model(name, num_classes=num_classes)
    return _teacher_of(model, student, runtime)


def _teacher_of(model: nn.Module, student: nn.Module, runtime: Runtime) -> Teacher:
    """Return a model as the teacher of a student, which learns with both heads if it has two."""
    if _has_two_heads(student):
        enable_both_heads: Any = getattr(student, "set_distilled_training", lambda enable: None)
        enable_both_heads(True)
    return Teacher(model, preprocessing(student), runtime)


def _has_two_heads(student: nn.Module) -> bool:
    return getattr(student, "head_dist", None) is not None


def _is_directory(name: str) -> bool:
    """Return whether a teacher is a run or model directory, or one on the hub."""
    return name.startswith(PREFIX) or any((folder / CONFIG).is_file() for folder in (Path(name) / "best", Path(name)))


def is_cached(recipe: Recipe) -> bool:
    """Return whether the teacher's logits of all training images, which never change, are computed once."""
    augment = recipe.augment
    is_random = augment.hflip or augment.color_jitter or augment.rand_augment or augment.erase_prob
    is_mixed = augment.mixup or augment.cutmix
    return recipe.distill.cache and augment.crop == "none" and not is_random and not is_mixed
