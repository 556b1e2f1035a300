"""The networks. Lazy, so that their table can be read without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.models.registry import create_model as create_model

from weft.models.zoo import list_models

__all__ = ["create_model", "list_models"]


def __getattr__(name: str) -> Any:
    if name == "create_model":
        return importlib.import_module("weft.models.registry").create_model
    raise AttributeError(f"module 'weft.models' has no attribute '{name}'.")
