"""Train, evaluate and predict, with the names and arguments of the command line. Imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.train.apply import Answer as Answer
    from weft.train.apply import evaluate as evaluate
    from weft.train.apply import predict as predict
    from weft.train.beforehand import find_lr as find_lr
    from weft.train.beforehand import preview as preview
    from weft.train.metrics import Evaluation as Evaluation
    from weft.train.run import RunResult as RunResult
    from weft.train.run import train as train
    from weft.train.sharing import push as push

_HOMES = {
    "Answer": "weft.train.apply",
    "Evaluation": "weft.train.metrics",
    "RunResult": "weft.train.run",
    "evaluate": "weft.train.apply",
    "find_lr": "weft.train.beforehand",
    "predict": "weft.train.apply",
    "preview": "weft.train.beforehand",
    "push": "weft.train.sharing",
    "train": "weft.train.run",
}

__all__ = ["Answer", "Evaluation", "RunResult", "evaluate", "find_lr", "predict", "preview", "push", "train"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
