"""YAML reader of recipes and studies: plain data, validated by pydantic, with file and line in every error.

A file may be untrusted. It can name no Python object (tags are refused), refer to nothing (anchors and aliases
are refused, so no small file can grow), and set only what the schema has.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Collection
from dataclasses import dataclass, field, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from weft.errors import UsageError, unknown
from weft.reading import read_bytes
from weft.recipes.checks import adapter, cut, required, rule_of, shown

T = TypeVar("T")
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
NULL = ("", "~", "null", "Null", "NULL")
EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+\Z")  # YAML 1.1 reads 1e-3 as text; here it is a number


def names_in(package: str) -> list[str]:
    """Return the names of the YAML files in a package."""
    names = [item.name for item in resources.files(package).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def text_of(name: str | Path, kind: str, package: str, command: str) -> str:
    """Return the text of a YAML file: one of the package, by its name, or one of the user, by its path.

    Raises:
        UsageError: an unknown name, or a file that cannot be read; with its kind, and the command that lists the names.
    """
    path, names = Path(name), names_in(package)
    is_file = isinstance(name, Path) or path.suffix in (".yaml", ".yml") or path.is_file() or len(path.parts) != 1
    if not is_file and str(name) not in names:
        raise unknown(kind, str(name), names, f"{command}, or give a path ending in .yaml")
    try:
        if is_file:
            return read_bytes(path, UsageError, 4 * MAX_BYTES).decode("utf-8")
        return (resources.files(package) / f"{name}.yaml").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: a {kind} must be UTF-8 text; byte {error.start} is not.") from error


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


class Text(str):
    """Scalar as it is written. The schema decides its type: `model: no` is a name, `hflip: no` is false."""

    is_quoted: bool


class Located(NamedTuple):
    """Line and value of a key."""

    line: int
    value: Any


@dataclass
class Document:
    """Content of a YAML file, or an override.

    Attributes:
        origin: name of the file in errors; '' for an override.
        what: kind of the file in errors, such as `a recipe`.
        values: dictionaries and lists of `Text` and None.
        entries: entry of each dotted key; items of a list are counted from 1, the whole content is ''.
    """

    origin: str
    what: str = "a recipe"
    values: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Located] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, origin: str, what: str = "a recipe") -> Document:
        """Parse a file.

        Raises:
            UsageError: as `compose`, other content than keys and values, or as `add`.
        """
        document = cls(origin, what)
        values = document.add("", compose(text, origin, what))
        if not isinstance(values, (dict, type(None))):
            raise document.error("", f"{what} must {rule_of(dict)}; got {shown(values)}.")
        document.values = values or {}
        return document

    def add(self, key: str, node: yaml.Node | None) -> Any:
        """Record the entries of a key and of all keys below it, and return its value.

        Raises:
            UsageError: a key below is not a plain word, or occurs twice.
        """
        prefix, value = f"{key}." if key else "", None
        if isinstance(node, yaml.MappingNode):
            value = {}
            for name, item in node.value:
                inner, line = f"{prefix}{name.value}", _line(name)
                self.entries[inner] = Located(line, None)
                if not isinstance(name, yaml.ScalarNode):
                    raise self.error(inner, f"a key must be a plain word; got a {name.id}.")
                if name.value in value:
                    raise self.error(inner, f"a key must occur once; got '{cut(inner)}' again.")
                value[name.value] = self.add(inner, item)
                self.entries[inner] = Located(line, value[name.value])
        elif isinstance(node, yaml.SequenceNode):
            value = [self.add(f"{prefix}{number}", item) for number, item in enumerate(node.value, start=1)]
        elif isinstance(node, yaml.ScalarNode) and (node.style is not None or node.value not in NULL):
            value = Text(node.value)
            value.is_quoted = node.style is not None
        self.entries[key] = Located(_line(node), value)
        return value

    def error(self, key: str, text: object) -> UsageError:
        """Return an error with the place of a key in the file."""
        return UsageError(f"{self.origin} line {self.entries[key].line}: {text}" if self.origin else str(text))

    def read(self, schema: type[T], values: Any, all_keys: str, keys: Collection[str] = ()) -> T:
        """Convert the content to a dataclass.

        Args:
            schema: the dataclass; its `__pydantic_config__` forbids unknown keys.
            values: the content, arranged as in the schema.
            all_keys: the list of all keys, or the command that prints it.
            keys: dotted keys of which an error names the nearest; those of the same section if empty.

        Raises:
            UsageError: an unknown or missing key, or a value of the wrong type or range; the first in the file.
        """
        try:
            return adapter(schema).validate_python(values)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [_place(schema, detail["loc"]) for detail in details]
        entries = self.entries
        key, hint, names = min(places, key=lambda place: entries[place[0]].line if place[0] in entries else math.inf)
        section, _, name = key.rpartition(".")
        if key not in entries:
            raise self.error(section, f"{section or self.what} must have {name}; it is missing.")
        if hint is None:
            same_name = [other for other in keys if other.rpartition(".")[2] == name]
            raise self.error(key, unknown("setting", cut(key), same_name or keys or names, all_keys))
        hint = hint if self.origin else required(hint)  # an option is left out, not null
        raise self.error(key, f"{key or self.what} must {rule_of(hint)}; got {shown(entries[key].value)}.")


def _place(schema: Any, location: tuple[int | str, ...]) -> tuple[str, Any, list[str]]:
    """Return the key and the type (None: unknown) of the setting that a location is in, and all keys of its section."""
    path, names, hint = "", [], schema
    for part in location:
        inside = [item for item in typing.get_args(hint) if is_dataclass(item)]  # of a list or dictionary of them
        if is_dataclass(hint):
            hints = typing.get_type_hints(hint, include_extras=True)
            hint, names = hints.get(str(part)), [f"{path}{name}" for name in hints]
        elif inside:
            hint = inside[0]
        else:  # within a value
            break
        path += f"{part + 1 if isinstance(part, int) else part}."
    return path[:-1], hint, names


def untyped(value: Any) -> Any:
    """Give texts the types that YAML gives them; for values without a schema, such as model arguments."""
    if isinstance(value, dict):
        return {key: untyped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [untyped(item) for item in value]
    if not isinstance(value, Text):
        return value
    if value.is_quoted:
        return str(value)
    if EXPONENT.match(value):
        return float(value)
    try:
        typed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):  # YAML gives `=` and `2024-13-99` a meaning, and then fails
        typed = None
    return typed if isinstance(typed, (bool, int, float)) else str(value)  # dates stay text


def _line(node: yaml.Node | None) -> int:
    return 1 if node is None else node.start_mark.line + 1
