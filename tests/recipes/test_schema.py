"""The schema is its own documentation: every field says what it means, and every default lies in its own range."""

from __future__ import annotations

import dataclasses
import inspect
import math
from operator import attrgetter
from typing import Annotated

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from weft.cli.app import arguments
from weft.recipes import Recipe, dump, load_recipe, settings
from weft.recipes.describe import KEYS, options
from weft.recipes.fields import STRICT, Matching, Within, in_words
from weft.train import train


def test_the_defaults_obey_their_own_rules():
    assert load_recipe(overrides=[("environment", {"weft": "9"})]) == Recipe()
    assert load_recipe(overrides=[(key, attrgetter(key)(Recipe())) for key in KEYS]) == Recipe()


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (Within(0, 1), (0.0, 0.5, 1.0), (-0.1, 1.1, math.nan, math.inf)),
        (Within(0, 1, above=True), (1e-9, 1.0), (0.0, -1.0)),
        (Within(2), (2, 1e30), (1.9, math.inf)),
    ],
)
def test_ranges(rule: Within, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    reader = TypeAdapter(Annotated[float, rule], config=ConfigDict(**STRICT))
    assert [reader.validate_python(value) for value in inside] == list(inside)
    for value in outside:
        with pytest.raises(ValidationError):
            reader.validate_python(value)


def test_rules_say_what_must_hold() -> None:
    assert in_words(Annotated[float, Within(0, 1, above=True)]) == "a number above 0 and at most 1"
    assert in_words(Annotated[int, Within(2)] | None) == "a whole number at least 2 or null"
    assert in_words(Annotated[str, Matching("x", "the letter x")]) == "the letter x"


def test_a_dumped_recipe_is_the_same_recipe(tmp_path) -> None:
    recipe = load_recipe(
        overrides=[
            ("model", "no"),  # a text that YAML 1.1 takes for false
            ("img_size", (192, 256)),
            ("optim.lr", "1e-05"),
            ("data.source", "'a: b # c'"),
            ("model_args", {"with_lca": False, "embed_dim": [1, 2], "x": None, "when": "2020-01-01", "n": "1e3"}),
        ]
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(dataclasses.replace(recipe, environment={"classes": ["1", "null"]})), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert recipe.model == "no"
    assert recipe.data.source == "a: b # c"
    assert recipe.model_args == {
        "with_lca": False, "embed_dim": [1, 2], "x": None, "when": "2020-01-01", "n": "1e3"
    }  # fmt: skip


def test_an_option_of_the_schema_is_everywhere() -> None:
    """A setting that is declared with `option` is an argument of `train` and an option of `weft train`."""
    parameters = inspect.signature(train).parameters
    found = {argument.name: argument for argument in arguments("train")}
    assert {"model", "epochs", "start_from", "limit"} <= set(options())
    for name, option in options().items():
        assert name in parameters, name
        assert found[option.flag].parameter.help.lower() == option.summary.lower()
        assert option.key in KEYS


def test_every_setting_has_a_help_text() -> None:
    for row in settings():
        assert row.help.endswith("."), row.key
    assert all(len(option.summary) < 110 for option in options().values())
