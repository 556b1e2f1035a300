"""Evaluation metrics: accuracy, per class, confusion matrix, calibration, most confident errors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft import markup
from weft.data.loader import ImageLoader
from weft.inference.probabilities import ranked, softmax
from weft.inference.real_labels import RealScore
from weft.intervals import Estimate, accuracy_text, interval_of, too_few_text
from weft.notebook import described
from weft.runtime import Runtime
from weft.text import count, first_few

MOST_MISTAKES = 20
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
BALANCED = "balanced accuracy"
MAX_CLASSES = 20  # in the tables of a notebook
BINS = 15  # as in arXiv 1706.04599


class ClassScore(NamedTuple):
    """Scores of one class in percent; None where they are undefined. `images` is the number of images of the class.

    A class without images has no scores; a class that is never predicted has no precision.
    """

    name: str
    images: int
    precision: float | None
    recall: float | None
    f1: float | None


class Mistake(NamedTuple):
    """One misclassified image; `place` is its index in the source."""

    key: str
    true: str
    predicted: str
    probability: float
    place: int


class Coverage(NamedTuple):
    """The most confident predictions: their share of the images, their number, and their accuracy in percent."""

    coverage: float
    images: int
    top1: float


class Accepted(NamedTuple):
    """Images that are not rejected: their smallest confidence, number and accuracy in percent; None without images."""

    threshold: float
    images: int
    top1: float | None


class Bin(NamedTuple):
    """The images whose predicted class has a probability above `low` and up to `high`.

    Attributes:
        sure: mean probability of the predicted classes (confidence), 0 to 1.
        right: accuracy, 0 to 1; equal to `sure` for a calibrated model.
    """

    low: float
    high: float
    images: int
    sure: float
    right: float


class AllClasses(NamedTuple):
    """Accuracy among all classes of a model, where a dataset has some of them.

    Attributes:
        classes: number of classes of the model.
        top1: percent of the images whose most probable class among all of them is the true one.
    """

    classes: int
    top1: float


@dataclass(frozen=True)
class UnknownResult:
    """Separation of unknown images from those of the classes.

    Attributes:
        auroc: area under the ROC curve, from 0 to 1: 0.5 by chance.
        known, known_unknown: number of images of the classes, and of those among them that count as unknown.
        other, other_unknown: the same of images that show none of the classes.
    """

    auroc: float
    known: int
    known_unknown: int
    other: int
    other_unknown: int

    def __str__(self) -> str:
        """Describe the result in one line."""
        return (
            f"AUROC {self.auroc:.3f}; unknown are {self.other_unknown:,} of {self.other:,} other images and"
            f" {self.known_unknown:,} of {self.known:,} images of the classes"
        )


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
        real: accuracy by ReaL labels, if given.
        accepted: results of the images above a threshold of confidence, if given.
        all_classes: accuracy among all classes of the model, if `classes` are only some of them.
        unknown: how well images that show none of the classes are detected, if given.
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
    real: RealScore | None = None
    accepted: Accepted | None = None
    all_classes: AllClasses | None = None
    unknown: UnknownResult | None = None

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
        """Counts (class, class): rows are true classes, columns predicted ones."""
        confusion = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(confusion, (self.true, self.predicted), 1)
        return confusion

    @property
    def per_class(self) -> list[ClassScore]:
        """Scores of each class."""
        return class_scores(self.classes, self.confusion)

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
        return interval_of(self.top1, self.count)

    @property
    def calibration(self) -> list[Bin]:
        """Reliability diagram: confidence and accuracy in bins of equal width, without empty bins."""
        edges, bins = np.linspace(0, 1, BINS + 1), _bins(self.confidence)
        return [
            Bin(
                float(edges[i]),
                float(edges[i + 1]),
                int(here.sum()),
                float(self.confidence[here].mean()),
                float(right.mean()),
            )
            for i in range(BINS)
            if (here := bins == i).any()
            for right in (self.is_correct[here],)
        ]

    @property
    def ece(self) -> float:
        """Expected calibration error in percentage points: mean distance of confidence and accuracy over the images."""
        return calibration_error(self.confidence, self.is_correct)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes with images (macro average), in percent: every class counts the same."""
        return _mean(score.recall for score in self.per_class)

    @property
    def never_predicted(self) -> list[str]:
        """Classes with images that the model predicts for no image."""
        counts = zip(self.classes, self.confusion.sum(axis=1), self.confusion.sum(axis=0), strict=True)
        return [name for name, images, predicted in counts if images and not predicted]

    @property
    def macro_f1(self) -> float:
        """Mean F1 score of the classes with images, in percent."""
        return _mean(score.f1 for score in self.per_class)

    @property
    def coverage(self) -> list[Coverage]:
        """Accuracy of the most confident predictions, for each share of the images in COVERAGES."""
        right = self.is_correct[np.argsort(-self.confidence, kind="stable")]
        numbers = [max(round(share * self.count), 1) for share in COVERAGES]
        return [
            Coverage(share, number, 100 * float(right[:number].mean()))
            for share, number in zip(COVERAGES, numbers, strict=True)
        ]

    @property
    def aurc(self) -> float:
        """Area under the risk-coverage curve in percent: mean error over all numbers of accepted images."""
        errors = np.cumsum(~self.is_correct[np.argsort(-self.confidence, kind="stable")])
        return 100 * float((errors / np.arange(1, self.count + 1)).mean())

    def above(self, threshold: float) -> Accepted:
        """Return the results of the images whose predicted class has at least this probability."""
        right = self.is_correct[self.confidence >= threshold]
        return Accepted(threshold, len(right), 100 * float(right.mean()) if len(right) else None)

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            "n": self.count,
            "excluded": [{"image": key, "reason": reason} for key, reason in self.excluded],
            "top1": self.top1,
            "top1_interval": list(self.interval[1:]),
            "too_few_images": self.interval.is_wide,
            "top5": self.top5,
            "top5_interval": list(interval_of(self.top5, self.count)[1:]),
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": self.macro_f1,
            "never_predicted": self.never_predicted,
            "loss": self.loss,
            "ece": self.ece,
            "calibration": [row._asdict() for row in self.calibration],
            "coverage": [row._asdict() for row in self.coverage],
            "aurc": self.aurc,
            "classes": [score._asdict() for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "mistakes": [mistake._asdict() for mistake in self.mistakes],
            **({} if self.real is None else {"real": self.real._asdict()}),
            **({} if self.accepted is None else {"accepted": self.accepted._asdict()}),
            **({} if self.all_classes is None else {"all_classes": self.all_classes._asdict()}),
            **({} if self.unknown is None else {"unknown": asdict(self.unknown)}),
        }

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("count", self.count), ("classes", len(self.classes)), ("top1", self.interval)]
        return described("Evaluation", [*values, ("loss", f"{self.loss:.4f}"), ("excluded", len(self.excluded))])

    def _repr_html_(self) -> str:
        """Return tables: accuracy, scores of each class, and with few classes the confusion matrix."""
        rows = [*accuracy_lines(self), ("loss", f"{self.loss:.4f}"), *confidence_lines(self)]
        parts = [markup.table(("evaluation", ""), rows)]
        if warning := too_few_text(self.top1, self.count):
            parts.append(markup.element("p", warning))
        scores = sorted(self.per_class, key=lambda score: math.inf if score.recall is None else score.recall)
        is_cut = len(scores) > MAX_CLASSES
        if is_cut:
            parts.append(markup.element("p", f"The {MAX_CLASSES} of {len(scores):,} classes with the lowest recall:"))
        header = ("class", "images", "recall %", "precision %", "F1 %")
        cells = [
            (score.name, f"{score.images:,}", *map(percent_text, (score.recall, score.precision, score.f1)))
            for score in (scores[:MAX_CLASSES] if is_cut else self.per_class)
        ]
        parts.append(markup.table(header, cells))
        if not is_cut:
            parts.append(markup.matrix(self.classes, self.confusion.tolist()))
        return markup.fragment("".join(parts))


def calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error in percentage points: mean distance of confidence and accuracy over images.

    Args:
        sure: (images) probability of each predicted class.
        right: (images) whether it is correct.
    """
    bins = _bins(sure)
    distances = [(bins == i).sum() * abs(sure[bins == i].mean() - right[bins == i].mean()) for i in np.unique(bins)]
    return float(100 * sum(distances) / max(len(sure), 1))


def _bins(sure: np.ndarray) -> np.ndarray:
    """Return the bin of every confidence, of BINS bins of equal width."""
    return np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)


def measure(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    runtime: Runtime | None = None,
    *,
    among: Sequence[int] | None = None,
    temperature: float = 1.0,
    key_of: Callable[[int], str] = str,
    excluded: Sequence[tuple[str, str]] = (),
    on_batch: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Run a model over images. With several processes each runs its share, and every image counts once.

    Args:
        logits_of: function from images (b c h w) to logits (b classes), float32 on the CPU.
        batches: (images (b c h w), labels (b)) pairs; with several processes an `ImageLoader`, which knows its share.
        classes: names of the model's outputs.
        runtime: processes that share the images; None for this one alone.
        among: outputs to compare, ascending, which include all labels; the results are over these classes alone. None:
            all outputs.
        temperature: divisor of the logits in probabilities; the loss is without it.
        key_of: function from the index of an image in `batches` to its name.
        excluded: (name, reason) of images that are not in `batches`; copied to the result.
        on_batch: called with the number of images of every batch; it may raise to stop.

    Returns:
        The results; `loss` is nan if an output is not finite.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    for images, labels in batches:
        columns.append(_columns(logits_of(images), labels, among, temperature))
        on_batch(len(labels))
    mine = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    places = batches.places() if isinstance(batches, ImageLoader) else np.arange(sum(len(part[0]) for part in columns))
    shares = [[places, *mine]] if runtime is None else runtime.gather([places, *mine])
    gathered = [own for own in shares if len(own) > 1]  # a process may have no image
    places, *values = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    order = np.argsort(places)
    true, predicted, confidence, rank, losses, is_top_of_all = (column[order] for column in values)
    of_all = AllClasses(len(classes), 100 * float(is_top_of_all.mean()))
    return Evaluation(
        classes=list(classes) if among is None else [classes[number] for number in among],
        keys=[key_of(int(place)) for place in places[order]],
        places=places[order],
        true=true,
        predicted=predicted,
        confidence=confidence,
        rank=rank,
        losses=losses,
        excluded=list(excluded),
        all_classes=None if among is None or len(among) == len(classes) else of_all,
    )


def _columns(logits: Tensor, labels: Tensor, among: Sequence[int] | None, temperature: float) -> tuple[np.ndarray, ...]:
    """Return true class, predicted class, its probability, rank of the true class, loss, and whether the true class is
    on top of all outputs."""
    is_top_of_all = torch.from_numpy(ranked(logits.numpy())[:, 0].copy()) == labels
    if among is not None:
        place_of = torch.full((logits.shape[1],), -1)
        place_of[list(among)] = torch.arange(len(among))
        labels = place_of[labels]
        logits = logits[:, list(among)]
    order = torch.from_numpy(ranked(softmax(logits.numpy())).copy())
    predicted, rank = order[:, 0], (order == labels[:, None]).int().argmax(dim=1)
    confidence = torch.from_numpy(softmax(logits.numpy(), temperature)).gather(1, predicted[:, None])[:, 0]
    loss = F.cross_entropy(logits, labels, reduction="none").double()
    loss[~logits.isfinite().all(dim=1)] = math.nan  # also where the loss itself would be finite
    return tuple(column.numpy() for column in (labels, predicted, confidence, rank, loss, is_top_of_all))


def class_scores(classes: Sequence[str], confusion: np.ndarray) -> list[ClassScore]:
    """Compute precision, recall and F1 of each class from `Evaluation.confusion`."""
    columns = (confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0))
    return [
        ClassScore(
            name,
            images,
            100 * right / taken if images and taken else None,
            100 * right / images if images else None,
            200 * right / (images + taken) if images else None,
        )
        for name, right, images, taken in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def _mean(scores: Iterable[float | None]) -> float:
    defined = [score for score in scores if score is not None]
    return sum(defined) / max(len(defined), 1)


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
        excluded=sorted({item for evaluation in evaluations for item in evaluation.excluded}),
    )


def percent_text(value: float | None) -> str:
    """Return a score in percent as text; `-` where it is undefined."""
    return "-" if value is None else f"{value:.1f}"


def accuracy_lines(result: Evaluation, images: str = "images") -> list[tuple[str, str]]:
    """Return (name, value) lines of the accuracies, each with its number of images and its interval.

    Top-5 needs at least six classes: with five it is always 100 %. The balanced accuracy and the mean F1 score are left
    out where every class has the same number of images, since the former is then the accuracy. If only some of the
    model's classes are compared, the names of the lines say so.
    """
    among = "" if result.all_classes is None else f" among the {len(result.classes):,} classes of the data"
    lines = [(f"top-1{among}", accuracy_text(result.top1, result.count, images))]
    if len(result.classes) > 5:
        lines.append((f"top-5{among}", accuracy_text(result.top5, result.count, images)))
    if result.all_classes is not None:
        name = f"top-1 among all {result.all_classes.classes:,} classes of the model"
        lines.append((name, accuracy_text(result.all_classes.top1, result.count, images)))
    if len({score.images for score in result.per_class}) > 1:
        lines.append((BALANCED, f"{result.balanced_accuracy:.2f} % (mean recall of the classes)"))
        lines.append(("macro F1", f"{result.macro_f1:.2f} % (mean F1 score of the classes)"))
    return lines


def never_predicted_text(result: Evaluation) -> str:
    """Return a sentence that names the classes which are never predicted; an empty text if all are predicted."""
    names = result.never_predicted
    if not names:
        return ""
    images = dict(zip(result.classes, result.confusion.sum(axis=1).tolist(), strict=True))
    named = first_few(f"{name} ({count(images[name], 'image')})" for name in names)
    return f"{count(len(names), 'class is', 'classes are')} never predicted: {named}."


def class_lines(result: Evaluation) -> list[str]:
    """Return what top-1 hides where classes differ in size: balanced accuracy, and classes that are never predicted."""
    lines = [f"{name}: {value}" for name, value in accuracy_lines(result) if name == BALANCED]
    return [*lines, *filter(None, [never_predicted_text(result)])]


def calibration_text(result: Evaluation, *, is_fitted: bool) -> str:
    """Return the expected calibration error as text.

    Args:
        result: the evaluation.
        is_fitted: the temperature was fitted to the same images, which underestimates the error.
    """
    fitted = " (underestimated: the temperature was fitted to these images)" if is_fitted else ""
    return f"{result.ece:.1f} points{fitted}"


def confidence_lines(result: Evaluation, *, is_fitted: bool = False) -> list[tuple[str, str]]:
    """Return (name, value) lines about confidence: calibration error, accuracy of the most confident images.

    Args:
        result: the evaluation.
        is_fitted: the temperature was fitted to the same images.
    """
    shown = [row for row in result.coverage if row.coverage in (0.9, 0.7)]
    most = "; ".join(f"{row.top1:.2f} % of the most confident {100 * row.coverage:.0f} %" for row in shown)
    error = calibration_text(result, is_fitted=is_fitted)
    lines = [("expected calibration error", error), ("top-1 by confidence", most)]
    if result.accepted is not None:
        threshold, number, top1 = result.accepted
        accuracy = "" if top1 is None else f"; top-1 {accuracy_text(top1, number, 'accepted images')}"
        share = 100 * number / max(result.count, 1)
        lines.append(
            ("accepted", f"{number:,} of {result.count:,} images ({share:.1f} %), from {threshold:.3f}{accuracy}")
        )
    if result.unknown is not None:
        lines.append(("images of no class", str(result.unknown)))
    return lines
