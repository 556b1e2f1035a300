"""Deploy a network: fold it, export it, verify the export, and run inference with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.deploy.exported import ExportedModel as ExportedModel
    from weft.deploy.exported import open_model as open_model
    from weft.deploy.exporting import export as export
    from weft.deploy.folding import fold as fold
    from weft.deploy.verification import ExportReport as ExportReport

__getattr__, __dir__, __all__ = attach(__name__, __file__)
