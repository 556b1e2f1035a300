"""Typed YAML reader for recipes and studies: plain data only, with file and line in every error.

A file may be untrusted. It can name no Python object (tags are refused), refer to nothing (anchors and aliases
are refused, so no small file can grow), and set only what the schema has.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from typing import Any, Literal, TypeVar

import yaml

from weft.errors import UsageError, unknown
from weft.recipes.schema import Matching, Within

R = TypeVar("R")
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
NULL = ("", "~", "null", "Null", "NULL")
EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+\Z")  # YAML 1.1 reads 1e-3 as text; here it is a number
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def compose(text: str, origin: str, what: str = "a recipe") -> yaml.Node | None:
    """Parse YAML text to a tree of nodes, and refuse everything that is not plain data.

    Args:
        text: the file.
        origin: name of the file in errors.
        what: kind of the file in errors, such as `a recipe`.

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


class Misfit(Exception):
    """A value of the wrong type or range; the text says what it must be."""


def typed(node: yaml.Node, hint: Any) -> Any:
    """Convert a node to a value of a type.

    Args:
        node: a YAML node.
        hint: bool, int, float, str, Literal, a union, a tuple, `dict[str, Any]`, or Annotated with `Within` or
            `Matching`.

    Raises:
        Misfit: the value has another type or is out of range.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        value, rule = typed(node, arguments[0]), arguments[1]
        assert isinstance(rule, (Within, Matching))
        if not rule.allows(value):
            raise Misfit(str(rule))
        return value
    if origin in (typing.Union, types.UnionType):
        return _first_fit(node, arguments)
    if origin is Literal:
        if isinstance(node, yaml.ScalarNode) and node.value in arguments:
            return node.value
        raise Misfit(f"{'one of ' if len(arguments) > 1 else ''}{', '.join(arguments)}")
    if origin is tuple:
        return _pair(node, arguments)
    if origin is dict:
        return _mapping(node)
    return _scalar(node, hint)


def _first_fit(node: yaml.Node, arguments: tuple[Any, ...]) -> Any:
    if type(None) in arguments and isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL:
        return None
    misfits = []
    for argument in arguments:
        if argument is type(None):
            continue
        try:
            return typed(node, argument)
        except Misfit as misfit:
            misfits.append(str(misfit))
    raise Misfit(" or ".join([*misfits, "null"] if type(None) in arguments else misfits))


def _pair(node: yaml.Node, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`[a, b]`, or `HxW` for a size."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.ScalarNode) and re.fullmatch(r"\d+x\d+", node.value):
        items = [yaml.ScalarNode("", side) for side in node.value.split("x")]
    if len(items) != len(arguments):
        raise Misfit(f"{len(arguments)} values in brackets, as in [{', '.join('ab'[: len(arguments)])}]")
    try:
        return tuple(typed(item, argument) for item, argument in zip(items, arguments, strict=True))
    except Misfit as misfit:
        raise Misfit(f"{len(arguments)} values in brackets, each {misfit}") from None


def _mapping(node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise Misfit("`key: value` lines")
    return untyped(node)


def _scalar(node: yaml.Node, hint: type) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise Misfit("a single value")
    if hint is bool:
        if node.value.lower() not in _BOOLS:
            raise Misfit("true or false")
        return _BOOLS[node.value.lower()]
    if hint is int:
        if not re.fullmatch(r"[+-]?\d{1,18}", node.value):
            raise Misfit("a whole number")
        return int(node.value)
    if hint is float:
        try:
            return float(node.value)
        except ValueError:
            raise Misfit("a number") from None
    return node.value


def untyped(node: yaml.Node) -> Any:
    """Convert a node to the type that YAML gives it; for settings without a schema, such as model arguments."""
    if isinstance(node, yaml.SequenceNode):
        return [untyped(item) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:
            return node.value
        if EXPONENT.match(node.value):
            return float(node.value)
        try:
            value = yaml.safe_load(node.value)
        except (yaml.YAMLError, ValueError):  # YAML gives `=` and `2024-13-99` a meaning, and then fails
            return node.value
        return value if isinstance(value, (bool, int, float, str, type(None))) else node.value  # dates stay text
    if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        raise Misfit("plain values under plain keys")
    return {key.value: untyped(value) for key, value in node.value}


def shown(node: yaml.Node) -> str:
    """Format a node for a message, shortened to 80 characters."""
    if isinstance(node, yaml.ScalarNode):
        text = repr(node.value)
    elif isinstance(node, yaml.SequenceNode):
        text = f"[{', '.join(shown(item) for item in node.value)}]"
    else:
        text = f"{{{', '.join(f'{shown(key)}: ...' for key, _ in node.value)}}}"
    return cut(text)


def cut(text: str) -> str:
    """Shorten a text to 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def line_of(node: yaml.Node, origin: str) -> str:
    """Return the place of a node for an error, such as `mine.yaml line 3`."""
    return f"{origin} line {node.start_mark.line + 1}"


