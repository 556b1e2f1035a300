"""How good a model is on images with known classes: accuracy, each class, confusion, and its worst mistakes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.train.loop import mean_logits
from weft.train.runtime import Runtime

MOST_MISTAKES = 20


class ClassScore(NamedTuple):
    """One class. Percent; 0 where there is nothing to divide by."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float


class Mistake(NamedTuple):
    """One image that was taken for something else."""

    key: str
    true: str
    predicted: str
    probability: float


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

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "n": self.count,
            "excluded": [{"image": key, "reason": reason} for key, reason in self.excluded],
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "classes": [score._asdict() for score in self.per_class],
            "confusion": self.confusion.tolist(),
            "mistakes": [mistake._asdict() for mistake in self.mistakes],
        }


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
    """Runs a model over images.

    Args:
        model: put into evaluation mode, and left in the mode it came in.
        batches: (images (b c h w), labels (b)) pairs.
        classes: names of the model's outputs.
        runtime: where and how.
        key_of: the name of an image from its place in the order of `batches`.
        excluded: images that are not in `batches`, with the reason; passed on.
        on_batch: told the number of images of every batch; it may raise to stop.
    """
    was_training = model.training
    model.eval()
    true, taken, sure, loss_sum, among_five = [], [], [], 0.0, 0
    with torch.inference_mode():
        for images, labels in batches:
            with runtime.autocast():
                logits = mean_logits(model(runtime.put(images))).float().cpu()
            loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
            probability, prediction = logits.softmax(dim=1).max(dim=1)
            five = logits.topk(min(5, logits.shape[1]), dim=1).indices
            among_five += int((five == labels[:, None]).any(dim=1).sum())
            true.append(labels.numpy())
            taken.append(prediction.numpy())
            sure.append(probability.numpy())
            on_batch(len(labels))
    model.train(was_training)
    return _summary(
        np.concatenate(true),
        np.concatenate(taken),
        np.concatenate(sure),
        loss_sum,
        among_five,
        classes,
        key_of,
        excluded,
    )


def _summary(
    true: np.ndarray,
    taken: np.ndarray,
    sure: np.ndarray,
    loss_sum: float,
    among_five: int,
    classes: Sequence[str],
    key_of: Callable[[int], str],
    excluded: Sequence[tuple[str, str]],
) -> Evaluation:
    count = len(true)
    confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(confusion, (true, taken), 1)
    wrong = heapq.nlargest(MOST_MISTAKES, np.flatnonzero(true != taken), key=lambda place: (sure[place], -place))
    return Evaluation(
        classes=list(classes),
        count=count,
        excluded=list(excluded),
        loss=loss_sum / count,
        top1=100 * float((true == taken).mean()),
        top5=100 * among_five / count,
        confusion=confusion,
        per_class=class_scores(classes, confusion),
        mistakes=[
            Mistake(key_of(int(place)), classes[int(true[place])], classes[int(taken[place])], float(sure[place]))
            for place in wrong
        ],
    )


def class_scores(classes: Sequence[str], confusion: np.ndarray) -> list[ClassScore]:
    """Precision, recall and F1 of each class from `Evaluation.confusion`."""
    right, images, taken = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision = 100 * right / np.maximum(taken, 1)
    recall = 100 * right / np.maximum(images, 1)
    f1 = 200 * right / np.maximum(images + taken, 1)
    columns = zip(classes, images.tolist(), precision.tolist(), recall.tolist(), f1.tolist(), strict=True)
    return [ClassScore(*row) for row in columns]
