"""End of a run: confidence of its best model, detector of unknown images, report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.checkpoints import load_model_dir
from weft.checkpoints.model_dir import write_confidence
from weft.data.formats import MAX_PIXELS
from weft.inference.calibration import calibrate, calibration_lines
from weft.inference.conclusions import Training
from weft.inference.error_gallery import explained_errors
from weft.inference.feature_map import drawn_of, feature_map
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches, measure
from weft.inference.metrics import class_lines
from weft.inference.predictor import Predictor
from weft.inference.probabilities import softmax
from weft.inference.report import write_report
from weft.inference.torch_model import TorchModel, infer
from weft.progress import Work, clock, say
from weft.report.pages import COLOURS, new_figure
from weft.runs.directory import CANDIDATES, EpochRow
from weft.text import printable
from weft.train.candidates import HEADER, read_candidates
from weft.train.held_out import HeldOutOutputs, read_held_out
from weft.train.mirrored_classes import find_mirrored, mirrored_text
from weft.train.plan import Plan
from weft.train.reporter import damaged_lines, mean_waiting, waiting_lines
from weft.train.result import RunResult
from weft.train.run import Run
from weft.train.series import pairs_of_series
from weft.train.unknown import fit_detector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = COLOURS[:2]
MEASURES = {"top1": "top-1", "balanced": "balanced accuracy", "loss": "loss"}  # values of the setting `best`


def finish(run: Run) -> RunResult:
    """Calibrate the best model of a run that has trained all its steps, and write the report in the first process."""
    evaluation, groups, best, damaged = run.evaluate_best(), run.splits.val_groups, run.best, run.damaged
    assert best is not None, "the last epoch is evaluated"
    if groups is not None:
        evaluation = dataclasses.replace(evaluation, groups=[groups[place] for place in evaluation.places])
    result = RunResult(
        out=run.out,
        model=str(run.recipe.model),
        data=str(run.recipe.data.source),
        epochs=run.epoch,
        best_epoch=best.epoch,
        seconds=run.seconds,
        evaluation=evaluation,
        notes=(*class_lines(evaluation), *waiting_lines(run.history), *damaged_lines(damaged)),
    )
    if run.runtime.is_main:
        result = _concluded(run, result, damaged)
    run.runtime.wait()
    return result


def _concluded(run: Run, result: RunResult, damaged: Sequence[str]) -> RunResult:
    """Calibrate the best model, fit its detector, write both and the report, and return the result with their notes."""
    plan, recipe, evaluation = run.plan, run.recipe, result.evaluation
    network: Any = load_model_dir(run.out / "best")[0].to(plan.runtime.device)
    max_pixels = recipe.data.max_pixels or MAX_PIXELS
    model = TorchModel(network, plan.splits.classes, runtime=plan.runtime)
    best = Predictor(model, max_pixels=max_pixels)
    held_out = read_held_out(plan, model)

    is_calibrated = bool(np.isfinite(held_out.logits).all())
    if is_calibrated:
        confidence = calibrate(held_out.logits, held_out.labels)
        best.temperature = confidence.temperature
        detector = fit_detector(plan, run.out, best, held_out)
        if detector is None and recipe.data.unknown_images is not None:
            say(
                f"Unknown images are not detected, and {printable(recipe.data.unknown_images)} is not used:"
                f" {type(network).__name__} has no linear classifier, or features that are not finite."
            )
        write_confidence(run.out / "best", confidence, detector)
        network.confidence, network.unknown = confidence, detector
        evaluation = dataclasses.replace(evaluation, confidence=_confidences(plan, model, best.temperature, held_out))

    pairs = find_mirrored(held_out.views, held_out.labels[held_out.is_inspected])
    mirrored = mirrored_text(pairs, plan.splits.classes)
    notes = (*result.notes, mirrored) if mirrored else result.notes
    result = dataclasses.replace(result, evaluation=evaluation, notes=notes)

    counts = np.bincount(plan.splits.train.labels, minlength=len(plan.splits.classes))
    drawn = drawn_of(len(held_out.places))
    write_report(
        run.out / "report",
        f"{result.model} on {result.data}",
        _summary(run, result, network, damaged),
        evaluation,
        errors=explained_errors(best, plan.splits.val, evaluation.mistakes),
        curves=curve_figures(run.history, result.best_epoch),
        series=pairs_of_series(plan),
        candidates=(HEADER, [one.cells() for one in read_candidates(run.out / CANDIDATES)]),
        features=feature_map(held_out.features[drawn], evaluation, held_out.places[drawn]),
        training=Training(counts.tolist(), run.history, result.best_epoch, mirrored),
        is_fitted=is_calibrated and len(held_out.places) == evaluation.count,
    )
    return result


def _confidences(plan: Plan, model: TorchModel, temperature: float, held_out: HeldOutOutputs) -> np.ndarray:
    """Return the calibrated probability of the predicted class of every held-out image."""
    source, classes = plan.splits.val, plan.splits.classes
    confidence = np.empty(len(source), np.float32)
    confidence[held_out.places] = softmax(held_out.logits, temperature).max(axis=1)
    others = np.setdiff1d(np.arange(len(source)), held_out.places)
    if len(others):
        part, batch_size = SourcePart(source, places=others.tolist()), plan.val_batches.order.batch_size
        batches = evaluation_batches(part, model.info, batch_size, plan.recipe.workers, device=plan.runtime.device)
        with Work("confidence", len(others)) as work:
            result = measure(
                lambda images: infer(model.network, images, plan.runtime),
                batches,
                classes,
                temperature=temperature,
                on_batch=work.advance,
            )
        confidence[others] = result.confidence
    return confidence


def _summary(run: Run, result: RunResult, network: Any, damaged: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (name, value) lines of the report; print those on calibration and groups."""
    splits, evaluation = run.splits, result.evaluation
    params = sum(parameter.numel() for parameter in run.learner.model.parameters())
    excluded = f", {len(evaluation.excluded)} excluded as unreadable" if evaluation.excluded else ""
    calibration = calibration_lines(network)
    for name, value in calibration:
        say(f"{name}: {value}")
    if grouped := evaluation.grouped:
        say(grouped)
    return [
        ("held-out images", f"{evaluation.count}{excluded}"),
        ("best epoch", f"{result.best_epoch} of {result.epochs}, by {MEASURES[run.recipe.best]}"),
        *evaluation.accuracies("held-out images"),
        *([("groups", grouped)] if grouped else []),
        *calibration,
        ("training images", f"{len(splits.train)}"),
        *(("damaged", line) for line in damaged_lines(damaged)),
        ("parameters", f"{params:,}"),
        ("training and evaluation", f"{clock(result.seconds)} on {run.runtime.device.type}"),
        ("waiting for images", f"{mean_waiting(run.history):.0f} % of the training time"),
        ("repeat with", f"weft train --config {run.out / 'recipe.yaml'} --out DIR"),
    ]


