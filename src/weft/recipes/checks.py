"""Checks of values by their types, with messages that state the whole rule. No YAML is imported."""

from __future__ import annotations

import functools
import typing
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from weft.errors import UsageError
from weft.recipes.fields import in_words
from weft.recipes.schema import ImageSize

T = TypeVar("T")


def check_fields(values: Any) -> None:
    """Check the fields of a dataclass that Python code filled, by their types.

    Raises:
        UsageError: a value has the wrong type or range; the first in the order of the fields.
    """
    for name, hint in typing.get_type_hints(type(values), include_extras=True).items():
        check_argument(name, getattr(values, name), hint)


def check_argument(name: str, value: Any, hint: Any) -> None:
    """Check an argument that Python code passed, by its type.

    Raises:
        UsageError: it has the wrong type or range.
    """
    try:
        adapter(hint).validate_python(value, strict=typing.get_origin(hint) is not tuple)  # a list will do
    except ValidationError:
        raise UsageError(f"{name} must {rule_of(required(hint))}; got {shown(value)}.") from None


def image_size(value: Any) -> int | tuple[int, int]:
    """Return an image size from a number, a pair, or a text such as `224` and `160x256`.

    Raises:
        UsageError: it is none of these, or a side is out of range.
    """
    try:
        parts = value.split("x") if isinstance(value, str) and "x" in value else value
        return adapter(cast(Any, ImageSize)).validate_python(parts)
    except ValidationError:
        raise UsageError(f"img_size must {rule_of(ImageSize)}; got {shown(value)}.") from None


@functools.cache
def adapter(schema: type[T]) -> TypeAdapter[T]:
    """Return the validator of a type."""
    return TypeAdapter(schema)


def required(hint: Any) -> Any:
    """Return a type without None."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return typing.Union[*kinds] if type(None) in typing.get_args(hint) else hint


def rule_of(hint: Any) -> str:
    """Return what a value must do to have a type."""
    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if is_dataclass(kind) or dict in (kind, typing.get_origin(kind)):
        return "hold `key: value` lines"
    return f"be {'one of ' if typing.get_origin(hint) is Literal else ''}{in_words(hint)}"


def shown(value: Any) -> str:
    """Format a value for a message, shortened to 80 characters."""
    if isinstance(value, list):
        return cut(f"[{', '.join(map(shown, value))}]")
    if isinstance(value, dict):
        return cut(f"{{{', '.join(f'{key!r}: ...' for key in value)}}}")
    return "null" if value is None else cut(repr(value))


def cut(text: str) -> str:
    """Shorten a text to 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."
