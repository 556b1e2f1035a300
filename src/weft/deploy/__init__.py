"""Deploy a network: fold it, export it, verify the export, and run inference with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.deploy.exported import ExportedModel as ExportedModel
    from weft.deploy.exported import open_model as open_model
    from weft.deploy.exporting import export as export
    from weft.deploy.folding import fold as fold
    from weft.deploy.verification import ExportReport as ExportReport

_HOMES = {
    "ExportReport": "weft.deploy.verification",
    "ExportedModel": "weft.deploy.exported",
    "export": "weft.deploy.exporting",
    "fold": "weft.deploy.folding",
    "open_model": "weft.deploy.exported",
}

__all__ = ["ExportReport", "ExportedModel", "export", "fold", "open_model"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
