"""End of a run: confidence of its best model, detector of unknown images, report."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
from scipy.special import softmax

from weft.checkpoints import load_model_dir
from weft.checkpoints.model_dir import write_confidence
from weft.data import Source
from weft.data.loader import ImageLoader
from weft.data.split import proportional_subset
from weft.errors import UsageError
from weft.inference.calibration import MAX_IMAGES, calibrate, calibration_lines, held_out_logits
from weft.inference.conclusions import Training
from weft.inference.error_gallery import explained_errors
from weft.inference.feature_map import feature_map
from weft.inference.inputs import SourcePart, evaluation_batches
from weft.inference.metrics import Evaluation, accuracy_lines, class_lines
from weft.inference.report import write_report
from weft.intervals import grouped_text
from weft.progress import clock, counting, say
from weft.text import printable
from weft.train.curves import curve_figures
from weft.train.mirrored_classes import MAX_IMAGES as MOST_MIRRORED
from weft.train.mirrored_classes import find_mirrored, mirrored_text
from weft.train.plan import Plan
from weft.train.result import RunResult
from weft.train.run import Run
from weft.train.unknown import fit_detector

MEASURES = {"top1": "top-1", "balanced": "balanced accuracy", "loss": "loss"}  # values of the setting `best`


def finish(run: Run) -> RunResult:
    """Calibrate the best model of a run that has trained all its steps, and write the report in the first process."""
    evaluation, best = run.evaluate_best(), run.best
    assert best is not None, "the last epoch is evaluated"
    is_fitted, mirrored = False, ""
    if run.runtime.is_main:
        evaluation, is_fitted = _calibrated(run.plan, run.out, evaluation)
        mirrored = _mirrored_note(run.plan, run.out)
    result = RunResult(
        out=run.out,
        model=str(run.recipe.model),
        data=str(run.recipe.data.source),
        epochs=run.epoch,
        best_epoch=best.epoch,
        seconds=run.seconds,
        evaluation=evaluation,
        notes=(*class_lines(evaluation), *filter(None, [mirrored])),
    )
    if run.runtime.is_main:
        _write_run_report(run, result, is_fitted=is_fitted, mirrored=mirrored)
    run.runtime.wait()
    return result


def _calibrated(plan: Plan, out: Path, best: Evaluation) -> tuple[Evaluation, bool]:
    """Measure the confidence of the best model of a run, and add it to its model directory.

    Args:
        plan: plan of the run.
        out: run directory.
        best: evaluation of the best model.

    Returns:
        The evaluation with calibrated probabilities, and whether the temperature was fitted to all held-out images;
        the evaluation unchanged if logits are not finite.
    """
    recipe, runtime, size = plan.recipe, plan.runtime, plan.val_batches.order.batch_size
    held_out = source = plan.splits.val
    model, _ = load_model_dir(out / "best")
    model = model.to(runtime.device)
    if len(source) > MAX_IMAGES:
        source = SourcePart(source, proportional_subset(source.keys, MAX_IMAGES, recipe.seed))

    def batches(source: Source) -> ImageLoader:
        return evaluation_batches(source, model, size, recipe.workers)

    logits, labels = held_out_logits(model, batches(source), runtime)
    if not np.isfinite(logits).all():
        return best, False
    confidence = calibrate(logits, labels)
    detector = fit_detector(model, plan.splits.train, source, recipe, size, confidence, runtime, out)
    if detector is None and recipe.data.other is not None:
        say(
            f"Unknown images are not detected, and {printable(recipe.data.other)} is not used: {type(model).__name__}"
            " has no linear classifier, or features that are not finite."
        )
    write_confidence(out / "best", confidence, detector)
    sure = _confidences(logits, confidence.temperature)
    if source is not held_out:
        with counting(len(held_out), task_name="calibrating") as advance:
            parts = []  # one batch at a time: the logits of all images may not fit into memory
            for batch in batches(held_out):
                parts.append(_confidences(held_out_logits(model, [batch], runtime)[0], confidence.temperature))
                advance(len(batch[1]))
        sure = np.concatenate(parts)
    return dataclasses.replace(best, confidence=sure), source is held_out


def _mirrored_note(plan: Plan, out: Path) -> str:
    """Return a sentence on classes that are mirror images of each other, if training mirrored images; else nothing.

    Args:
        plan: plan of the run.
        out: run directory, whose best model is used.
    """
    recipe, source = plan.recipe, plan.splits.val
    if not recipe.augment.hflip:
        return ""
    if len(source) > MOST_MIRRORED:
        source = SourcePart(source, proportional_subset(source.keys, MOST_MIRRORED, recipe.seed))
    model, size = load_model_dir(out / "best")[0].to(plan.runtime.device), plan.val_batches.order.batch_size
    batches = evaluation_batches(source, model, size, recipe.workers)
    with contextlib.suppress(UsageError):  # a network without a linear classifier has no features
        return mirrored_text(find_mirrored(model, batches, plan.runtime), plan.splits.classes)
    return ""


def _write_run_report(run: Run, result: RunResult, *, is_fitted: bool, mirrored: str) -> None:
    """Write the report of a run; `is_fitted` says whether the temperature was fitted to all held-out images."""
    splits, runtime, out, best = run.splits, run.runtime, run.out, result.evaluation
    params = sum(parameter.numel() for parameter in run.learner.model.parameters())
    excluded = f", {len(best.excluded)} excluded as unreadable" if best.excluded else ""
    model, _ = load_model_dir(out / "best")
    calibration = calibration_lines(model)
    for name, value in calibration:
        say(f"{name}: {value}")
    if grouped := grouped_text(best.count, len(set(splits.val_groups or ()))):
        say(grouped)
    summary = [
        ("held-out images", f"{best.count}{excluded}"),
        ("best epoch", f"{result.best_epoch} of {result.epochs}, by {MEASURES[run.recipe.best]}"),
        *accuracy_lines(best, "held-out images"),
        *([("groups", grouped)] if grouped else []),
        *calibration,
        ("training images", f"{len(splits.train)}"),
        ("parameters", f"{params:,}"),
        ("training and evaluation", f"{clock(result.seconds)} on {runtime.device.type}"),
        ("repeat with", f"weft train --config {out / 'recipe.yaml'} --out DIR"),
    ]
    counts = np.bincount(splits.train.labels, minlength=len(splits.classes))
    write_report(
        out / "report",
        f"{result.model} on {result.data}",
        summary,
        best,
        errors=explained_errors(model, splits.val, best.mistakes),
        curves=curve_figures(run.history, result.best_epoch),
        features=feature_map(model.to(runtime.device), splits.val, best, runtime, workers=run.recipe.workers),
        training=Training(counts.tolist(), run.history, result.best_epoch, mirrored),
        is_fitted=is_fitted,
    )


def _confidences(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return the largest probability of every row of logits (images classes)."""
    return softmax(logits.astype(np.float64) / temperature, axis=1).max(axis=1).astype(np.float32)
