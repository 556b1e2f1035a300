"""Format untrusted text for messages, tables and Markdown: printable, bounded, without markup.

File names, class names, tensor names and values of a file may contain terminal escape sequences, characters that
reverse the text direction, or a megabyte of text. Every error, note and table passes through this module.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a cell that a spreadsheet evaluates
MAX_WORD, MAX_TEXT, MAX_REASON = 400, 1_600, 300  # characters of a word, a message, and a reason within it
NUM_NAMED = 5  # names listed in a message
_MARKDOWN = re.compile(  # characters with a meaning in Markdown; an underscore has none within a word
    r"[\\`*\[\]~$|<>&]|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\."
)
_CONTROL = ("Cc", "Zl", "Zp")  # controls, line and paragraph separators
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def has_control_characters(text: str) -> bool:
    """Return whether a text has control characters, line separators, or marks that reorder the text that follows."""
    return any(unicodedata.category(char) in _CONTROL or char in _DIRECTIONS for char in text)


def printable(text: str) -> str:
    """Escape characters that are not printable, such as control characters and text direction marks."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def markdown(text: str) -> str:
    """Escape text for Markdown, its tables and embedded HTML: no markup, no links, only printable characters."""
    return _MARKDOWN.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(text))


def fenced(text: str, language: str) -> str:
    """Return a Markdown code block, with a fence that is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"


def csv_cell(value: object) -> object:
    """Return a value for a CSV file; a text that spreadsheets would evaluate as a formula gets a leading apostrophe."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def reason_of(error: BaseException) -> str:
    """Return the message of another library's error as a part of a sentence: its first line, without a final stop."""
    line = next((line for line in map(str.strip, str(error).splitlines()) if line), "")
    return printable(line[:MAX_REASON]).rstrip(" .:;") or type(error).__name__


def one_line(text: str) -> str:
    """Escape a message for a terminal and shorten long words and texts in the middle."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][: MAX_WORD - 100]}[...]{word[0][-80:]}", printable(text))
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 600]} [...] {text[-580:]}"


def first_few(names: Iterable[str], most: int = NUM_NAMED) -> str:
    """Join the first `most` names, printable, with the number of further ones."""
    listed = [printable(name) for name in names]
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun: `1 image`, `2,000 images`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
