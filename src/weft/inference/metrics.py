"""Evaluation metrics: accuracy, per class, confusion matrix, calibration, most confident errors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from weft.checkpoints.unknown import Threshold
from weft.inference.real_labels import RealScore
from weft.inference.scores import (
    BINS,
    Bin,
    ClassCounts,
    ClassScore,
    Confident,
    Mistake,
    bins_of,
    calibration_error,
    confused_pairs,
    mean_of,
    percent_text,
)
from weft.report import markup
from weft.report.intervals import Estimate, accuracy_in_groups, accuracy_of, accuracy_text, grouped_text, too_few_text
from weft.report.notebook import described
from weft.text import count, first_few

MOST_MISTAKES = 20
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
BALANCED = "balanced accuracy"
MAX_CLASSES = 20  # in the tables of a notebook
MAX_MATRIX = 100  # classes; results of more have the pairs of confused classes instead of a confusion matrix


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of a model over labelled images, a value per image; all numbers follow from these columns.

    Unreadable images are listed in `excluded` and count in no number.

    Attributes:
        classes: names of the classes that are compared, in the order of the model's outputs.
        keys: (images) names of the images.
        places: (images) index of each image in its source.
        true: (images) class indices.
        predicted: (images) class indices.
        confidence: (images) probability of the predicted class.
        rank: (images) place of the true class by probability, from 0; equal ones in the order of the classes.
        losses: (images) cross-entropy in nats; nan if an output is not finite.
        excluded: (name, reason) of unreadable images.
        num_outputs, top1_of_all: number of classes of the model, and percent of the images whose most probable class
            among all of them is the true one; None if all classes of the model are compared.
        real: accuracy by ReaL labels, if given.
        threshold: smallest confidence of the images that are not rejected, if given.
        unknown: how well images that show none of the classes are detected, if given.
        groups: (images) group of each image, if they are in groups: intervals are then those of the groups.
    """

    classes: list[str]
    keys: list[str]
    places: np.ndarray
    true: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    rank: np.ndarray
    losses: np.ndarray
    excluded: list[tuple[str, str]] = field(default_factory=list)
    num_outputs: int | None = None
    top1_of_all: float | None = None
    real: RealScore | None = None
    threshold: float | None = None
    unknown: Threshold | None = None
    groups: list[str] | None = None

    @property
    def count(self) -> int:
        """Number of evaluated images."""
        return len(self.keys)

    @property
    def is_correct(self) -> np.ndarray:
        """Whether each prediction is correct."""
        return self.true == self.predicted

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return float(self.losses.sum()) / self.count

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * float(self.is_correct.mean())

    @property
    def top5(self) -> float:
        """Top-5 accuracy in percent; 100 with five classes or fewer."""
        return 100 * float((self.rank < 5).mean())

    @cached_property
    def confusion(self) -> np.ndarray:
        """Counts (class, class): rows are true classes, columns predicted ones; for many classes, use `confused`."""
        confusion = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(confusion, (self.true, self.predicted), 1)
        return confusion

    @cached_property
    def class_counts(self) -> ClassCounts:
        """Number of images, predictions and correct predictions of each class."""
        columns = self.true, self.predicted, self.true[self.is_correct]
        return ClassCounts(*(np.bincount(column, minlength=len(self.classes)) for column in columns))

    @cached_property
    def confused(self) -> np.ndarray:
        """Pairs of confused classes (pairs 3): true class, predicted class, number of images; as `confused_pairs`."""
        return confused_pairs(self.true, self.predicted, len(self.classes))

    @cached_property
    def per_class(self) -> list[ClassScore]:
        """Scores of each class."""
        columns = (column.tolist() for column in self.class_counts)
        return [
            ClassScore(
                name,
                images,
                100 * correct / predicted if images and predicted else None,
                100 * correct / images if images else None,
                200 * correct / (images + predicted) if images else None,
            )
            for name, images, predicted, correct in zip(self.classes, *columns, strict=True)
        ]

    def weakest(self, most: int) -> list[int]:
        """Return the indices of the `most` classes with the lowest recall, lowest first; of equal ones, larger classes
        first, and classes without images last."""
        images, _, correct = self.class_counts
        recall = np.divide(correct, images, out=np.full(len(images), np.inf), where=images > 0)
        return np.lexsort((-images, recall))[:most].tolist()

    @property
    def mistakes(self) -> list[Mistake]:
        """The most confident errors, most confident first."""
        sure, wrong = self.confidence, np.flatnonzero(~self.is_correct)
        return [
            Mistake(
                self.keys[i],
                self.classes[self.true[i]],
                self.classes[self.predicted[i]],
                float(sure[i]),
                int(self.places[i]),
            )
            for i in heapq.nlargest(MOST_MISTAKES, wrong, key=lambda i: (sure[i], -i))
        ]

    @property
    def interval(self) -> Estimate:
        """Top-1 accuracy in percent with its 95 % confidence interval."""
        return self._estimate(self.is_correct)

    def _estimate(self, right: np.ndarray) -> Estimate:
        """Estimate an accuracy in percent, by groups if the images are in groups."""
        if self.groups is not None:
            return accuracy_in_groups(right, self.groups)
        return accuracy_of(int(right.sum()), self.count)

    @property
    def grouped(self) -> str:
        """A note if the images are in groups; else an empty text."""
        return grouped_text(self.count, len(set(self.groups or ())))

    @property
    def too_few(self) -> str:
        """A warning if the images or their groups are too few for a conclusion; else an empty text."""
        return too_few_text(self.interval, self.count, len(set(self.groups or ())))

    def text(self, images: str = "images") -> str:
        """Return the top-1 accuracy with its interval: `accuracy_text`."""
        return accuracy_text(self.top1, self.count, images, self.interval)

    @property
    def calibration(self) -> list[Bin]:
        """Reliability diagram: confidence and accuracy in bins of equal width, without empty bins."""
        edges, bins = np.linspace(0, 1, BINS + 1).tolist(), bins_of(self.confidence)
        rows = []
        for i in np.unique(bins):
            here = bins == i
            sure, right = float(self.confidence[here].mean()), float(self.is_correct[here].mean())
            rows.append(Bin(edges[i], edges[i + 1], int(here.sum()), sure, right))
        return rows

    @property
    def ece(self) -> float:
        """Expected calibration error in percentage points: mean distance of confidence and accuracy over the images."""
        return calibration_error(self.confidence, self.is_correct)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes with images (macro average), in percent: every class counts the same."""
        return mean_of(score.recall for score in self.per_class)

    @property
    def never_predicted(self) -> list[str]:
        """Classes with images that the model predicts for no image."""
        images, predicted, _ = self.class_counts
        return [self.classes[i] for i in np.flatnonzero((images > 0) & (predicted == 0))]

    @property
    def macro_f1(self) -> float:
        """Mean F1 score of the classes with images, in percent."""
        return mean_of(score.f1 for score in self.per_class)

    @property
    def coverage(self) -> dict[float, Confident]:
        """Accuracy of the most confident predictions, for each share of the images in COVERAGES."""
        order = np.argsort(-self.confidence, kind="stable")
        return {share: self._confident(order[: max(round(share * self.count), 1)]) for share in COVERAGES}

    @property
    def aurc(self) -> float:
        """Area under the risk-coverage curve in percent: mean error over all numbers of accepted images."""
        errors = np.cumsum(~self.is_correct[np.argsort(-self.confidence, kind="stable")])
        return 100 * float((errors / np.arange(1, self.count + 1)).mean())

    @property
    def accepted(self) -> Confident | None:
        """The images whose predicted class has at least the probability `threshold`."""
        return None if self.threshold is None else self._confident(self.confidence >= self.threshold)

    def _confident(self, images: np.ndarray) -> Confident:
        is_correct = self.is_correct[images]
        return Confident(len(is_correct), 100 * float(is_correct.mean()) if len(is_correct) else None)

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints.

        Of up to 100 classes, `confusion` is the confusion matrix: a list per true class with the number of images by
        predicted class. Of more classes, `confused` lists the pairs of confused classes instead: [true class, predicted
        class, images], most images first. Both number the classes from 0 in the order of `classes`.
        """
        has_matrix = len(self.classes) <= MAX_MATRIX
        return {
            "n": self.count,
            "excluded": [{"image": key, "reason": reason} for key, reason in self.excluded],
            "top1": self.top1,
            "top1_interval": list(self.interval[1:]),
            "too_few_images": self.interval.is_wide,
            "top5": self.top5,
            "top5_interval": list(self._estimate(self.rank < 5)[1:]),
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "never_predicted": self.never_predicted,
            "loss": self.loss,
            "ece": self.ece,
            "calibration": [row._asdict() for row in self.calibration],
            "coverage": [{"coverage": share, **row._asdict()} for share, row in self.coverage.items()],
            "aurc": self.aurc,
            "classes": [score._asdict() for score in self.per_class],
            **({"confusion": self.confusion.tolist()} if has_matrix else {"confused": self.confused.tolist()}),
            "mistakes": [mistake._asdict() for mistake in self.mistakes],
            **self._of_options(),
        }

    def _of_options(self) -> dict[str, Any]:
        """Return the entries of `as_dict` that only some evaluations have."""
        entries: dict[str, Any] = {}
        if self.real is not None:
            entries["real"] = self.real._asdict()
        if self.accepted is not None:
            entries["accepted"] = {"threshold": self.threshold, **self.accepted._asdict()}
        if self.num_outputs is not None:
            entries["all_classes"] = {"classes": self.num_outputs, "top1": self.top1_of_all}
        if self.unknown is not None:
            entries["unknown"] = {
                "auroc": self.unknown.auroc,
                "known": self.unknown.count,
                "known_unknown": self.unknown.unknown,
                "other": self.unknown.other_count,
                "other_unknown": self.unknown.other_unknown,
            }
        return entries

    def accuracies(self, images: str = "images") -> list[tuple[str, str]]:
        """Return (name, value) lines of the accuracies, each with its number of images and its interval.

        Top-5 needs at least six classes: with five it is always 100 %. The balanced accuracy and the mean F1 score are
        left out where every class has the same number of images, since the former is then the accuracy. If only some of
        the model's classes are compared, the names of the lines say so.
        """
        among = f" among the {len(self.classes):,} classes of the data" if self.num_outputs else ""
        lines = [(f"top-1{among}", self.text(images))]
        if len(self.classes) > 5:
            text = accuracy_text(self.top5, self.count, images, self._estimate(self.rank < 5))
            lines.append((f"top-5{among}", text))
        if self.top1_of_all is not None:
            name = f"top-1 among all {self.num_outputs:,} classes of the model"
            lines.append((name, accuracy_text(self.top1_of_all, self.count, images)))
        if len(set(self.class_counts.images.tolist())) > 1:
            lines.append((BALANCED, f"{self.balanced_accuracy:.2f} % (mean recall of the classes)"))
            lines.append(("macro F1", f"{self.macro_f1:.2f} % (mean F1 score of the classes)"))
        return lines

    def summary(self) -> list[tuple[str, str]]:
        """Return (name, value) lines of all that was measured: accuracies, loss, confidence, unknown images."""
        lines = self.accuracies() + ([("groups", self.grouped)] if self.grouped else [])
        if self.real is not None:
            text = accuracy_text(self.real.top1, self.real.images, "images with a ReaL label")
            lines.append(("ReaL top-1", f"{text}; {self.real.unlabelled:,} without one"))
        rows = [(100 * share, self.coverage[share].top1) for share in (0.9, 0.7)]
        most = "; ".join(f"{top1:.2f} % of the most confident {share:.0f} %" for share, top1 in rows)
        lines += [("loss", f"{self.loss:.4f}"), ("expected calibration error", f"{self.ece:.1f} points")]
        lines.append(("top-1 by confidence", most))
        if self.accepted is not None:
            number, top1 = self.accepted
            accuracy = "" if top1 is None else f"; top-1 {accuracy_text(top1, number, 'accepted images')}"
            share = 100 * number / max(self.count, 1)
            text = f"{number:,} of {self.count:,} images ({share:.1f} %), from {self.threshold:.3f}{accuracy}"
            lines.append(("accepted", text))
        if self.unknown is not None:
            lines.append(("images of no class", str(self.unknown)))
        return lines

    def warnings(self) -> list[str]:
        """Return sentences on what the accuracy hides: classes that are never predicted, and too few images."""
        return [*filter(None, (never_predicted_text(self), self.too_few))]

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("count", self.count), ("classes", len(self.classes)), ("top1", self.interval)]
        return described("Evaluation", [*values, ("loss", f"{self.loss:.4f}"), ("excluded", len(self.excluded))])

    def _repr_html_(self) -> str:
        """Return tables: accuracy, scores of each class, and with few classes the confusion matrix."""
        parts = [markup.table(("evaluation", ""), self.summary())]
        parts += [markup.element("p", text) for text in self.warnings()]
        scores, is_cut = self.per_class, len(self.classes) > MAX_CLASSES
        if is_cut:
            scores = [scores[place] for place in self.weakest(MAX_CLASSES)]
            text = f"The {MAX_CLASSES} of {len(self.classes):,} classes with the lowest recall:"
            parts.append(markup.element("p", text))
        header = ("class", "images", "recall %", "precision %", "F1 %")
        cells = [
            (score.name, f"{score.images:,}", *map(percent_text, (score.recall, score.precision, score.f1)))
            for score in scores
        ]
        parts.append(markup.table(header, cells))
        if not is_cut:
            parts.append(markup.matrix(self.classes, self.confusion.tolist()))
        return markup.fragment("".join(parts))


