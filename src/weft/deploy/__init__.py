"""Deploy a trained network: fold it, export it, verify the export, run it."""

from weft.deploy.exporting import ExportReport, export
from weft.deploy.folding import fold
from weft.deploy.runtimes import ExportedModel, open_model

__all__ = ["ExportReport", "ExportedModel", "export", "fold", "open_model"]
