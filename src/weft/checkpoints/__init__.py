"""Weights of others and our own: read safely, recognised by their keys, renamed by tables, loaded all or nothing.

Lazy: the table of public weights and the names below can be looked at without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.checkpoints.files import read_state_dict as read_state_dict
    from weft.checkpoints.load import LoadReport as LoadReport
    from weft.checkpoints.load import load_checkpoint as load_checkpoint
    from weft.checkpoints.model_dir import load_model_dir as load_model_dir
    from weft.checkpoints.model_dir import save_model_dir as save_model_dir
    from weft.checkpoints.public import fetch_pretrained as fetch_pretrained

_HOMES = {
    "read_state_dict": "files",
    "LoadReport": "load",
    "load_checkpoint": "load",
    "load_model_dir": "model_dir",
    "save_model_dir": "model_dir",
    "fetch_pretrained": "public",
}

__all__ = [
    "LoadReport",
    "fetch_pretrained",
    "load_checkpoint",
    "load_model_dir",
    "read_state_dict",
    "save_model_dir",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.checkpoints' has no attribute '{name}'; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"weft.checkpoints.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