def curve_figures(history: Sequence[EpochRow], best_epoch: int) -> list[tuple[Figure, str]]:
    """Draw top-1 accuracy and loss of the training and validation sets by epoch, with the best epoch marked.

    Returns:
        Each figure with its alternative text.
    """
    best = next(row for row in history if row.epoch == best_epoch)
    accuracy, accuracy_axes = _figure(history, best, "top1")
    accuracy_axes.set(ylabel="top-1 accuracy (%)", title=f"best: epoch {best.epoch}, {best.val_top1:.2f} %")
    loss, loss_axes = _figure(history, best, "loss")
    loss_axes.set(ylabel="loss (cross-entropy, nats)", title=f"at the best epoch: {best.val_loss:.3f}")
    loss_axes.set_ylim(bottom=0)
    return [(accuracy, "Accuracy by epoch"), (loss, "Loss by epoch")]


def _figure(history: Sequence[EpochRow], best: EpochRow, measure: str) -> tuple[Figure, Axes]:
    """Draw `top1` or `loss` of both sets without the epochs that have no value, and mark the best epoch."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.8, 3.6)
    axes = figure.add_subplot()
    sets = (("train", "--o", BLUE, "training"), ("val", "-s", ORANGE, "held out"))
    for prefix, style, color, name in sets:
        points = [(row.epoch, getattr(row, f"{prefix}_{measure}")) for row in history]
        known = [point for point in points if not math.isnan(point[1])] or [(best.epoch, math.nan)]
        step = max(1, len(known) // 20)
        axes.plot(*zip(*known, strict=True), style, color=color, label=name, markersize=4, markevery=step)
    axes.axvline(best.epoch, color="0.5", linewidth=1, linestyle=":", zorder=1)
    value = getattr(best, f"val_{measure}")
    axes.plot(best.epoch, value, "o", color=ORANGE, markersize=11, markerfacecolor="none", label="best epoch")
    axes.margins(y=0.1)
    axes.set_xlim(history[0].epoch - 0.5, history[-1].epoch + 0.5)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize="small")
    return figure, axes
