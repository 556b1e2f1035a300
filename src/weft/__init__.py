"""weft: the vision transformers with convolution CeiT, CvT and LeViT, from training to deployment.

This module has the public names. They are imported on first use (PEP 562), so that `weft --help` starts without torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from weft.lazy import attach
from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.checkpoints import load_checkpoint as load_checkpoint
    from weft.checkpoints.hub import create_model as create_model
    from weft.deploy import export as export
    from weft.deploy import fold as fold
    from weft.inference.run_info import info as info
    from weft.interpret import explain as explain
    from weft.machine.memory import keep_memory as keep_memory
    from weft.models import list_models as list_models
    from weft.models.families import load_plugin as load_plugin

__getattr__, __dir__, __all__ = attach(__name__, __file__, "__version__")

if "IPython" in sys.modules:  # tqdm, of other libraries, warns in a notebook without ipywidgets
    warnings.filterwarnings("ignore", message="IProgress not found")

if "timm" in sys.modules:  # register the models with timm as `weft_<name>`, if timm is in use
    importlib.import_module("weft.models.registry")
