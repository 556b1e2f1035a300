"""The teacher of distillation: loading, checking, and its predictions, computed per step or cached."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from weft.checkpoints import load_model_dir
from weft.checkpoints.hub_dir import PREFIX
from weft.checkpoints.model_dir import CONFIG, model_dir
from weft.data.loading.order import Key
from weft.data.sources.listing import sort_class_names
from weft.errors import CheckpointError, UsageError
from weft.grid import Grid
from weft.hub import create_model
from weft.recipes import Recipe
from weft.train.build import evaluation_batches, preprocessing
from weft.train.objective import mean_logits
from weft.train.runtime import Runtime


class Teacher:
    """A model that is asked and does not learn.

    It sees the very pixels that the student sees, also mixed ones (DeiT, arXiv 2012.12877, section 4), normalised and,
    where it takes one size only, resized as it wants them.

    Args:
        model: any classifier under timm's contract; put into evaluation mode.
        student_cfg: how the images that it will be given are prepared, under timm's keys.
        runtime: where it computes, and in which number format.
    """

    def __init__(self, model: nn.Module, student_cfg: dict[str, Any], runtime: Runtime) -> None:
        self.model, self.runtime = model.to(runtime.device).eval().requires_grad_(False), runtime
        own = preprocessing(model)
        takes_one_size = getattr(model, "pretrained_cfg", {}).get("fixed_input_size", False)
        self.size = Grid.of(own["input_size"][1:]) if takes_one_size else None
        theirs_mean, theirs_std, mean, std = (
            torch.tensor(cfg[key], device=runtime.device).view(1, -1, 1, 1)
            for cfg in (student_cfg, own)
            for key in ("mean", "std")
        )
        self.scale, self.shift = theirs_std / std, (theirs_mean - mean) / std
        self.is_same = bool((self.scale == 1).all() and (self.shift == 0).all())
        self.preprocessing = {"mean": list(own["mean"]), "std": list(own["std"]), "size": self.size and [*self.size]}
        self.answers: Float[Tensor, "n classes"] | None = None

    @cached_property
    def record(self) -> dict[str, Any]:
        """All that its outputs depend on, for the state of a run: architecture, preprocessing, hash of the weights."""
        arguments = getattr(self.model, "model_args", {})
        name = getattr(self.model, "pretrained_cfg", {}).get("architecture") or type(self.model).__name__
        return {
            "architecture": f"{name} {json.dumps(arguments, sort_keys=True, default=str)}" if arguments else name,
            "preprocessing": self.preprocessing,
            "weights_sha256": sha256_of_state(self.model.state_dict()),
        }

    @torch.no_grad()
    def __call__(self, images: Float[Tensor, "b c h w"], keys: Sequence[Key] = ()) -> Float[Tensor, "b classes"]:
        """What it says of a batch. `keys` name its images, for looking up what it said of them before."""
        if self.answers is not None:
            return self.answers[[index for _, index, _ in keys]].to(images.device)
        if not self.is_same:
            images = images * self.scale + self.shift
        if self.size is not None and images.shape[-2:] != tuple(self.size):
            images = F.interpolate(images, tuple(self.size), mode="bicubic", antialias=True)
        with self.runtime.autocast():
            return mean_logits(self.model(images)).float()

    def learn_answers(self, recipe: Recipe, student: nn.Module, source: Any, on_batch: Callable[[int], None]) -> None:
        """Asks about every image of a source once, prepared as for the student's evaluation."""
        assert isinstance(recipe.batch_size, int)
        batches = evaluation_batches(source, student, recipe.batch_size, recipe.workers)
        answers = []
        for images, labels in batches:
            answers.append(self(self.runtime.put(images)).cpu())
            on_batch(len(labels))
        self.answers = torch.cat(answers)


def sha256_of_state(state: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and bytes of a state dict, sorted by name; in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_teacher(recipe: Recipe, student: nn.Module, classes: Sequence[str], runtime: Runtime) -> Teacher:
    """The teacher of a recipe, after a look whether it can teach this student.

    Raises:
        UsageError: it answers with other classes, or the student cannot learn from it in this mode.
        CheckpointError: its weights cannot be had.
    """
    name = recipe.distill.teacher
    assert name is not None
    has_two_heads = getattr(student, "head_dist", None) is not None
    if recipe.train_mode == "eval" and has_two_heads:
        raise UsageError(
            "A student with two heads learns from a teacher in training mode only, for it is then that it answers with "
            "both; got train_mode eval. Set train_mode: train, or distill.teacher: null."
        )
    if name.startswith(PREFIX) or any((folder / CONFIG).is_file() for folder in (Path(name) / "best", Path(name))):
        model, names = load_model_dir(model_dir(name))
    elif Path(name).exists() or os.sep in name:
        raise CheckpointError(
            f"A teacher must be a model's name or a model directory; {name} is neither. Make one with weft convert."
        )
    else:
        model, names = create_model(name, pretrained=True), None
    if model.num_classes != len(classes):
        raise UsageError(
            f"The teacher must know the student's classes; {name} answers with {model.num_classes}, the data has "
            f"{len(classes)}. Fine-tune the teacher on this data first: weft train DATA --model NAME --pretrained."
        )
    if names is not None and list(names) != list(classes):
        place = next(i for i, (theirs, ours) in enumerate(zip(names, classes, strict=True)) if theirs != ours)
        raise UsageError(
            f"The teacher must know the student's classes in the same order; class {place} of {name} is "
            f"'{names[place]}', of the data '{classes[place]}'."
        )
    is_numbered = all(name.isascii() and name.isdecimal() for name in classes)
    if names is None and is_numbered and list(classes) != sort_class_names(set(classes)):
        raise UsageError(
            f"The teacher must know the student's classes in the same order; {name} has no class names, and the data's"
            f" are sorted alphabetically ('{classes[0]}', '{classes[1]}', '{classes[2]}' ...), not by number."
            " Rename the class folders with leading zeros."
        )
    if has_two_heads:
        set_apart: Any = getattr(student, "set_distilled_training", lambda enable: None)
        set_apart(True)
    return Teacher(model, preprocessing(student), runtime)


def answers_are_fixed(recipe: Recipe) -> bool:
    """Whether an image looks the same every time, so that a teacher need be asked about it only once."""
    augment = recipe.augment
    varies = augment.hflip or augment.color_jitter or augment.rand_augment or augment.erase_prob
    return augment.crop == "none" and not varies and not augment.mixup and not augment.cutmix
