"""Lazy modules (PEP 562): import a public name on first use, so that `weft --help` starts without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(page: str, homes: Mapping[str, str], *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a page.

    Args:
        page: its `__name__`.
        homes: by name that the page offers, the module that has it.
        more: names that it has itself.
    """
    offered = sorted([*homes, *more])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{page}' has no attribute '{name}'; it offers {', '.join(offered)}.")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: offered
