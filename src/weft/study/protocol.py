"""Settings that recipes leave to the machine, decided once for all runs of a comparison or study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.errors import WeftError
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.timing import find_batch_size, find_precision

AUTO = "auto"


def shared_settings(recipes: Sequence[Recipe], num_classes: int, num_images: int, threads: int) -> dict[str, Any]:
    """Choose one batch size and one precision for all recipes that leave them to the machine.

    The batch size is the smallest of those that suit each network. The precision is bf16 if it is faster for every
    network, else fp32. Networks that cannot be trained are left out; their runs report the reason.

    Args:
        recipes: of the runs, with their models.
        num_classes, num_images: size of the dataset.
        threads: CPU threads of a run.

    Returns:
        Settings by key; those that no recipe leaves open are missing.
    """
    settings: dict[str, Any] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = [
            size
            for recipe in recipes
            if recipe.batch_size == AUTO and (size := _batch_size(recipe, num_classes, num_images)) is not None
        ]
        if sizes:
            settings["batch_size"] = min(sizes)
        precisions = [
            precision
            for recipe in recipes
            if recipe.precision == AUTO
            and (precision := _precision(with_shared(recipe, settings), num_classes)) is not None
        ]
        if precisions:
            settings["precision"] = "bf16" if set(precisions) == {"bf16"} else "fp32"
    finally:
        torch.set_num_threads(before)
    return settings


def open_keys(recipe: Recipe, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared settings that a recipe leaves to the machine."""
    return {key: value for key, value in shared.items() if getattr(recipe, key) == AUTO}


def with_shared(recipe: Recipe, shared: Mapping[str, Any]) -> Recipe:
    """Return a recipe with the shared settings that it leaves to the machine."""
    return dataclasses.replace(recipe, **open_keys(recipe, shared))


def _batch_size(recipe: Recipe, num_classes: int, num_images: int) -> int | None:
    try:
        runtime = Runtime.of(recipe.device, recipe.precision)
        return find_batch_size(recipe, num_classes, num_images, runtime)[0]
    except (WeftError, RuntimeError, MemoryError):
        return None


def _precision(recipe: Recipe, num_classes: int) -> str | None:
    try:
        runtime = Runtime.of(recipe.device, recipe.precision)
        return find_precision(recipe, num_classes, runtime)[0].precision
    except (WeftError, RuntimeError, MemoryError):
        return None
