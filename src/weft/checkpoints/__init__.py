"""Load and save weights: safe readers, layouts of other libraries, model directories, the hub.

Public names are imported lazily, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.checkpoints.files import read_state_dict as read_state_dict
    from weft.checkpoints.hub import fetch_pretrained as fetch_pretrained
    from weft.checkpoints.load import LoadReport as LoadReport
    from weft.checkpoints.load import load_checkpoint as load_checkpoint
    from weft.checkpoints.model_dir import load_model_dir as load_model_dir
    from weft.checkpoints.model_dir import save_model_dir as save_model_dir

_HOMES = {
    "read_state_dict": "weft.checkpoints.files",
    "LoadReport": "weft.checkpoints.load",
    "load_checkpoint": "weft.checkpoints.load",
    "load_model_dir": "weft.checkpoints.model_dir",
    "save_model_dir": "weft.checkpoints.model_dir",
    "fetch_pretrained": "weft.checkpoints.hub",
}

__all__ = [
    "LoadReport",
    "fetch_pretrained",
    "load_checkpoint",
    "load_model_dir",
    "read_state_dict",
    "save_model_dir",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
