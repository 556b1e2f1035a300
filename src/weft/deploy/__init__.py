"""From a trained network to what answers: folded, exported, and checked against what it was made of."""

from weft.deploy.exporting import ExportReport, export
from weft.deploy.folding import fold
from weft.deploy.runtimes import ExportedModel, open_model

__all__ = ["ExportReport", "ExportedModel", "export", "fold", "open_model"]