def entries(node: yaml.Node, origin: str, what: str) -> dict[str, tuple[str, yaml.Node]]:
    """Return the entries of a mapping node: for each key its place and its value node.

    Raises:
        UsageError: not a mapping, a key that is not a plain word, or a key that occurs twice.
    """
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{line_of(node, origin)}: {what} must hold `key: value` lines; got {shown(node)}.")
    nodes: dict[str, tuple[str, yaml.Node]] = {}
    for key, value in node.value:
        line = line_of(key, origin)
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{line}: a key must be a plain word; got {shown(key)}.")
        if key.value in nodes:
            raise UsageError(f"{line}: a key must occur once; got '{cut(key.value)}' again.")
        nodes[key.value] = line, value
    return nodes


def record(node: yaml.Node, schema: type[R], origin: str, what: str) -> R:
    """Convert a mapping node to a dataclass.

    Args:
        node: a YAML node.
        schema: a dataclass. Its type hints are those that `typed` supports, and dictionaries and tuples of dataclasses.
        origin: name of the file in errors.
        what: name of the mapping in errors, such as `variant 2`.

    Raises:
        UsageError: an unknown or missing key, or a value of the wrong type or range.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    values: dict[str, Any] = {}
    for key, (line, value) in entries(node, origin, what).items():
        if key not in hints:
            raise UsageError(f"{line}: {unknown(f'key of {what}', cut(key), hints, 'docs/studies.md')}")
        try:
            values[key] = _value(key, value, hints[key], origin)
        except Misfit as misfit:
            raise UsageError(f"{line}: {what}: {key} must be {misfit}; got {shown(value)}.") from None
    fields: Any = dataclasses.fields(schema)  # type: ignore[arg-type]
    required = [item.name for item in fields if item.default is item.default_factory]
    if missing := [key for key in required if key not in values]:
        place = line_of(node, origin)
        raise UsageError(f"{place}: {what} must have {', '.join(required)}; {', '.join(missing)} is missing.")
    return schema(**values)


def _value(key: str, node: yaml.Node, hint: Any, origin: str) -> Any:
    """Convert the value of a key; entries of `variants` are named `variant 1`, those of `scales` `scale small`."""
    arguments, name = typing.get_args(hint), key.removesuffix("s")
    inner: Any = next((item for item in arguments if isinstance(item, type) and dataclasses.is_dataclass(item)), None)
    if inner is None:
        return typed(node, hint)
    if typing.get_origin(hint) is dict:
        rows = entries(node, origin, key)
        return {word: record(row, inner, origin, f"{name} {word}") for word, (_, row) in rows.items()}
    if not isinstance(node, yaml.SequenceNode):
        raise Misfit("a list")
    return tuple(record(row, inner, origin, f"{name} {number}") for number, row in enumerate(node.value, start=1))
