"""Studies: the papers' experiments as lists of runs, and which model to take. Lazy, for torch's sake."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.study.comparing import compare as compare
    from weft.study.outcome import Comparison as Comparison
    from weft.study.plan import Study as Study
    from weft.study.plan import load_study as load_study
    from weft.study.plan import study_names as study_names
    from weft.study.run import StudyResult as StudyResult
    from weft.study.run import run_study as run_study

_HOMES = {
    "Comparison": "outcome",
    "Study": "plan",
    "StudyResult": "run",
    "compare": "comparing",
    "load_study": "plan",
    "run_study": "run",
    "study_names": "plan",
}

__all__ = ["Comparison", "Study", "StudyResult", "compare", "load_study", "run_study", "study_names"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.study' has no attribute '{name}'; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"weft.study.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
