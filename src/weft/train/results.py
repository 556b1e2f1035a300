"""Results of a run after its last epoch: confidence of the best model, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from weft import markup
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
from weft.inference.metrics import Evaluation, accuracy_lines
from weft.inference.report import write_report
from weft.intervals import Estimate, accuracy_text, grouped_text, interval_of
from weft.notebook import described
from weft.progress import clock, counting, say
from weft.text import printable
from weft.train.curves import curve_figures
from weft.train.folds import CrossValidation
from weft.train.mirrored_classes import MAX_IMAGES as MOST_MIRRORED
from weft.train.mirrored_classes import find_mirrored, mirrored_text
from weft.train.plan import Plan
from weft.train.run_loop import Session
from weft.train.unknown import fit_detector

MEASURES = {"top1": "top-1", "balanced": "balanced accuracy", "loss": "loss"}  # values of the setting `best`


@dataclass(frozen=True)
class RunResult:
    """Result of a run. Accuracies are those of the best epoch on the validation images, in percent.

    Attributes:
        out: the run directory.
        model: name of the network.
        data: the dataset.
        epochs: number of epochs that were run.
        best_epoch: epoch whose model is in best/, from 1.
        top1, top5: accuracy in percent.
        balanced_accuracy: mean recall of the classes in percent.
        macro_f1: mean F1 score of the classes in percent.
        loss: cross-entropy in nats.
        count: number of validation images.
        seconds: duration of training and evaluation.
        cross_validation: result over all folds; None without `folds`.
        notes: what top-1 hides: balanced accuracy where classes differ in size, classes that are never predicted, and
            classes that are mirror images of each other.
    """

    out: Path
    model: str
    data: str
    epochs: int
    best_epoch: int
    top1: float
    top5: float
    balanced_accuracy: float
    macro_f1: float
    loss: float
    count: int
    seconds: float
    cross_validation: CrossValidation | None = None
    notes: tuple[str, ...] = ()

    @property
    def interval(self) -> Estimate:
        """Top-1 accuracy in percent with its 95 % confidence interval."""
        return interval_of(self.top1, self.count)

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        more: dict[str, Any] = {"top1_interval": list(self.interval[1:]), "too_few_images": self.interval.is_wide}
        if self.cross_validation is not None:
            more["cross_validation"] = self.cross_validation.as_dict()
        own = {name: value for name, value in vars(self).items() if name != "cross_validation"}
        own["loss"] = self.loss if math.isfinite(self.loss) else None  # JSON has no nan
        return {**own, "out": str(self.out), **more}

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("model", repr(self.model)), ("data", repr(self.data)), ("top1", self.interval)]
        values += [("best_epoch", self.best_epoch), ("epochs", self.epochs), ("out", repr(str(self.out)))]
        return described("RunResult", values)

    def _repr_html_(self) -> str:
        rows = [
            ("model", self.model),
            ("data", self.data),
            ("top-1", accuracy_text(self.top1, self.count, "held-out images")),
            ("loss", f"{self.loss:.4f}"),
            ("best epoch", f"{self.best_epoch} of {self.epochs}"),
            ("training and evaluation", clock(self.seconds)),
        ]
        if self.cross_validation is not None:
            rows.append(("cross-validation", str(self.cross_validation)))
        rows += [("note", text) for text in self.notes]
        rows += [("best model", str(self.out / "best")), ("report", str(self.out / "report" / "report.html"))]
        return markup.fragment(markup.table(("training run", ""), rows))


def calibrated(plan: Plan, out: Path, best: Evaluation) -> tuple[Evaluation, bool]:
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


def mirrored_note(plan: Plan, out: Path) -> str:
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


def write_run_report(
    session: Session, best: Evaluation, result: RunResult, *, num_groups: int, is_fitted: bool, mirrored: str
) -> None:
    """Write the report of a run.

    Args:
        session: the run after its last epoch.
        best: evaluation of the best model.
        result: result of the run.
        num_groups: number of groups of the held-out images, 0 without groups.
        is_fitted: whether the temperature was fitted to all held-out images.
        mirrored: result of `mirrored_note`.
    """
    recipe, splits, runtime, out = session.recipe, session.splits, session.runtime, session.out
    params = sum(parameter.numel() for parameter in session.learner.model.parameters())
    excluded = f", {len(best.excluded)} excluded as unreadable" if best.excluded else ""
    model, _ = load_model_dir(out / "best")
    calibration = calibration_lines(model)
    for name, value in calibration:
        say(f"{name}: {value}")
    if grouped := grouped_text(best.count, num_groups):
        say(grouped)
    summary = [
        ("held-out images", f"{best.count}{excluded}"),
        ("best epoch", f"{result.best_epoch} of {result.epochs}, by {MEASURES[recipe.best]}"),
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
        curves=curve_figures(session.history, result.best_epoch),
        features=feature_map(model.to(runtime.device), splits.val, best, runtime, workers=recipe.workers),
        training=Training(counts.tolist(), session.history, result.best_epoch, mirrored),
        is_fitted=is_fitted,
    )


def _confidences(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return the largest probability of every row of logits (images classes)."""
    return softmax(logits.astype(np.float64) / temperature, axis=1).max(axis=1).astype(np.float32)
