"""Read recipes: YAML to a validated `Recipe`, with file and line in every error.

A recipe may be untrusted. It can name no Python object (tags are refused), refer to nothing (anchors and
aliases are refused, so no small file can grow), and set nothing that the schema does not have.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any

import yaml

from weft.errors import UsageError
from weft.recipes.checks import adapter
from weft.recipes.describe import KEYS, OPEN, options
from weft.recipes.rules import EXCLUSIVE
from weft.recipes.schema import Recipe
from weft.recipes.yaml_reader import EXPONENT, Document, compose, names_in, text_of, untyped

GROUPS = {*OPEN, *(key.partition(".")[0] for key in KEYS if "." in key)}  # settings that are `key: value` lines


def recipe_names() -> list[str]:
    """Return the names of the recipes in weft."""
    return names_in("weft.recipes")


def recipe_text(recipe: str | Path) -> str:
    """Return the text of a recipe.

    Args:
        recipe: name of a recipe in weft, or a path to a YAML file.

    Raises:
        UsageError: an unknown name, or a file that cannot be read.
    """
    return text_of(recipe, "recipe", "weft.recipes", "weft recipes")


def load_recipe(
    recipe: str | Path | None = None,
    overrides: Iterable[tuple[str, Any]] = (),
    *,
    base: str | Path | None = None,
) -> Recipe:
    """Load a recipe and apply overrides, in their order.

    Args:
        recipe: name of a recipe in weft, a path to a YAML file, or None for the defaults.
        overrides: (dotted key, value) pairs, such as `("optim.lr", "3e-4")`. A text is parsed like a
            value in YAML; other plain values are used as they are.
        base: another recipe, whose values apply where `recipe` has none.

    Raises:
        UsageError: a file that cannot be read or is not plain YAML, an unknown key, a value of the wrong type or
            outside its range.
    """
    files = [Document.parse(recipe_text(file), str(file)) for file in (base, recipe) if file is not None]
    settings: dict[str, Any] = {}
    for place in (*files, _overrides(overrides)):
        given = _read(place)
        for pair in EXCLUSIVE:
            first, second = (attrgetter(key)(given) for key in pair)
            if first is not None and second is not None:
                text = f"{pair[0]} and {pair[1]} exclude each other; got {first} and {second}. Keep one of them."
                raise place.error(pair[1], text)
            if first is not None or second is not None:
                _put(settings, pair[first is not None], None)
        _lay_over(settings, place.values)
    return adapter(Recipe).validate_python(settings)


def named_in(recipe: str | Path) -> set[str]:
    """Return the dotted keys of the settings that a recipe names, with those of the one that it is based on."""
    settings: dict[str, Any] = {}
    _lay_over(settings, Document.parse(recipe_text(recipe), str(recipe)).values)
    return {
        f"{key}.{name}" if key in GROUPS else key
        for key, value in settings.items()
        for name in (value if key in GROUPS and isinstance(value, dict) else ("",))
    }


def dump(recipe: Recipe) -> str:
    """Return the complete recipe as YAML; `load_recipe` reads an equal recipe from it (except the environment)."""
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def recorded_environment(recipe: Path) -> dict[str, Any]:
    """Return the record of software and machine in the recipe of a run; empty if there is none.

    Raises:
        UsageError: as `load_recipe`.
    """
    environment = untyped(Document.parse(recipe_text(recipe), str(recipe)).values.get("environment"))
    return environment if isinstance(environment, dict) else {}


def _overrides(overrides: Iterable[tuple[str, Any]]) -> Document:
    document = Document("")
    for key, value in overrides:
        try:
            text = value if isinstance(value, str) else yaml.dump(value, Dumper=_Dumper)
        except yaml.YAMLError as error:
            raise UsageError(f"{key} must be a plain value; got {value!r}.") from error
        _lay_over(document.values, {key: document.add(key, compose(text, key))})
        _read(document)  # here, since a later override may replace this one
    return document


def _read(document: Document) -> Recipe:
    settings: dict[str, Any] = {}
    _lay_over(settings, document.values)
    return document.read(Recipe, settings, "weft recipes settings", KEYS)


def _lay_over(settings: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Override settings that are arranged as in the schema by values of a file, in which `optim.lr: 1` is a key."""
    for key, value in values.items():
        if key in GROUPS and isinstance(value, dict):
            for name, inner in value.items():
                _put(settings, f"{key}.{name}", inner)
        elif key not in GROUPS or value is not None:  # else an empty section
            _put(settings, key, value)


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Store the value of a dotted key, in the form that the schema has it."""
    section, _, name = key.partition(".")
    if section == "environment":  # a record, not a setting
        return
    if key == "img_size" and isinstance(value, str) and re.fullmatch(r"[0-9]+x[0-9]+", value):
        value = value.split("x")
    if not name or section not in GROUPS:
        settings[key] = value
    elif isinstance(group := settings.setdefault(section, {}), dict):  # else it is refused
        group[name] = untyped(value) if section in OPEN else value


class _Dumper(yaml.SafeDumper):
    """Plain YAML: lists on one line, nothing shared between two places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list_on_one_line(dumper: yaml.SafeDumper, items: Iterable[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", list(items), flow_style=True)


# A text that looks like 1e-3 is written in quotes, since the reader above takes 1e-3 for a number.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-.0123456789"))
_Dumper.add_representer(list, _list_on_one_line)
_Dumper.add_representer(tuple, _list_on_one_line)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def overrides_of(
    data: str | Path | None, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the overrides of a recipe for arguments of a verb; arguments win over `settings`, None is not given.

    The values of `settings` are YAML. Arguments that are text, such as paths and patterns, are taken literally.
    """
    overrides = list(settings.items())
    for name, value in given.items():
        if value is not None:
            key = options()[name].key if name in options() else name
            is_text = isinstance(value, str) and value and str in typing.get_args(KEYS.get(key))
            overrides.append((key, _quoted(value) if is_text else value))
    return overrides if data is None else [*overrides, ("data.source", _quoted(str(data)))]


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function that are settings; `values` are its local variables."""
    return {name: values[name] for name in options() if name in values}


def _quoted(text: str) -> str:
    """Return a text as a quoted YAML scalar."""
    return "'" + text.replace("'", "''") + "'"


def default_recipe(data: str | Path | None) -> str | None:
    """Return the name of the recipe for a dataset that weft knows by name; what exists on disk has no name."""
    return "digits" if str(data) == "digits" and not os.path.lexists("digits") else None
