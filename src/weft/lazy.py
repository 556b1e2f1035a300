"""Lazy modules (PEP 562): import on first use, so that `weft --help` starts without torch, `predict` without timm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *more: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: its `__name__`.
        homes: for each public name the module that defines it; as `module:other` if it is called `other` there.
        more: names that the package defines itself.
    """
    offered = sorted([*homes, *more])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'; it has {', '.join(offered)}.")
        module, _, attribute = homes[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)

    return get, lambda: offered


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, to read its files without its import; None: it is not installed."""
    spec = PathFinder.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class LazyModule(ModuleType):
    """A module of another library that is imported when a name of it is used for the first time.

    Args:
        name: of the module, such as `timm`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
