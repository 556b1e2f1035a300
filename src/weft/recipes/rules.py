"""Rules between settings. They hold for the recipe that trains: defaults and parts of a recipe may break them."""

from __future__ import annotations

from weft.errors import UsageError
from weft.recipes.schema import Recipe

EXCLUSIVE = (("epochs", "steps"), ("optim.lr", "optim.lr_per_512"))
"""Pairs of settings of which one replaces the other; both in one place are an error, and later places win."""


def check_rules(recipe: Recipe, *, has_weights: bool = False) -> None:
    """Check that the settings of a complete recipe fit together.

    Call it with the recipe that trains, after the last decision on it.

    Args:
        recipe: with every setting that weft decides.
        has_weights: it starts from trained weights that it does not name yet, such as those of another run.

    Raises:
        UsageError: two settings contradict each other.
    """
    model, data = recipe.model or "the network", recipe.data
    if recipe.epochs == 0 and recipe.head_init != "probe":
        raise UsageError("epochs must be at least 1, or 0 with --set head_init=probe; got 0.")
    if recipe.optim.freeze == "backbone" and not (has_weights or recipe.pretrained or recipe.start_from):
        raise UsageError(
            f"optim.freeze: backbone needs trained weights; {model} starts from random ones. Set pretrained or"
            " start_from, or set optim.freeze: none."
        )
    if data.fold is not None and (data.folds is None or data.fold > data.folds):
        number = "none" if data.folds is None else data.folds
        raise UsageError(
            f"data.fold must be one of the folds of data.folds, from 1; got fold {data.fold} and folds {number}. Set"
            " --folds N, or omit data.fold."
        )
    if recipe.augment.scale[0] > recipe.augment.scale[1]:
        raise UsageError(f"augment.scale must be [smallest, largest]; got {list(recipe.augment.scale)}.")
    if data.value_range is not None and data.value_range[0] >= data.value_range[1]:
        low, high = data.value_range
        raise UsageError(f"data.value_range must be [BLACK, WHITE], ascending; got [{low}, {high}].")
    if data.sampling == "balanced" and recipe.loss.class_weights == "balanced":
        raise UsageError(
            "One setting must correct the class frequencies; got data.sampling: balanced and loss.class_weights:"
            " balanced. Together they would favour rare classes twice: keep one."
        )
