"""Rules between settings: they hold for the recipe that trains, not for a part of it."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import UsageError
from weft.recipes import load_recipe
from weft.recipes.rules import check_rules

BALANCED = {"data.sampling": "balanced", "loss.class_weights": "balanced"}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, r"epochs .* or 0 with --set head_init=probe; got 0"),
    ({"optim.freeze": "backbone", "model": "cvt_13"}, r"freeze: backbone needs .*; cvt_13 starts from random ones"),
    ({"augment.scale": [0.9, 0.1]}, r"augment\.scale must be \[smallest, largest\]; got \[0\.9, 0\.1\]"),
    ({"data.value_range": [9, 9]}, r"data\.value_range must be \[BLACK, WHITE\], ascending; got \[9, 9\]"),
    ({"data.fold": 1}, r"got fold 1 and folds none\. Set --folds N"),
    ({"data.fold": 4, "data.folds": 3}, r"got fold 4 and folds 3\."),
    (BALANCED, r"got data\.sampling: balanced and loss\.class_weights: balanced"),
]
KEPT: list[dict[str, Any]] = [
    {},
    {"epochs": 0, "head_init": "probe"},
    {"optim.freeze": "backbone", "pretrained": True},
    {"optim.freeze": "backbone", "start_from": "somewhere"},
    {"data.fold": 3, "data.folds": 3},
    {"data.folds": 3},
    *({key: value} for key, value in BALANCED.items()),
]


@pytest.mark.parametrize(("settings", "words"), BROKEN)
def test_a_recipe_that_breaks_a_rule_is_refused_but_not_a_part_of_it(settings, words):
    for key, value in settings.items():
        load_recipe(overrides=[(key, value)])  # what is missing comes from the recipe that it is applied to
    with pytest.raises(UsageError, match=words):
        check_rules(load_recipe(overrides=settings.items()))


@pytest.mark.parametrize("settings", KEPT)
def test_a_recipe_that_keeps_the_rules_passes(settings):
    check_rules(load_recipe(overrides=settings.items()))


def test_weights_that_a_recipe_does_not_name_yet_count():
    check_rules(load_recipe(overrides=[("optim.freeze", "backbone")]), has_weights=True)
