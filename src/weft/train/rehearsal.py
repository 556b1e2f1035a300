"""Rehearsal of a run, so that settings that do not work fail before the first step."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.checkpoints import save_model_dir
from weft.checkpoints.config import read_config
from weft.files import remove
from weft.models.contract import preprocessing
from weft.train.loop import Learner
from weft.train.plan import Plan
from weft.train.refusals import memory_error, refusing


def rehearse_step(plan: Plan, learner: Learner) -> None:
    """Run one step, and the teacher, on black images, and discard it.

    Raises:
        UsageError: the step does not work with these settings, or does not fit into memory.
    """
    recipe, count = plan.recipe, len(plan.batches.order.parts(0, 0)[0])
    channels, height, width = preprocessing(plan.network)["input_size"]
    images = torch.zeros(count, channels, height, width, device=plan.runtime.device)
    requirement = f"{recipe.model} must support training on batches of {count} at {height}x{width} pixels"
    advice = " Or set compile=false; compile=true needs a C++ compiler, such as g++." if recipe.compile else ""
    with refusing(requirement, memory_error(recipe), advice):
        learner.dry_run(images)
    if learner.teacher is not None:
        requirement = f"The teacher {recipe.distill.teacher} must support {height}x{width} pixels"
        with refusing(requirement, memory_error(recipe)):
            learner.teacher(images, ())


def rehearse_saving(plan: Plan, out: Path) -> None:
    """Save and load a model directory within a run directory, and remove it.

    Raises:
        WeftError: the model cannot be saved, or not loaded again.
    """
    folder = out / f".rehearsal.{os.getpid()}.part"  # a temporary name, which `sweep` removes after a kill
    try:
        read_config(save_model_dir(plan.network, folder, label_names=plan.splits.classes, force=True))
    finally:
        remove(folder)
