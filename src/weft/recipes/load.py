"""Read recipes: YAML to a validated `Recipe`, with file and line in every error.

A recipe may come from a stranger. It can name no Python object (tags are refused), refer to nothing (anchors and
aliases are refused, so no small file can grow), and set nothing that the schema does not have.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from weft.errors import UsageError, unknown
from weft.reading import read_bytes
from weft.recipes.schema import EXCLUSIVE, Matching, Recipe, Within

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
OPEN = ("model_args", "environment")  # settings whose keys are not ours to name
_ALL_KEYS = "weft recipes settings"
_NULL = ("", "~", "null", "Null", "NULL")
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+\Z")  # YAML 1.1 reads 1e-3 as text; a recipe means a number
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Setting(NamedTuple):
    """One value on its way into a recipe: dotted key, YAML node, and where it was written ('' for an override)."""

    key: str
    node: yaml.Node
    line: str

    def complaint(self, text: object) -> UsageError:
        """An error that says where."""
        return UsageError(f"{self.line}: {text}" if self.line else str(text))


def _keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(schema, include_extras=True)
    for item in dataclasses.fields(schema):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hint


KEYS: dict[str, Any] = dict(_keys(Recipe))  # every dotted key and its type


class Described(NamedTuple):
    """A setting, for whoever writes a recipe: dotted key, what it may be in words, value where nobody sets it."""

    key: str
    may_be: str
    default: Any


def settings() -> list[Described]:
    """All of them, in the order of the schema, but for what a run adds by itself."""
    default = Recipe()
    words = {key: "named values" if key in OPEN else _in_words(hint) for key, hint in KEYS.items()}
    return [Described(key, words[key], attrgetter(key)(default)) for key in KEYS if key != "environment"]


def _in_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        text = str(arguments[1])
        return text.replace("a number", "a whole number") if arguments[0] is int else text
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(arguments)
    if origin is tuple:
        return "[" + ", ".join(_in_words(argument) for argument in arguments) + "]"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return words[hint]


def recipe_names() -> list[str]:
    """The recipes that come with weft."""
    return sorted(
        item.name.removesuffix(".yaml") for item in resources.files("weft.recipes").iterdir() if ".yaml" in item.name
    )


def recipe_text(recipe: str | Path) -> str:
    """The text of a recipe.

    Args:
        recipe: name of one that comes with weft, or a path to a YAML file.

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


