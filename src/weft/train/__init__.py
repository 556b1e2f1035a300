"""Train networks, with the names and arguments of the command line.

`evaluate`, `predict`, `Evaluation` and `push` are in `weft.inference` and `weft.runs`; they stay available here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.inference.evaluation import evaluate as evaluate
    from weft.inference.metrics import Evaluation as Evaluation
    from weft.inference.prediction import FilePrediction as Answer
    from weft.inference.prediction import predict as predict
    from weft.runs.hub import push as push
    from weft.train.active import Labelling as Labelling
    from weft.train.active import LabelProposal as LabelProposal
    from weft.train.active import label as label
    from weft.train.corrections import apply_changes as apply_changes
    from weft.train.data_review import Finding as Finding
    from weft.train.data_review import Review as Review
    from weft.train.data_review import review as review
    from weft.train.results import RunResult as RunResult
    from weft.train.run import find_lr as find_lr
    from weft.train.run import preview as preview
    from weft.train.run import train as train

_HOMES = {
    "Answer": "weft.inference.prediction:FilePrediction",
    "Evaluation": "weft.inference.metrics",
    "Finding": "weft.train.data_review",
    "LabelProposal": "weft.train.active",
    "Labelling": "weft.train.active",
    "Review": "weft.train.data_review",
    "RunResult": "weft.train.results",
    "apply_changes": "weft.train.corrections",
    "evaluate": "weft.inference.evaluation",
    "find_lr": "weft.train.run",
    "label": "weft.train.active",
    "predict": "weft.inference.prediction",
    "preview": "weft.train.run",
    "push": "weft.runs.hub",
    "review": "weft.train.data_review",
    "train": "weft.train.run",
}

__all__ = [
    "Answer",
    "Evaluation",
    "Finding",
    "LabelProposal",
    "Labelling",
    "Review",
    "RunResult",
    "apply_changes",
    "evaluate",
    "find_lr",
    "label",
    "predict",
    "preview",
    "push",
    "review",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