def pooled(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Join evaluations on different images of the same classes; `places` are those in the source of each."""
    names = ("places", "true", "predicted", "confidence", "rank", "losses")
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(evaluation, name) for evaluation in evaluations]) for name in names
    }
    return Evaluation(
        classes=evaluations[0].classes,
        keys=[key for evaluation in evaluations for key in evaluation.keys],
        **columns,
        groups=_joined([evaluation.groups for evaluation in evaluations]),
        excluded=sorted({item for evaluation in evaluations for item in evaluation.excluded}),
    )


def _joined(columns: Sequence[list[str] | None]) -> list[str] | None:
    """Join lists; None if one is missing."""
    if any(column is None for column in columns):
        return None
    return [value for column in columns for value in column or ()]


def never_predicted_text(result: Evaluation) -> str:
    """Return a sentence that names the classes which are never predicted; an empty text if all are predicted."""
    names = result.never_predicted
    if not names:
        return ""
    images = dict(zip(result.classes, result.class_counts.images.tolist(), strict=True))
    named = first_few(f"{name} ({count(images[name], 'image')})" for name in names)
    return f"{count(len(names), 'class is', 'classes are')} never predicted: {named}."


def class_lines(result: Evaluation) -> list[str]:
    """Return what top-1 hides where classes differ in size: balanced accuracy, and classes that are never predicted."""
    lines = [f"{name}: {value}" for name, value in result.accuracies() if name == BALANCED]
    return [*lines, *filter(None, [never_predicted_text(result)])]
