"""Errors with their exit codes, and suggestions for misspelt names.

Every message has three parts: what must hold, what came, what to do. No torch is imported here.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

from weft.text import one_line

DISTRIBUTION = "weft-vision"  # on PyPI; `weft` there is another project


class WeftError(Exception):
    """Base of every error that is the input's fault; the command line prints its text and leaves with `exit_code`."""

    exit_code = 1

    def __init__(self, *words: object) -> None:
        super().__init__(*(words if len(words) != 1 else [one_line(str(words[0]))]))


class UsageError(WeftError, ValueError):
    """An argument, option or configuration that does not fit."""

    exit_code = 2


class DataError(WeftError, ValueError):
    """Data that cannot be used: missing, empty, too many bad files, classes that disagree."""

    exit_code = 3


class CheckpointError(WeftError, ValueError):
    """A checkpoint or model directory that is missing, refused, damaged or does not fit the model."""

    exit_code = 4


class DivergedError(WeftError, ArithmeticError):
    """Training met a loss that is not finite."""

    exit_code = 5


class StorageError(WeftError, OSError):
    """The disk did not take what had to be written."""

    exit_code = 6


class VerificationError(WeftError):
    """Something made from a model does not do what the model does."""

    exit_code = 7


class StoppedError(WeftError):
    """A run reached its time limit; it is saved and can be resumed."""

    exit_code = 143


def need(extra: str, *packages: str) -> None:
    """Check that optional packages are installed.

    Args:
        extra: the extra of the distribution that brings them, such as `deploy`.
        packages: names that are imported.

    Raises:
        UsageError: one is not installed; the message has the command that installs the extra.
    """
    missing = next((package for package in packages if importlib.util.find_spec(package) is None), None)
    if missing is not None:
        raise UsageError(f"{missing} is needed for this, and is not installed. Run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to an installed weft."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names most like `name`, best first; always some, so that a message has a way out."""
    by_likeness = sorted(set(names), key=lambda known: (-difflib.SequenceMatcher(None, name, known).ratio(), known))
    return by_likeness[:count]


def unknown(kind: str, name: str, names: Iterable[str], all_names: str) -> UsageError:
    """The error for a name that is not known.

    Args:
        kind: what the name should name, such as `model` or `option`.
        name: what came.
        names: every name that exists.
        all_names: where to see them all, such as a command.
    """
    return UsageError(f"Unknown {kind} '{name}'. Nearest: {', '.join(nearest(name, names))}. All names: {all_names}.")
