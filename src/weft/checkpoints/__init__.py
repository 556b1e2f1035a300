"""Load and save weights: safe readers, layouts of other libraries, model directories, the hub.

Public names are imported lazily, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.checkpoints.files import read_state_dict as read_state_dict
    from weft.checkpoints.hub import fetch_pretrained as fetch_pretrained
    from weft.checkpoints.load import LoadReport as LoadReport
    from weft.checkpoints.load import load_checkpoint as load_checkpoint
    from weft.checkpoints.model_dir import load_model_dir as load_model_dir
    from weft.checkpoints.model_dir import save_model_dir as save_model_dir

__getattr__, __dir__, __all__ = attach(__name__, __file__)
