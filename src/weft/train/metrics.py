"""Evaluation metrics: accuracy, per class, confusion matrix, calibration, most confident errors."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.loading.dataset import LOST
from weft.data.loading.loader import ImageLoader
from weft.train.objective import mean_logits
from weft.train.real_labels import RealScore
from weft.train.runtime import Runtime

MOST_MISTAKES = 20
BINS = 15  # of probability, as in arXiv 1706.04599


class ClassScore(NamedTuple):
    """One class. Percent; 0 where there is nothing to divide by."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float


class Mistake(NamedTuple):
    """One image that was taken for something else; `place` is its number in the source."""

    key: str
    true: str
    predicted: str
    probability: float
    place: int


class Bin(NamedTuple):
    """The images whose answer had a probability above `low` and up to `high`.

    Attributes:
        sure: mean probability of these answers.
        right: how many of them were right, from 0 to 1; that of a calibrated model is equal to `sure`.
    """

    low: float
    high: float
    images: int
    sure: float
    right: float


@dataclass(frozen=True)
class Evaluation:
    """What came out, over `count` images; those that could not be read are in `excluded` and in no number here.

    Attributes:
        classes: names, in the order of the model's outputs.
        count: images evaluated.
        excluded: (key, reason) of images that were not.
        loss: mean cross-entropy in nats.
        top1: percent.
        top5: percent; with five classes or fewer all are among the first five, and it is 100.
        confusion: (class, class) counts; row: what it is, column: what it was taken for.
        mistakes: the most confident ones, first the worst.
        right: (count) whether each was answered right, in the order of the images.
        sure: (count) the probability of each answer.
        predicted: (count) the predicted class of each.
        places: (count) number of each image in the source.
        real: accuracy by ReaL labels, where they were given.
    """

    classes: list[str]
    count: int
    excluded: list[tuple[str, str]]
    loss: float
    top1: float
    top5: float
    confusion: np.ndarray
    per_class: list[ClassScore]
    mistakes: list[Mistake]
    right: np.ndarray
    sure: np.ndarray
    predicted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    real: RealScore | None = None

    @property
    def calibration(self) -> list[Bin]:
        """Whether the probabilities mean what they say: bins of equal width, those without images left out."""
        edges = np.linspace(0, 1, BINS + 1)
        bins = np.clip(np.ceil(self.sure * BINS).astype(int) - 1, 0, BINS - 1)
        return [
            Bin(
                float(edges[i]),
                float(edges[i + 1]),
                int(here.sum()),
                float(self.sure[here].mean()),
                float(right.mean()),
            )
            for i in range(BINS)
            if (here := bins == i).any()
            for right in (self.right[here],)
        ]

    @property
    def ece(self) -> float:
        """Expected calibration error in points: how far `sure` and `right` are apart, mean over the images."""
        apart = sum(row.images * abs(row.sure - row.right) for row in self.calibration)
        return 100 * apart / max(self.count, 1)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "n": self.count,
            "excluded": [{"image": key, "reason": reason} for key, reason in self.excluded],
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "ece": self.ece,
            "calibration": [row._asdict() for row in self.calibration],
            "classes": [score._asdict() for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "mistakes": [mistake._asdict() for mistake in self.mistakes],
            **({} if self.real is None else {"real": self.real._asdict()}),
        }


class Answers(NamedTuple):
    """What a model said of some images, one entry each: place in the order, class, answer, its probability ..."""

    place: np.ndarray
    true: np.ndarray
    taken: np.ndarray
    sure: np.ndarray
    loss: np.ndarray
    among_five: np.ndarray

    @classmethod
    def none(cls) -> Answers:
        """Of no images."""
        whole, real = np.empty(0, np.int64), np.empty(0, np.float64)
        return cls(whole, whole, whole, real.astype(np.float32), real, whole.astype(bool))


def measure(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    runtime: Runtime,
    *,
    key_of: Callable[[int], str] = str,
    excluded: Sequence[tuple[str, str]] = (),
    on_batch: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Runs a model over images. With several processes each runs over its part, and every image counts once.

    Args:
        model: put into evaluation mode, and left in the mode it came in.
        batches: (images (b c h w), labels (b)) pairs; of several processes, an `ImageLoader` that knows its share.
        classes: names of the model's outputs.
        runtime: where and how.
        key_of: the name of an image from its place in the order of `batches`.
        excluded: images that are not in `batches`, with the reason; passed on.
        on_batch: told the number of images of every batch; it may raise to stop.
    """
    was_training = [module.training for module in model.modules()]
    model.eval()
    mine, start = [Answers.none()], 0
    with torch.inference_mode():
        for images, labels in batches:
            with runtime.autocast():
                logits = mean_logits(model(runtime.put(images))).float().cpu()
            mine.append(_answers(logits, labels, start))
            start += len(labels)
            on_batch(len(labels))
    for module, mode in zip(model.modules(), was_training, strict=True):
        module.training = mode
    answers = Answers(*(np.concatenate(column) for column in zip(*mine, strict=True)))
    if isinstance(batches, ImageLoader):
        places = batches.places()
        gone = [(key_of(int(place)), "lost") for place in np.delete(places, answers.place)]
        excluded = [*excluded, *(item for items in runtime.gather(gone) for item in items)]
        answers = answers._replace(place=places[answers.place])
    whole = Answers(*(np.concatenate(column) for column in zip(*runtime.gather(answers), strict=True)))
    order = np.argsort(whole.place)
    return _summary(Answers(*(column[order] for column in whole)), classes, key_of, excluded)


def _answers(logits: Tensor, labels: Tensor, start: int) -> Answers:
    probability, prediction = logits.softmax(dim=1).max(dim=1)
    five = logits.topk(min(5, logits.shape[1]), dim=1).indices
    is_there = labels != LOST
    loss = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    columns = (labels, prediction, probability, loss.double(), (five == labels[:, None]).any(dim=1))
    place = np.arange(start, start + len(labels))
    return Answers(place[is_there.numpy()], *(column[is_there].numpy() for column in columns))


def _summary(
    answers: Answers,
    classes: Sequence[str],
    key_of: Callable[[int], str],
    excluded: Sequence[tuple[str, str]],
) -> Evaluation:
    place, true, taken, sure, loss, among_five = answers
    count = len(true)
    confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(confusion, (true, taken), 1)
    wrong = heapq.nlargest(MOST_MISTAKES, np.flatnonzero(true != taken), key=lambda at: (sure[at], -at))
    return Evaluation(
        classes=list(classes),
        count=count,
        excluded=list(excluded),
        loss=float(loss.sum()) / count,
        top1=100 * float((true == taken).mean()),
        top5=100 * float(among_five.mean()),
        confusion=confusion,
        per_class=class_scores(classes, confusion),
        mistakes=[
            Mistake(
                key_of(int(place[at])), classes[int(true[at])], classes[int(taken[at])], float(sure[at]), int(place[at])
            )
            for at in wrong
        ],
        right=true == taken,
        sure=sure,
        predicted=taken,
        places=place,
    )


def class_scores(classes: Sequence[str], confusion: np.ndarray) -> list[ClassScore]:
    """Precision, recall and F1 of each class from `Evaluation.confusion`."""
    right, images, taken = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision = 100 * right / np.maximum(taken, 1)
    recall = 100 * right / np.maximum(images, 1)
    f1 = 200 * right / np.maximum(images + taken, 1)
    columns = zip(classes, images.tolist(), precision.tolist(), recall.tolist(), f1.tolist(), strict=True)
    return [ClassScore(*row) for row in columns]
