"""Errors with their exit codes, and suggestions for misspelt names.

Every message has three parts: the requirement, the actual value, and what to do. This module does not import torch.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable

from weft.text import one_line

DISTRIBUTION = "weft-vision"  # name on PyPI, where `weft` is another project


class WeftError(Exception):
    """Base class of errors that the user can fix; the command line prints the message and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(args if len(args) != 1 else [one_line(str(args[0]))]))


class UsageError(WeftError, ValueError):
    """An argument, option or setting is invalid."""

    exit_code = 2


class DataError(WeftError, ValueError):
    """A dataset cannot be used: it is missing or empty, has too many bad files, or its classes do not match."""

    exit_code = 3


class CheckpointError(WeftError, ValueError):
    """A checkpoint or model directory is missing, unsafe or damaged, or does not fit the model."""

    exit_code = 4


class DivergedError(WeftError, ArithmeticError):
    """The loss or gradient of training is not finite."""

    exit_code = 5


class StorageError(WeftError, OSError):
    """A file cannot be written."""

    exit_code = 6


class VerificationError(WeftError):
    """An exported or converted model computes other outputs than the original."""

    exit_code = 7


class StoppedError(WeftError):
    """A run reached its time limit or the requested epoch; its state is saved and can be resumed."""

    exit_code = 143


def need(extra: str, *packages: str) -> None:
    """Check that optional packages are installed.

    Args:
        extra: extra of the distribution that installs them, such as `deploy`.
        packages: names of the modules to import.

    Raises:
        UsageError: one is not installed; the message has the command that installs the extra, or the package alone in
            an installation without torch (docs/deploy.md), which the extra would add.
    """
    missing = next((package for package in packages if not is_installed(package)), None)
    if missing is not None:
        command = install_command(extra) if is_installed("torch") else f"pip install {missing}"
        raise UsageError(f"{missing} is needed for this, and is not installed. Run: {command}")


def need_torch(reason: str) -> None:
    """Check that torch is installed.

    Args:
        reason: sentence that says what needs it.

    Raises:
        UsageError: it is not: this is an installation without torch (docs/deploy.md).
    """
    if not is_installed("torch"):
        raise UsageError(f"{reason} torch is not installed. Run: {install_command()}")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def install_command(*extras: str) -> str:
    """Return the command that installs weft with extras; in an installation without torch, also what it lacks."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install {DISTRIBUTION}"


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the `count` names most similar to `name`, best first, however small the similarity."""
    ranked = sorted(set(names), key=lambda known: (-difflib.SequenceMatcher(None, name, known).ratio(), known))
    return ranked[:count]


def unknown(kind: str, name: str, names: Iterable[str], all_names: str) -> UsageError:
    """Return the error for an unknown name.

    Args:
        kind: kind of thing that is named, such as `model` or `option`.
        name: the unknown name.
        names: all known names.
        all_names: list of all names, or the command that prints it.
    """
    return UsageError(f"Unknown {kind} '{name}'. Nearest: {', '.join(nearest(name, names))}. All names: {all_names}.")
