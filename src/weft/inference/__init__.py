"""Run trained models: predict, evaluate, explain, export, embed; with the names and arguments of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.inference.embedding import Embedding as Embedding
    from weft.inference.embedding import SimilarImage as SimilarImage
    from weft.inference.embedding import embed as embed
    from weft.inference.embedding import similar as similar
    from weft.inference.evaluation import evaluate as evaluate
    from weft.inference.explain_files import FileExplanation as FileExplanation
    from weft.inference.explain_files import explain_run as explain_run
    from weft.inference.exports import export_run as export_run
    from weft.inference.metrics import Evaluation as Evaluation
    from weft.inference.prediction import FilePrediction as FilePrediction
    from weft.inference.prediction import predict as predict
    from weft.inference.predictor import ImagePrediction as ImagePrediction
    from weft.inference.predictor import Predictor as Predictor

_HOMES = {
    "Embedding": "weft.inference.embedding",
    "Evaluation": "weft.inference.metrics",
    "FileExplanation": "weft.inference.explain_files",
    "FilePrediction": "weft.inference.prediction",
    "ImagePrediction": "weft.inference.predictor",
    "Predictor": "weft.inference.predictor",
    "SimilarImage": "weft.inference.embedding",
    "embed": "weft.inference.embedding",
    "evaluate": "weft.inference.evaluation",
    "explain_run": "weft.inference.explain_files",
    "export_run": "weft.inference.exports",
    "predict": "weft.inference.prediction",
    "similar": "weft.inference.embedding",
}

__all__ = [
    "Embedding",
    "Evaluation",
    "FileExplanation",
    "FilePrediction",
    "ImagePrediction",
    "Predictor",
    "SimilarImage",
    "embed",
    "evaluate",
    "explain_run",
    "export_run",
    "predict",
    "similar",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
