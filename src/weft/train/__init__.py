"""Train networks, with the names and arguments of the command line.

`evaluate`, `predict`, `Evaluation` and `push` are in `weft.inference` and `weft.runs`; they stay available here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.inference.evaluation import evaluate as evaluate
    from weft.inference.metrics import Evaluation as Evaluation
    from weft.inference.prediction import predict as predict
    from weft.inference.prediction_files import FilePrediction as Answer  # noqa: F401
    from weft.runs.hub import push as push
    from weft.train.data_review import review as review
    from weft.train.estimate import Loading as Loading
    from weft.train.estimate import PlannedRun as PlannedRun
    from weft.train.labelling import Labelling as Labelling
    from weft.train.labelling import LabelProposal as LabelProposal
    from weft.train.labelling import label as label
    from weft.train.result import RunResult as RunResult
    from weft.train.review_result import Finding as Finding
    from weft.train.review_result import Review as Review
    from weft.train.start import find_lr as find_lr
    from weft.train.start import find_series as find_series
    from weft.train.start import loading_speed as loading_speed
    from weft.train.start import planned_run as planned_run
    from weft.train.start import preview as preview
    from weft.train.start import train as train

__getattr__, __dir__, __all__ = attach(__name__, __file__)
