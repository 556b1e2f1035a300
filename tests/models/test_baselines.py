"""Weights of timm's networks are named by their explicit tag, wherever weft loads them."""

from __future__ import annotations

import pytest
import timm
import torch

from tests.helpers import baselines
from weft.models.families import VARIANTS, candidates
from weft.recipes import load_recipe
from weft.recipes.load import recipe_names
from weft.study import load_study, study_names


def loaded_by_name() -> set[str]:
    """Networks of timm whose public weights a recipe, a study or a comparison loads."""
    recipes = [load_recipe(name) for name in recipe_names()]
    for name in study_names():
        study = load_study(name)
        recipes += [variant.recipe for scale in study.scales for variant in study.at_scale(scale)]
    names = {recipe.distill.teacher for recipe in recipes if recipe.distill.teacher}
    names |= {recipe.model for recipe in recipes if recipe.pretrained and recipe.model}
    names |= {settings["model"] for settings in candidates("large").values()}
    return {name for name in names if name not in VARIANTS and not name.startswith("run:")}  # run: another job's best


@pytest.mark.slow
def test_every_name_has_its_tag_and_a_row() -> None:
    names = loaded_by_name()
    assert "regnety_160.deit_in1k" in names
    rows = {row["name"] for row in baselines()}
    for name in names:
        assert "." in name, f"{name} has no tag: timm would choose one"
        assert name in rows, f"{name} is not in docs/recipes.md"


@pytest.mark.parametrize("row", baselines(), ids=lambda row: row["name"])
def test_a_tag_is_what_it_says(row: dict[str, str]) -> None:
    cfg = timm.get_pretrained_cfg(row["name"])
    assert f"{cfg.architecture}.{cfg.tag}" == row["name"]
    assert cfg.input_size == (3, int(row["size"]), int(row["size"]))
    assert cfg.hf_hub_id == f"timm/{row['name']}"
    with torch.device("meta"):
        count = sum(p.numel() for p in timm.create_model(row["name"]).parameters())
    assert f"{count / 1e6:.2f}M" == row["params"]
    assert abs(float(row["tag_top1"]) - float(row["paper_top1"])) < 1 or "other training" in row["paper_source"]


def test_the_papers_teacher_is_not_timms_default() -> None:
    """The reason for the tags: without one, timm takes a network that was trained on ImageNet-12k."""
    assert timm.get_pretrained_cfg("regnety_160").tag != "deit_in1k"
