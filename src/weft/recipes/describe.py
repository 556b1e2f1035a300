"""Describe the settings: allowed values, help texts, command line options. No torch and no YAML."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from weft.recipes import schema
from weft.recipes.fields import in_words
from weft.recipes.schema import Recipe

OPEN = ("model_args", "environment")  # settings whose keys the schema does not define


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: dotted key.
        type: its type hint, with the rule that values obey.
        default: value that applies if no recipe names one.
        help: the text below the field.
        flag: option on the command line, which is also an argument in Python; '' for none.
        metavar: placeholder in the help of the option.
    """

    key: str
    type: Any
    default: Any
    help: str
    flag: str = ""
    metavar: str = ""

    @property
    def argument(self) -> str:
        """Name of the argument in Python."""
        return self.key.rpartition(".")[2]

    @property
    def may_be(self) -> str:
        """Allowed values in words."""
        return in_words(self.type)

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values, if they are a fixed set of words."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def summary(self) -> str:
        """First sentence of the help text."""
        return first_sentence(self.help)


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, without its full stop."""
    return text.split(". ")[0].rstrip(".")


def field_texts(module: ModuleType) -> dict[str, dict[str, str]]:
    """Read the strings below the fields of the classes of a module, by class and field."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            inside = texts.setdefault(node.name, {})
            for item, text in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
                    inside[item.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return texts


def _settings(section: type, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section of the schema and of all sections in it."""
    hints, texts, defaults = typing.get_type_hints(section, include_extras=True), TEXTS[section.__name__], section()
    for item in dataclasses.fields(section):
        hint, default = hints[item.name], getattr(defaults, item.name)
        if dataclasses.is_dataclass(default):
            yield from _settings(type(default), f"{prefix}{item.name}.")
        else:
            metavar = item.metadata.get("metavar", "")
            flag = metavar and (item.metadata["flag"] or f"--{item.name.replace('_', '-')}")
            yield Setting(prefix + item.name, hint, default, texts.get(item.name, ""), flag, metavar)


TEXTS = field_texts(schema)
SETTINGS = tuple(_settings(Recipe))
KEYS: dict[str, Any] = {setting.key: setting.type for setting in SETTINGS}


def settings() -> list[Setting]:
    """Return all settings in the order of the schema, without the record that a run adds."""
    return [setting for setting in SETTINGS if setting.key != "environment"]


@functools.cache
def options() -> dict[str, Setting]:
    """Return the settings with an option of their own, by the name of the argument."""
    return {setting.argument: setting for setting in SETTINGS if setting.flag}
