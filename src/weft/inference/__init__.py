"""Run trained models: predict, evaluate, explain, export, embed; with the names and arguments of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

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
    from weft.inference.opening import open_model as open_model
    from weft.inference.prediction import predict as predict
    from weft.inference.prediction_files import FilePrediction as FilePrediction
    from weft.inference.predictor import ImagePrediction as ImagePrediction
    from weft.inference.predictor import Predictor as Predictor
    from weft.inference.run_info import RunInfo as RunInfo
    from weft.inference.run_info import info as info
    from weft.inference.torch_model import TorchModel as TorchModel

__getattr__, __dir__, __all__ = attach(__name__, __file__)
