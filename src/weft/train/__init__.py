"""Training, evaluation and prediction: the verbs and argument names of the command line. Lazy, for torch's sake."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.train.apply import Answer as Answer
    from weft.train.apply import evaluate as evaluate
    from weft.train.apply import predict as predict
    from weft.train.metrics import Evaluation as Evaluation
    from weft.train.run import RunResult as RunResult
    from weft.train.run import find_lr as find_lr
    from weft.train.run import train as train

_HOMES = {
    "Answer": "apply",
    "Evaluation": "metrics",
    "RunResult": "run",
    "evaluate": "apply",
    "find_lr": "run",
    "predict": "apply",
    "train": "run",
}

__all__ = ["Answer", "Evaluation", "RunResult", "evaluate", "find_lr", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.train' has no attribute '{name}'; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"weft.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
