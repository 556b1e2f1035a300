"""Describe the settings: allowed values, help texts, command line options. No torch and no YAML."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from weft.recipes import schema
from weft.recipes.schema import Recipe

OPEN = ("model_args", "environment")  # settings whose keys the schema does not define


class SettingInfo(NamedTuple):
    """One setting: dotted key, allowed values in words, default and help text."""

    key: str
    may_be: str
    default: Any
    help: str


class Option(NamedTuple):
    """A setting that has an option and an argument of its own.

    Attributes:
        argument: name in Python.
        key: dotted key in the recipe.
        flag: option on the command line.
        metavar: placeholder in the help.
        choices: allowed values, if they are a fixed set.
        help: first sentence of the help text.
    """

    argument: str
    key: str
    flag: str
    metavar: str
    choices: tuple[str, ...]
    help: str


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], str]]:
    """Yield the dotted key, type hint, field and help text of every setting."""
    hints, texts = typing.get_type_hints(kind, include_extras=True), _docstrings()[kind.__name__]
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _fields(hint, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hint, item, texts.get(item.name, "")


@functools.cache
def _docstrings() -> dict[str, dict[str, str]]:
    """Read the strings below the fields of the schema, by class and field."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            inside = texts.setdefault(node.name, {})
            for item, text in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
                    inside[item.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return texts


KEYS: dict[str, Any] = {key: hint for key, hint, *_ in _fields(Recipe)}  # every dotted key and its type


def settings() -> list[SettingInfo]:
    """Return all settings in the order of the schema, without the record that a run adds."""
    default = Recipe()
    return [
        SettingInfo(key, in_words(hint), attrgetter(key)(default), text)
        for key, hint, _, text in _fields(Recipe)
        if key != "environment"
    ]


@functools.cache
def options() -> dict[str, Option]:
    """Return the settings with an option of their own, by the name of the argument."""
    listed: dict[str, Option] = {}
    for key, hint, item, text in _fields(Recipe):
        if "metavar" in item.metadata:
            flag = item.metadata["flag"] or "--" + item.name.replace("_", "-")
            choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            first = text.split(". ")[0].rstrip(".")
            listed[item.name] = Option(item.name, key, flag, item.metadata["metavar"], choices, first)
    return listed


def in_words(hint: Any) -> str:
    """Describe the values that a type allows, such as `a number at least 0`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        text = str(arguments[1])
        return text.replace("a number", "a whole number") if arguments[0] is int else text
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(arguments)
    if origin is dict:
        return "named values"
    if origin is tuple and arguments[-1] is ...:
        return "a list"
    if origin is tuple and len(set(arguments)) == 1:
        return f"{len(arguments)} values in brackets, each {in_words(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(in_words(argument) for argument in arguments) + "]"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names[hint]
