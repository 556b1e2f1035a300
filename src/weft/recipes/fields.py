"""Declare the fields of a schema: rules of their values, for pydantic and in words, and options. No pydantic."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.errors import UsageError

NUMBERS = {int: r"[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}  # as text
STRICT = {"extra": "forbid", "allow_inf_nan": False}  # `__pydantic_config__` of a schema: no other keys


@dataclass(frozen=True)
class Within:
    """Closed range of a number; with `above` or `below`, an end is excluded. `unit` is for messages.

    pydantic validates it. `annotated_types` has the same, but `weft VERB --help` would wait for its import.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    unit: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        upper = {"lt" if self.below else "le": self.high} if math.isfinite(self.high) else {}
        number = handler(source) | {"gt" if self.above else "ge": self.low} | upper
        check = {"type": "no-info", "function": lambda value: checked_number(source, value)}
        return {"type": "function-before", "function": check, "schema": number}

    def __str__(self) -> str:
        parts = [f"{'above' if self.above else 'at least'} {self.low:.10g}"]
        parts += [f"{'below' if self.below else 'at most'} {self.high:.10g}"] if math.isfinite(self.high) else []
        return f"{' and '.join(parts)} {self.unit}".rstrip()


def checked_number(kind: type, value: Any) -> Any:
    """Return a value that is to become a number; Python and pydantic would accept `1_0`, `2.0` as 2, and true as 1.

    Raises:
        ValueError: a text that is no decimal number of this kind, or a truth value.
    """
    if isinstance(value, bool) or (isinstance(value, str) and not re.fullmatch(NUMBERS[kind], value)):
        raise ValueError
    return value


@dataclass(frozen=True)
class Matching:
    """Text that `pattern` matches completely."""

    pattern: str
    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {"pattern": f"^(?:{self.pattern})$"}

    def __str__(self) -> str:
        return self.description


def option(default: Any, metavar: str = "N", flag: str | None = None) -> Any:
    """Declare a setting with an option on the command line and an argument in Python, named like the field.

    Args:
        default: value of the setting.
        metavar: placeholder in the help; a setting with a fixed set of values lists these.
        flag: name of the option; None for that of the field.
    """
    return field(default=default, metadata={"metavar": metavar, "flag": flag})


TIMES = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
SIZES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}


def seconds_of(text: str | float, option: str, *, may_be_zero: bool = False, needs_unit: bool = False) -> float:
    """Parse a duration: seconds, or '10ms', '90s', '45m', '2h', '1h30m', '1d'.

    Args:
        text: the duration.
        option: its name in the error.
        may_be_zero: allow zero.
        needs_unit: refuse a number alone, which a reader may take for milliseconds.

    Raises:
        UsageError: not a duration.
    """
    text = str(text).replace(" ", "")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])", text)
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) and not needs_unit:
        seconds = float(text)
    elif parts and "".join(number + unit for number, unit in parts) == text:
        seconds = sum(float(number) * TIMES[unit] for number, unit in parts)
    else:
        raise UsageError(f"{option} must be a duration such as 10ms, 90s, 45m or 1h30m; got '{text}'.")
    if seconds < 0 or (seconds == 0 and not may_be_zero):
        raise UsageError(f"{option} must be longer than zero; got '{text}'.")
    return seconds


def bytes_of(text: str | float, option: str) -> float:
    """Parse a size: '800kB', '20MB', '1GB' with powers of 1000. A number of Python is bytes; a text needs its unit.

    Args:
        text: the size.
        option: its name in the error.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?)([kKMG]?)B", text.replace(" ", "") if isinstance(text, str) else f"{text}B"
    )
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} must be a size such as 20MB; got '{text}'.")
    return float(match[1]) * SIZES[match[2] or ""]


def in_words(hint: Any) -> str:
    """Describe the values that a type allows, such as `a number at least 0`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, rule = arguments
        return f"{in_words(kind)} {rule}" if isinstance(rule, Within) else str(rule)
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
