"""Cross-validation of a recipe: a run per fold, and one evaluation over the held-out images of all folds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.files import write_file
from weft.inference.inputs import series_of
from weft.inference.metrics import pooled
from weft.inference.report import write_report
from weft.progress import quietly, say
from weft.recipes import Recipe
from weft.runs.directory import CROSS_VALIDATION, FOLDS, read_metrics, reserved
from weft.text import count
from weft.train import begin
from weft.train.finish import finish
from weft.train.plan import Plan, open_splits
from weft.train.result import CrossValidation, RunResult
from weft.train.resume import open_state
from weft.train.run import Run
from weft.train.state import newest_step


def cross_validate(run: Run, first: RunResult) -> RunResult:
    """Run the folds after the first, which is `run`, write a report over all, and return its result with theirs."""
    recipe, runtime = run.recipe, run.runtime
    assert recipe.data.folds is not None
    evaluations = [first.evaluation]
    folders = [run.out, *(run.out / FOLDS / str(fold) for fold in range(2, recipe.data.folds + 1))]
    for fold, folder in enumerate(folders[1:], 2):
        say(f"Fold {fold} of {recipe.data.folds}.")
        data = dataclasses.replace(recipe.data, fold=fold)
        other = _trained(run, dataclasses.replace(recipe, data=data, name=None), folder)
        evaluations.append(finish(other).evaluation)
    histories = [{row.epoch: row.val_top1 for row in read_metrics(folder / "metrics.csv")} for folder in folders]
    pool = pooled(evaluations)
    folds = CrossValidation(evaluations, pool, _by_epoch(histories, [one.count for one in evaluations]))
    if runtime.is_main:
        if grouped := pool.grouped:
            say(grouped)
        _write(run.out, folds, first)
    runtime.wait()
    return dataclasses.replace(first, cross_validation=folds)


def _trained(run: Run, recipe: Recipe, folder: Path) -> Run:
    """Start or resume the run of a fold, and return it when it has trained all its steps."""
    is_started = run.runtime.max([float(newest_step(folder / "state") is not None)])[0]
    saved = open_state(folder, recipe, override=True) if is_started else None
    series = series_of(run.out)
    with quietly():
        splits = open_splits(recipe, series)
        plan = Plan(recipe, splits, run.runtime, loads_weights=saved is None, series=series)
    if saved is not None:
        return begin.resume(plan, saved, run.stop, whole=run.whole)
    with reserved(folder, force=True) if run.runtime.is_main else contextlib.nullcontext():
        return begin.start(plan, folder, run.stop, whole=run.whole, force=True)


def _by_epoch(histories: Sequence[Mapping[int, float]], counts: Sequence[int]) -> dict[int, float]:
    """Return the mean accuracy over the images of all folds, by epoch; epochs without an evaluation are left out."""
    common = sorted(set.intersection(*(set(history) for history in histories)))
    means = {
        epoch: sum(count * history[epoch] for count, history in zip(counts, histories, strict=True)) / sum(counts)
        for epoch in common
    }
    return {epoch: mean for epoch, mean in means.items() if not math.isnan(mean)}


def _write(out: Path, result: CrossValidation, run: RunResult) -> None:
    """Write `cross_validation.json` and a report into a run directory."""
    evaluation = result.evaluation
    write_file(
        out / CROSS_VALIDATION, json.dumps({"model": run.model, "data": run.data, **result.as_dict()}, indent=2) + "\n"
    )
    summary = [("folds", f"{len(result.folds)}; {count(evaluation.count, 'image')} held out, each once")]
    summary += evaluation.accuracies()
    if len(result.by_epoch) > 1:
        last = max(result.by_epoch)
        summary.append(
            ("last epoch of each fold", f"{result.by_epoch[last]:.2f} %; above, each fold has its best epoch")
        )
    summary += [(f"fold {number}", str(fold.interval)) for number, fold in enumerate(result.folds, 1)]
    summary += [("groups", evaluation.grouped)] if evaluation.grouped else []
    write_report(
        out / FOLDS / "report", f"Cross-validation of {run.model} on {run.data}", summary, evaluation, is_fitted=True
    )
