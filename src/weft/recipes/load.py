"""Read recipes: YAML to a validated `Recipe`, with file and line in every error.

A recipe may be untrusted. It can name no Python object (tags are refused), refer to nothing (anchors and
aliases are refused, so no small file can grow), and set nothing that the schema does not have.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from weft.errors import UsageError, unknown
from weft.reading import read_bytes
from weft.recipes.describe import KEYS, OPEN, options
from weft.recipes.schema import EXCLUSIVE, Recipe
from weft.recipes.yaml_reader import EXPONENT, MAX_BYTES, NULL, Misfit, compose, cut, shown, typed, untyped

_ALL_KEYS = "weft recipes settings"


class Setting(NamedTuple):
    """One value of a recipe: dotted key, YAML node, and its place in a file ('' for an override)."""

    key: str
    node: yaml.Node
    line: str

    def complaint(self, text: object) -> UsageError:
        """Return an error with the place of the setting."""
        return UsageError(f"{self.line}: {text}" if self.line else str(text))


def recipe_names() -> list[str]:
    """Return the names of the recipes in weft."""
    return sorted(
        item.name.removesuffix(".yaml") for item in resources.files("weft.recipes").iterdir() if ".yaml" in item.name
    )


def recipe_text(recipe: str | Path) -> str:
    """Return the text of a recipe.

    Args:
        recipe: name of a recipe in weft, or a path to a YAML file.

    Raises:
        UsageError: an unknown name, or a file that cannot be read.
    """
    path = Path(recipe)
    is_file = isinstance(recipe, Path) or path.suffix in (".yaml", ".yml") or path.is_file() or len(path.parts) != 1
    if not is_file and str(recipe) not in recipe_names():
        raise unknown("recipe", str(recipe), recipe_names(), "weft recipes, or give a path ending in .yaml")
    source = path if is_file else resources.files("weft.recipes") / f"{recipe}.yaml"
    try:
        data = read_bytes(source, UsageError, 4 * MAX_BYTES) if isinstance(source, Path) else source.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{recipe}: a recipe must be UTF-8 text; byte {error.start} is not.") from error


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
    values: dict[str, Any] = {}
    over = itertools.chain.from_iterable(_from_override(*override) for override in overrides)
    for place in (_read(base), _read(recipe), over):
        _lay_over(values, place)
    return _build(values)


def dump(recipe: Recipe) -> str:
    """Return the complete recipe as YAML; `load_recipe` reads an equal recipe from it (except the environment)."""
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def recorded_environment(recipe: Path) -> dict[str, Any]:
    """Return the record of software and machine in the recipe of a run; empty if there is none.

    Raises:
        UsageError: as `load_recipe`.
    """
    root = compose(recipe_text(recipe), str(recipe))
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    value = next((untyped(node) for key, node in entries if key.value == "environment"), None)
    return value if isinstance(value, dict) else {}


def _read(recipe: str | Path | None) -> list[Setting]:
    root = None if recipe is None else compose(recipe_text(recipe), str(recipe))
    if root is None:
        return []
    return list(_flatten("", root, str(recipe), f"{recipe} line {root.start_mark.line + 1}"))


def _flatten(key: str, node: yaml.Node, origin: str, line: str) -> Iterator[Setting]:
    """Yield the settings of a value: one, or for a section one for each line below it; the whole recipe is ''."""
    prefix = f"{key}." if key else ""
    here = Setting(key, node, line)
    if key not in OPEN and not any(known.startswith(prefix) for known in KEYS):
        yield here
        return
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL:
        return  # an empty section
    if not isinstance(node, yaml.MappingNode):
        raise here.complaint(f"{key or 'a recipe'} must hold `key: value` lines; got {shown(node)}.")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        at = f"{origin} line {key_node.start_mark.line + 1}" if origin else ""
        if not isinstance(key_node, yaml.ScalarNode):
            raise Setting(key, node, at).complaint(f"a key must be a plain word; got {shown(key_node)}.")
        inner = prefix + key_node.value
        if inner in seen:
            raise Setting(key, node, at).complaint(f"a key must occur once; got '{cut(inner)}' again.")
        seen.add(inner)
        yield from _flatten(inner, value_node, origin, at)


def _from_override(key: str, value: Any) -> Iterator[Setting]:
    try:
        text = value if isinstance(value, str) else yaml.dump(value, Dumper=_Dumper)
    except yaml.YAMLError as error:
        raise UsageError(f"{key} must be a plain value; got {value!r}.") from error
    return _flatten(key, compose(text, key) or yaml.ScalarNode("", ""), "", "")


def _lay_over(values: dict[str, Any], place: Iterable[Setting]) -> None:
    """Override the values of earlier places by the settings of one place.

    Raises:
        UsageError: an invalid setting, or two settings in one place that exclude each other.
    """
    here: dict[str, Setting] = {}
    for setting in place:
        if setting.key != "environment" and not setting.key.startswith("environment."):
            _put(values, setting)
            here[setting.key] = setting
    for pair in EXCLUSIVE:
        given = [key for key in pair if key in here and values[key] is not None]
        if len(given) == 2:
            text = f"{pair[0]} and {pair[1]} exclude each other; got {values[pair[0]]} and {values[pair[1]]}."
            raise here[pair[1]].complaint(f"{text} Keep one of them.")
        if given:
            values.pop(pair[given[0] == pair[0]], None)


def _put(values: dict[str, Any], setting: Setting) -> None:
    """Validate one setting and store its value."""
    key = setting.key
    section, _, rest = key.partition(".")
    is_open = section in OPEN and rest
    if key not in KEYS and not is_open:
        leaf = key.rpartition(".")[2]
        same_leaf = [known for known in KEYS if known.rpartition(".")[2] == leaf]
        raise setting.complaint(unknown("setting", cut(key), same_leaf or KEYS, _ALL_KEYS))
    try:
        values[key] = untyped(setting.node) if is_open else typed(setting.node, KEYS[key])
    except Misfit as misfit:
        raise setting.complaint(f"{key} must be {misfit}; got {shown(setting.node)}.") from None


def _build(values: Mapping[str, Any]) -> Recipe:
    """Build the nested dataclasses from values by dotted key."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        if rest:
            nested.setdefault(section, {})[rest] = value
        else:
            nested[section] = value
    hints = typing.get_type_hints(Recipe)
    for section, inner in nested.items():
        if dataclasses.is_dataclass(hints[section]):
            nested[section] = hints[section](**inner)
    recipe = Recipe(**nested)
    for key, pair in (("augment.scale", recipe.augment.scale), ("augment.ratio", recipe.augment.ratio)):
        if pair[0] > pair[1]:
            raise UsageError(f"{key} must be [smallest, largest]; got {list(pair)}.")
    return recipe


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
            key = _key_of(name)
            is_text = isinstance(value, str) and value and str in typing.get_args(KEYS.get(key))
            overrides.append((key, _quoted(value) if is_text else value))
    return overrides if data is None else [*overrides, ("data.source", _quoted(str(data)))]


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function that are settings; `values` are its local variables."""
    return {name: values[name] for name in options() if name in values}


def _key_of(argument: str) -> str:
    known = options().get(argument)
    return argument if known is None else known.key


def _quoted(text: str) -> str:
    """Return a text as a quoted YAML scalar."""
    return "'" + text.replace("'", "''") + "'"


def default_recipe(data: str | Path | None) -> str | None:
    """Return the name of the recipe for a dataset that weft knows by name; what exists on disk has no name."""
    return "digits" if str(data) == "digits" and not os.path.lexists("digits") else None
