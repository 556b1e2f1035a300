"""Settings that recipes leave to the machine, decided once for all runs of a comparison or study."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import WeftError
from weft.machine.runtime import Runtime
from weft.recipes import Recipe
from weft.train.timing import find_batch_size, find_precision

AUTO = "auto"


def shared_settings(recipes: Sequence[Recipe], num_classes: int, num_images: int) -> dict[str, Any]:
    """Choose one batch size and one precision for all recipes that leave them to the machine.

    The batch size is the smallest of those that suit each network. The precision is bf16 if it is faster for every
    network, else fp32. Networks that cannot be trained are left out; their runs report the reason.

    Args:
        recipes: of the runs, with their models.
        num_classes, num_images: size of the dataset.

    Returns:
        Settings by key; those that no recipe leaves open are missing.
    """

    def measured(find: Callable[..., tuple[Any, str]], recipe: Recipe, *counts: int) -> Any:
        """Return what suits a recipe, or None if it cannot be trained."""
        try:
            return find(recipe, *counts, Runtime.of(recipe.device, recipe.precision))[0]
        except (WeftError, RuntimeError, MemoryError):
            return None

    settings: dict[str, Any] = {}
    is_open = [recipe for recipe in recipes if recipe.batch_size == AUTO]
    if sizes := {measured(find_batch_size, recipe, num_classes, num_images) for recipe in is_open} - {None}:
        settings["batch_size"] = min(sizes)
    recipes = [with_shared(recipe, settings) for recipe in recipes]
    is_open = [recipe for recipe in recipes if recipe.precision == AUTO and recipe.batch_size != AUTO]
    runtimes = [measured(find_precision, recipe, num_classes) for recipe in is_open]
    if precisions := {runtime.precision for runtime in runtimes if runtime is not None}:
        settings["precision"] = "bf16" if precisions == {"bf16"} else "fp32"
    return settings


def open_keys(recipe: Recipe, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared settings that a recipe leaves to the machine."""
    return {key: value for key, value in shared.items() if getattr(recipe, key) == AUTO}


def with_shared(recipe: Recipe, shared: Mapping[str, Any]) -> Recipe:
    """Return a recipe with the shared settings that it leaves to the machine."""
    return dataclasses.replace(recipe, **open_keys(recipe, shared))