def load_recipe(recipe: str | Path | None = None, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
    """Reads a recipe and lays overrides over it, later ones over earlier ones.

    Args:
        recipe: name of a recipe that comes with weft, a path to a YAML file, or None for the defaults alone.
        overrides: (dotted key, value) pairs, such as `("optim.lr", "3e-4")`. A text is read like the right-hand side
            of a YAML line; any other plain value is taken as it is.

    Raises:
        UsageError: a file that cannot be read or is not plain YAML, an unknown key, a value of the wrong type or
            outside its range.
    """
    values: dict[str, Any] = {}
    over = itertools.chain.from_iterable(_from_override(*override) for override in overrides)
    for place in (_read(recipe), over):
        _lay_over(values, place)
    return _build(values)


def dump(recipe: Recipe) -> str:
    """The whole recipe as YAML that `load_recipe` reads back to an equal one (environment aside)."""
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def recorded_environment(recipe: Path) -> dict[str, Any]:
    """What the recipe of a run records about the machine that it began on; empty where it records nothing.

    Raises:
        UsageError: as `load_recipe`.
    """
    root = compose(recipe_text(recipe), str(recipe))
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    value = next((_untyped(node) for key, node in entries if key.value == "environment"), None)
    return value if isinstance(value, dict) else {}


def compose(text: str, origin: str, what: str = "a recipe") -> yaml.Node | None:
    """YAML text to a tree of nodes, with everything refused that is not plain data.

    Args:
        text: the file.
        origin: what errors call it.
        what: what it should be, for the errors.

    Raises:
        UsageError: too long, too deep, not YAML, or with a tag, an anchor or an alias.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"{origin}: {what} has at most {MAX_BYTES:,} characters; got {len(text):,}.")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = f"{origin} line {event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UsageError(f"{line}: {what} nests at most {MAX_DEPTH} levels deep; got more.")
            if getattr(event, "anchor", None) is not None:  # on a definition (&name) and on a use (*name)
                raise UsageError(f"{line}: {what} has no anchors or aliases; got '{event.anchor}'. Write it out.")
            if getattr(event, "tag", None) is not None:
                raise UsageError(f"{line}: {what} holds plain values only; got the tag '{event.tag}'. Remove it.")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UsageError(f"{origin}{line}: {what} must be YAML; {problem}.") from error


def _read(recipe: str | Path | None) -> list[Setting]:
    root = None if recipe is None else compose(recipe_text(recipe), str(recipe))
    if root is None:
        return []
    return list(_flatten("", root, str(recipe), f"{recipe} line {root.start_mark.line + 1}"))


def _flatten(key: str, node: yaml.Node, origin: str, line: str) -> Iterator[Setting]:
    """A value as settings: itself, or where `key` is a section (the whole recipe is ''), one for each line below it."""
    prefix = f"{key}." if key else ""
    here = Setting(key, node, line)
    if key not in OPEN and not any(known.startswith(prefix) for known in KEYS):
        yield here
        return
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULL:
        return  # a heading with nothing below it
    if not isinstance(node, yaml.MappingNode):
        raise here.complaint(f"{key or 'a recipe'} must hold `key: value` lines; got {_shown(node)}.")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        at = f"{origin} line {key_node.start_mark.line + 1}" if origin else ""
        if not isinstance(key_node, yaml.ScalarNode):
            raise Setting(key, node, at).complaint(f"a key must be a plain word; got {_shown(key_node)}.")
        inner = prefix + key_node.value
        if inner in seen:
            raise Setting(key, node, at).complaint(f"every key stands once; got '{_cut(inner)}' again.")
        seen.add(inner)
        yield from _flatten(inner, value_node, origin, at)


def _from_override(key: str, value: Any) -> Iterator[Setting]:
    try:
        text = value if isinstance(value, str) else yaml.dump(value, Dumper=_Dumper)
    except yaml.YAMLError as error:
        raise UsageError(f"{key} must be a plain value; got {value!r}.") from error
    return _flatten(key, compose(text, key) or yaml.ScalarNode("", ""), "", "")


def _lay_over(values: dict[str, Any], place: Iterable[Setting]) -> None:
    """Writes what stands in one place over what stood in earlier ones.

    Raises:
        UsageError: a setting that does not fit, or two in this place of which only one can hold.
    """
    here: dict[str, Setting] = {}
    for setting in place:
        if setting.key != "environment" and not setting.key.startswith("environment."):
            _put(values, setting)
            here[setting.key] = setting
    for pair in EXCLUSIVE:
        given = [key for key in pair if key in here and values[key] is not None]
        if len(given) == 2:
            text = f"{pair[0]} and {pair[1]} say the same in two ways; got {values[pair[0]]} and {values[pair[1]]}."
            raise here[pair[1]].complaint(f"{text} Keep one of them.")
        if given:
            values.pop(pair[given[0] == pair[0]], None)


def _put(values: dict[str, Any], setting: Setting) -> None:
    """Checks one setting and writes it into the flat table."""
    key = setting.key
    section, _, rest = key.partition(".")
    is_open = section in OPEN and rest
    if key not in KEYS and not is_open:
        leaf = key.rpartition(".")[2]
        same_leaf = [known for known in KEYS if known.rpartition(".")[2] == leaf]
        raise setting.complaint(unknown("setting", _cut(key), same_leaf or KEYS, _ALL_KEYS))
    try:
        values[key] = _untyped(setting.node) if is_open else _typed(setting.node, KEYS[key])
    except _Misfit as misfit:
        raise setting.complaint(f"{key} must be {misfit}; got {_shown(setting.node)}.") from None


class _Misfit(Exception):
    """A value that does not fit; its text is what must hold."""


def _typed(node: yaml.Node, hint: Any) -> Any:
    """One node to a value of type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        value, rule = _typed(node, arguments[0]), arguments[1]
        assert isinstance(rule, (Within, Matching))
        if not rule.allows(value):
            raise _Misfit(str(rule))
        return value
    if origin in (typing.Union, types.UnionType):
        return _first_fit(node, arguments)
    if origin is Literal:
        if isinstance(node, yaml.ScalarNode) and node.value in arguments:
            return node.value
        raise _Misfit(f"{'one of ' if len(arguments) > 1 else ''}{', '.join(arguments)}")
    if origin is tuple:
        return _pair(node, arguments)
    return _scalar(node, hint)


def _first_fit(node: yaml.Node, arguments: tuple[Any, ...]) -> Any:
    if type(None) in arguments and isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULL:
        return None
    misfits = []
    for argument in arguments:
        if argument is type(None):
            continue
        try:
            return _typed(node, argument)
        except _Misfit as misfit:
            misfits.append(str(misfit))
    raise _Misfit(" or ".join([*misfits, "null"] if type(None) in arguments else misfits))


def _pair(node: yaml.Node, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`[a, b]`, or `HxW` for a size."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.ScalarNode) and re.fullmatch(r"\d+x\d+", node.value):
        items = [yaml.ScalarNode("", side) for side in node.value.split("x")]
    if len(items) != len(arguments):
        raise _Misfit(f"{len(arguments)} values in brackets, as in [{', '.join('ab'[: len(arguments)])}]")
    try:
        return tuple(_typed(item, argument) for item, argument in zip(items, arguments, strict=True))
    except _Misfit as misfit:
        raise _Misfit(f"{len(arguments)} values in brackets, each {misfit}") from None


def _scalar(node: yaml.Node, hint: type) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise _Misfit("a single value")
    if hint is bool:
        if node.value.lower() not in _BOOLS:
            raise _Misfit("true or false")
        return _BOOLS[node.value.lower()]
    if hint is int:
        if not re.fullmatch(r"[+-]?\d{1,18}", node.value):
            raise _Misfit("a whole number")
        return int(node.value)
    if hint is float:
        try:
            return float(node.value)
        except ValueError:
            raise _Misfit("a number") from None
    return node.value


def _untyped(node: yaml.Node) -> Any:
    """A node to what YAML itself says it is; for keys that belong to a model's constructor."""
    if isinstance(node, yaml.SequenceNode):
        return [_untyped(item) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:
            return node.value
        if _EXPONENT.match(node.value):
            return float(node.value)
        try:
            value = yaml.safe_load(node.value)
        except (yaml.YAMLError, ValueError):  # `=` and `2024-13-99` mean something to YAML, and are wrong there
            return node.value
        return value if isinstance(value, (bool, int, float, str, type(None))) else node.value  # a date stays text
    if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        raise _Misfit("plain values under plain words")
    return {key.value: _untyped(value) for key, value in node.value}


def _shown(node: yaml.Node) -> str:
    """A node as a message shows it, cut where it is long."""
    if isinstance(node, yaml.ScalarNode):
        text = repr(node.value)
    elif isinstance(node, yaml.SequenceNode):
        text = f"[{', '.join(_shown(item) for item in node.value)}]"
    else:
        text = f"{{{', '.join(f'{_shown(key)}: ...' for key, _ in node.value)}}}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _build(values: Mapping[str, Any]) -> Recipe:
    """The flat table to nested dataclasses."""
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
    if recipe.optim.freeze == "backbone" and not (recipe.pretrained or recipe.start_from):
        raise UsageError("optim.freeze: backbone needs weights worth keeping; got none. Set pretrained or start_from.")
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
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-.0123456789"))
_Dumper.add_representer(list, _list_on_one_line)
_Dumper.add_representer(tuple, _list_on_one_line)
