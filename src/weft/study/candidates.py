"""Candidates of a comparison: their models, public weights and recipes, as a study of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.checkpoints.hub import create_model
from weft.errors import UsageError
from weft.models.families import SMALL_SIDE, candidates
from weft.progress import say
from weft.recipes import load_recipe
from weft.recipes.load import default_recipe
from weft.study.plan import Scale, Study, StudyVariant
from weft.text import reason_of

FROM_WEIGHTS = "small_folder"  # recipe of candidates that start from public weights
SCALE = "small"
Candidates = Mapping[str, Mapping[str, Any]]
"""Settings of each candidate, with its model, by its label in reports."""


def candidates_of(models: Sequence[str], side: int) -> Candidates:
    """Return the candidates: the given models, or the default ones for images of this size.

    Args:
        models: model names; empty for the default.
        side: shorter side of the images in pixels.
    """
    default = candidates("small" if side < SMALL_SIDE else "large")
    if not models:
        return default
    if len(models) < 2 or len(set(models)) < len(models):
        raise UsageError(f"A comparison needs at least two models, each once; got {', '.join(models)}.")
    by_model = {settings["model"]: settings for settings in default.values()}
    return {name: by_model.get(name, {"model": name}) for name in models}


def recipe_from_scratch(data: str, side: int) -> str | None:
    """Return the recipe for training from scratch; None for the defaults of `weft train`."""
    return default_recipe(data) or ("small_images" if side < SMALL_SIDE else None)


def public_weights(model: str) -> tuple[str, str]:
    """Download the public weights of a model, or take them from the cache.

    Returns:
        Their name on the hub ('' if they cannot be downloaded), and the reason of a failure.
    """
    try:
        network = create_model(model, pretrained=True)
    except Exception as error:  # no weights or no connection: timm and the hub raise many types
        return "", reason_of(error)
    return getattr(network, "pretrained_cfg", {}).get("hf_hub_id") or model, ""


def find_weights(chosen: Candidates, recipe: str | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the public weights of each candidate as OWNER/NAME on the hub; '' if it is trained from scratch.

    Candidates for small images, and those of a recipe or setting without public weights, are trained from scratch.

    Args:
        chosen: the candidates.
        recipe: recipe for training from scratch, or the one that the user named.
        settings: settings of all candidates.
    """
    is_free = recipe is None and "pretrained" not in settings
    if not (is_free or load_recipe(recipe, settings.items()).pretrained):
        return dict.fromkeys(chosen, "")
    weights = {}
    for name, own in chosen.items():
        weights[name], reason = public_weights(own["model"])
        if reason:
            say(f"{name} is trained from scratch: {reason}.")
    return weights


def with_weights(chosen: Candidates, weights: Mapping[str, str]) -> Candidates:
    """Return the candidates of a linear probe, which needs public weights.

    Raises:
        UsageError: fewer than two candidates are left.
    """
    if missing := [name for name in chosen if not weights[name]]:
        say(f"Left out, since a linear probe needs public weights: {', '.join(missing)}.")
    chosen = {name: own for name, own in chosen.items() if weights[name]}
    if len(chosen) < 2:
        named = ", ".join(own["model"] for own in chosen.values()) or "none"
        raise UsageError(
            f"A comparison of linear probes (epochs 0) needs at least two models with public weights; got {named}."
            " Name other --models, or pass --epochs N."
        )
    return chosen


def study_of(
    chosen: Candidates, data: str, recipe: str | None, settings: Mapping[str, Any], weights: Mapping[str, str]
) -> Study:
    """Return the comparison as a study, whose variants are the candidates, all with one batch size and precision.

    Args:
        chosen: the candidates.
        data: the dataset.
        recipe: recipe for training from scratch, or the one that the user named.
        settings: settings of all candidates.
        weights: public weights of each candidate; one without any is trained from scratch.
    """
    common = FROM_WEIGHTS if recipe is None and any(weights[name] for name in chosen) else recipe
    protocol = load_recipe(common, settings.items())
    asks_for_weights = load_recipe(recipe, settings.items()).pretrained
    from_scratch = {"pretrained": False} if asks_for_weights else {}
    variants = tuple(
        StudyVariant(name, set=dict(own))
        if weights[name]
        else StudyVariant(name, set={**own, **from_scratch}, recipe={SCALE: recipe})
        for name, own in chosen.items()
    )
    shared = {"batch_size": protocol.batch_size, "precision": protocol.precision}
    scale = Scale(common, data, set={**shared, **settings})
    return Study("compare", f"Comparison of models on {data}", "", "", {SCALE: scale}, variants)
