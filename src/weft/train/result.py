"""Result of a training run, and of a cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.inference.metrics import Evaluation
from weft.progress import clock
from weft.report import markup
from weft.report.intervals import Estimate
from weft.report.notebook import described

NUMBERS = ("top1", "top5", "balanced_accuracy", "macro_f1", "loss", "count")


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
        accuracy = self.evaluation.text()
        last = max(self.by_epoch, default=0)
        rest = f"; at the last epoch of each {self.by_epoch[last]:.2f} %" if last > 0 else ""
        folds = f"single folds {min(tops):.1f} to {max(tops):.1f} %"
        return f"{len(tops)}-fold cross-validation: top-1 {accuracy}; {folds}{rest}"


@dataclass(frozen=True)
class RunResult:
    """Result of a run. Its accuracies are those of the best epoch on the validation images.

    Attributes:
        out: the run directory.
        model: name of the network.
        data: the dataset.
        epochs: number of epochs that were run.
        best_epoch: epoch whose model is in best/, from 1; 0 for the model before training.
        seconds: duration of training and evaluation.
        evaluation: of the best epoch.
        cross_validation: result over all folds; None without `folds`.
        notes: what top-1 hides: balanced accuracy where classes differ in size, classes that are never predicted, and
            classes that are mirror images of each other.
    """

    out: Path
    model: str
    data: str
    epochs: int
    best_epoch: int
    seconds: float
    evaluation: Evaluation
    cross_validation: CrossValidation | None = None
    notes: tuple[str, ...] = ()

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return self.evaluation.top1

    @property
    def top5(self) -> float:
        """Top-5 accuracy in percent."""
        return self.evaluation.top5

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes in percent."""
        return self.evaluation.balanced_accuracy

    @property
    def macro_f1(self) -> float:
        """Mean F1 score of the classes in percent."""
        return self.evaluation.macro_f1

    @property
    def loss(self) -> float:
        """Cross-entropy in nats."""
        return self.evaluation.loss

    @property
    def count(self) -> int:
        """Number of validation images."""
        return self.evaluation.count

    @property
    def interval(self) -> Estimate:
        """Top-1 accuracy in percent with its 95 % confidence interval."""
        return self.evaluation.interval

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        names = ("model", "data", "epochs", "best_epoch", *NUMBERS, "seconds", "notes")
        values = {name: getattr(self, name) for name in names}
        values["loss"] = self.loss if math.isfinite(self.loss) else None  # JSON has no nan
        values |= {"top1_interval": list(self.interval[1:]), "too_few_images": self.interval.is_wide}
        if self.cross_validation is not None:
            values["cross_validation"] = self.cross_validation.as_dict()
        return {"out": str(self.out), **values}

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("model", repr(self.model)), ("data", repr(self.data)), ("top1", self.interval)]
        values += [("best_epoch", self.best_epoch), ("epochs", self.epochs), ("out", repr(str(self.out)))]
        return described("RunResult", values)

    def _repr_html_(self) -> str:
        rows = [
            ("model", self.model),
            ("data", self.data),
            ("top-1", self.evaluation.text("held-out images")),
            ("loss", f"{self.loss:.4f}"),
            ("best epoch", f"{self.best_epoch} of {self.epochs}"),
            ("training and evaluation", clock(self.seconds)),
        ]
        if self.cross_validation is not None:
            rows.append(("cross-validation", str(self.cross_validation)))
        rows += [("note", text) for text in self.notes]
        rows += [("best model", str(self.out / "best")), ("report", str(self.out / "report" / "report.html"))]
        return markup.fragment(markup.table(("training run", ""), rows))
