"""Studies of the papers and comparisons of models. Public names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.study.comparison import compare as compare
    from weft.study.plan import Study as Study
    from weft.study.plan import load_study as load_study
    from weft.study.plan import study_names as study_names
    from weft.study.result import Comparison as Comparison
    from weft.study.result import StudyResult as StudyResult
    from weft.study.run import run_study as run_study

__getattr__, __dir__, __all__ = attach(__name__, __file__)
