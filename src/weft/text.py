"""Format untrusted text for messages, tables and Markdown: printable, bounded, without markup.

File names, class names, tensor names and values of a file may hold escape sequences of a terminal, characters that turn
the direction of what follows, or a megabyte of anything. Every error, note and table passes through here.
"""

from __future__ import annotations

import re

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet computes
MAX_WORD, MAX_TEXT = 400, 1_600
_MARKDOWN = re.compile(  # signs that Markdown does not show as they are; within a word, it shows an underscore
    r"[\\`*\[\]~$|<>&]|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\."
)
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def printable(text: str) -> str:
    """The text with everything escaped that cannot be printed, or would change what follows."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def markdown(text: str) -> str:
    """`printable`, with everything escaped that Markdown, its tables or HTML in it would take for markup or a link."""
    return _MARKDOWN.sub(lambda sign: _ENTITIES.get(sign[0], f"\\{sign[0]}"), printable(text))


def fenced(text: str, language: str) -> str:
    """A code block of Markdown, with a fence that no line of the text can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"


def csv_cell(value: object) -> object:
    """A value for a CSV file: before a text that a spreadsheet would take for a formula stands an apostrophe, which it
    shows as text. Numbers are numbers."""
    formula = isinstance(value, str) and value.startswith(FORMULA) and not _NUMBER.fullmatch(value)
    return f"'{value}" if formula else value


def one_line(text: str) -> str:
    """`printable`, and cut where it is long: a word in its middle, a text before its last sentences."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][: MAX_WORD - 100]}[...]{word[0][-80:]}", printable(text))
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 600]} [...] {text[-580:]}"
