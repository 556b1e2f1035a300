"""weft: CeiT, CvT and LeViT, vision transformers with convolution woven in.

This page is the public surface. It is lazy (PEP 562): `weft --help` passes through here and must not pay for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from weft.lazy import lazy_names
from weft.version import __version__

if TYPE_CHECKING:
    from weft.checkpoints import load_checkpoint as load_checkpoint
    from weft.deploy import export as export
    from weft.deploy import fold as fold
    from weft.hub import create_model as create_model
    from weft.interpret import explain as explain
    from weft.memory import keep_memory as keep_memory
    from weft.models import list_models as list_models

_HOMES = {
    "create_model": "weft.hub",
    "explain": "weft.interpret",
    "export": "weft.deploy",
    "fold": "weft.deploy",
    "keep_memory": "weft.memory",
    "list_models": "weft.models",
    "load_checkpoint": "weft.checkpoints",
}

__all__ = ["__version__", "create_model", "explain", "export", "fold", "keep_memory", "list_models", "load_checkpoint"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, "__version__")


if "timm" in sys.modules:  # whoever uses timm finds our models in its registry, as `weft_<name>`, once this is imported
    importlib.import_module("weft.models.registry")
