"""Default recipe, model, image size and number of epochs for a dataset; no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.models.families import default_model
from weft.recipes import Recipe

DIGITS = "digits"
IMAGES_SEEN = 400_000  # what a run from scratch needs at least on a small problem, in images with repetition
EPOCHS = (10, 100)

_RECIPE_KEYS = {"limit": "data.limit"}  # arguments whose key in the recipe has another name


def overrides_of(
    data: str | Path | None, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """What was asked for, as overrides of a recipe; arguments win over settings, None is nothing."""
    overrides = list(settings.items())
    overrides += [(_RECIPE_KEYS.get(name, name), value) for name, value in given.items() if value is not None]
    return overrides if data is None else [*overrides, ("data.source", _quoted(str(data)))]


def _quoted(text: str) -> str:
    """A text as YAML that cannot be taken for anything else."""
    return "'" + text.replace("'", "''") + "'"


def default_recipe(data: str | Path | None) -> str | None:
    """The recipe of a data set that weft knows by name."""
    return DIGITS if str(data) == DIGITS else None


def fill_in(recipe: Recipe, image_size: tuple[int, int], num_images: int, world: int = 1) -> tuple[Recipe, list[str]]:
    """Decides what the recipe leaves open.

    Args:
        recipe: what was asked for.
        image_size: typical (height, width) of the images in pixels.
        num_images: images to learn from.
        world: processes that share the work.

    Returns:
        The whole recipe, and a sentence for each decision.
    """
    notes: list[str] = []
    seen = f"images of about {image_size[0]}x{image_size[1]} pixels"
    if recipe.model is None:
        model, img_size = default_model(min(image_size), num_images)
        recipe = dataclasses.replace(recipe, model=model, img_size=recipe.img_size or img_size)
        notes.append(f"Model {model}, for {num_images:,} {seen}; another: --model NAME.")
    if recipe.epochs is None and recipe.steps is None:
        epochs = min(max(round(IMAGES_SEEN / num_images), EPOCHS[0]), EPOCHS[1])
        recipe = dataclasses.replace(recipe, epochs=epochs)
        notes.append(f"{epochs} epochs, for {num_images:,} images; another number: --epochs N.")
    if isinstance(recipe.batch_size, int) and recipe.batch_size > num_images:
        parts = world * recipe.accumulate * (2 if recipe.augment.mixup or recipe.augment.cutmix else 1)
        fitting = max(num_images // parts * parts, 1)
        recipe = dataclasses.replace(recipe, batch_size=fitting)
        notes.append(f"Batch size {fitting}: there are no more than {num_images} images.")
    return recipe, notes
