"""Cross-validation of a recipe: a run per fold, and one evaluation over the held-out images of all folds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.files import write_text
from weft.inference.metrics import Evaluation, accuracy_lines, pooled
from weft.inference.report import write_report
from weft.intervals import Estimate, accuracy_text
from weft.progress import say
from weft.recipes import Recipe
from weft.runs.directory import CROSS_VALIDATION, FOLDS, read_metrics
from weft.text import count


@dataclass(frozen=True)
class CrossValidation:
    """Result of a cross-validation.

    Attributes:
        folds: evaluation of each fold by the model that was trained without it.
        evaluation: the same results as one evaluation; every image counts once.
        by_epoch: top-1 accuracy in percent over all folds after each epoch that all folds were evaluated at. `folds`
            has the best epoch of each fold, which the images of the fold have chosen; one epoch for all folds, and
            more so the last, favours the model less.
    """

    folds: Sequence[Evaluation]
    evaluation: Evaluation
    by_epoch: dict[int, float]

    @property
    def interval(self) -> Estimate:
        """Top-1 accuracy over all folds in percent with its 95 % confidence interval."""
        return self.evaluation.interval

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        folds = [{"n": fold.count, "top1": fold.top1, "top1_interval": list(fold.interval[1:])} for fold in self.folds]
        by_epoch = [{"epoch": epoch, "top1": top1} for epoch, top1 in self.by_epoch.items()]
        return {"folds": folds, "by_epoch": by_epoch, **self.evaluation.as_dict()}

    def __str__(self) -> str:
        tops = [fold.top1 for fold in self.folds]
        accuracy = accuracy_text(self.evaluation.top1, self.evaluation.count)
        last = max(self.by_epoch, default=0)
        rest = f"; at the last epoch of each {self.by_epoch[last]:.2f} %" if last > 0 else ""
        folds = f"single folds {min(tops):.1f} to {max(tops):.1f} %"
        return f"{len(tops)}-fold cross-validation: top-1 {accuracy}; {folds}{rest}"


def fold_folder(out: Path, fold: int) -> Path:
    """Return the run directory of a fold; that of the first is the run itself."""
    return out if fold == 1 else out / FOLDS / str(fold)


def cross_validate(
    recipe: Recipe, out: Path, first: Evaluation, run_fold: Callable[[Recipe, Path], Evaluation]
) -> CrossValidation:
    """Run all folds but the first, which is the run itself.

    Args:
        recipe: of the run, with every decision made.
        out: the run directory.
        first: evaluation of the first fold.
        run_fold: function from the recipe and the run directory of a fold to its evaluation; it starts or resumes it.
    """
    assert recipe.data.folds is not None
    evaluations = [first]
    for fold in range(2, recipe.data.folds + 1):
        say(f"Fold {fold} of {recipe.data.folds}.")
        data = dataclasses.replace(recipe.data, fold=fold)
        evaluations.append(run_fold(dataclasses.replace(recipe, data=data, name=None), fold_folder(out, fold)))
    histories = [
        {row.epoch: row.val_top1 for row in read_metrics(fold_folder(out, fold) / "metrics.csv")}
        for fold in range(1, len(evaluations) + 1)
    ]
    return CrossValidation(evaluations, pooled(evaluations), _by_epoch(histories, [one.count for one in evaluations]))


def _by_epoch(histories: Sequence[Mapping[int, float]], counts: Sequence[int]) -> dict[int, float]:
    """Return the mean accuracy over the images of all folds, by epoch; epochs without an evaluation are left out."""
    common = sorted(set.intersection(*(set(history) for history in histories)))
    means = {
        epoch: sum(count * history[epoch] for count, history in zip(counts, histories, strict=True)) / sum(counts)
        for epoch in common
    }
    return {epoch: mean for epoch, mean in means.items() if not math.isnan(mean)}


def write_cross_validation(out: Path, result: CrossValidation, model: str, data: str, grouped: str = "") -> None:
    """Write `cross_validation.json` and a report into a run directory.

    Args:
        out: the run directory.
        result: of the cross-validation.
        model, data: names of the model and of the dataset.
        grouped: result of `grouped_text`.
    """
    evaluation = result.evaluation
    write_text(out / CROSS_VALIDATION, json.dumps({"model": model, "data": data, **result.as_dict()}, indent=2) + "\n")
    summary = [("folds", f"{len(result.folds)}; {count(evaluation.count, 'image')} held out, each once")]
    summary += accuracy_lines(evaluation)
    if len(result.by_epoch) > 1:
        last = max(result.by_epoch)
        summary.append(
            ("last epoch of each fold", f"{result.by_epoch[last]:.2f} %; above, each fold has its best epoch")
        )
    summary += [(f"fold {number}", str(fold.interval)) for number, fold in enumerate(result.folds, 1)]
    summary += [("groups", grouped)] if grouped else []
    write_report(out / FOLDS / "report", f"Cross-validation of {model} on {data}", summary, evaluation, is_fitted=True)
