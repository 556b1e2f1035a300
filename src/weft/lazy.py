"""Lazy modules (PEP 562): import on first use, so that `weft --help` starts without torch, `predict` without timm."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def attach(package: str, file: str, *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are imported on first use.

    The public names are those that its source imports under `if TYPE_CHECKING:`. So each is written once, where type
    checkers and readers look for it.

    Args:
        package: its `__name__`.
        file: its `__file__`.
        more: public names that the package defines itself.
    """
    block = next(node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
    names = sorted([*homes, *more])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'; it has {', '.join(names)}.")
        module, attribute = homes[name]
        return getattr(importlib.import_module(str(module)), attribute)

    return get, lambda: names, names


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
