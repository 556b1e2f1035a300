"""Deploy a network: fold it, export it, verify the export, and run inference with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.deploy.exporting import export as export
    from weft.deploy.folding import fold as fold
    from weft.deploy.model import Model as Model
    from weft.deploy.model import ModelInfo as ModelInfo
    from weft.deploy.model import Outputs as Outputs
    from weft.deploy.verification import ExportReport as ExportReport

__getattr__, __dir__, __all__ = attach(__name__, __file__)
