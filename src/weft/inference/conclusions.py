"""Conclusions from an evaluation, in sentences: how good, how certain, what is confused, what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.inference.metrics import Evaluation, never_predicted_text
from weft.inference.scores import Mistake
from weft.report.pages import Lead
from weft.runs.directory import EpochRow

MAX_NAMED = 3  # classes, pairs or images in a sentence
SUSPICIOUS = 0.5  # smallest confidence of an error that points to a wrong label
LATE = 0.9  # share of the epochs after which a best epoch is late
LEARNED = 99.0  # training top-1 in percent from which longer training gains little
OVERFITTED = 10.0  # points of top-1 between training and held-out images


@dataclass(frozen=True)
class Training:
    """Training run of an evaluated model.

    Attributes:
        counts: number of training images of each class.
        history: rows of `metrics.csv`.
        best_epoch: epoch whose model is evaluated.
        mirrored: sentence on classes that are mirror images of each other; empty without such classes.
    """

    counts: Sequence[int]
    history: Sequence[EpochRow]
    best_epoch: int
    mirrored: str = ""


def conclusions(result: Evaluation, training: Training | None = None) -> Lead:
    """Return what an evaluation shows, and what to do next.

    Args:
        result: an evaluation on held-out images.
        training: the run of the model, if it is known.
    """
    correct = int(result.is_correct.sum())
    interval = result.interval
    sentences = [
        f"The model classifies {correct:,} of {result.count:,} images correctly: {result.top1:.1f} % (95 % interval"
        f" {interval.low:.1f} to {interval.high:.1f} %)."
    ]
    images = result.class_counts.images
    frequent = int(images.argmax())
    share = 100 * float(images[frequent]) / result.count
    if interval.low <= share:
        sentences.append(
            f"It is not shown to be better than predicting {result.classes[frequent]}, the most frequent class, for all"
            f" images ({share:.1f} %)."
        )
    sentences += filter(None, (never_predicted_text(result), result.too_few))
    pairs = [
        f"{result.classes[true]} as {result.classes[predicted]} ({count} of {images[true]})"
        for true, predicted, count in result.confused[:MAX_NAMED].tolist()
    ]
    sentences.append(f"Most frequent errors: {', '.join(pairs)}." if pairs else "It makes no error on these images.")
    return Lead(sentences, _next_steps(result, training))


def suspicious(result: Evaluation) -> list[Mistake]:
    """Return errors that the model predicts with more confidence than half of its correct predictions."""
    sure = result.confidence[result.is_correct]
    limit = max(SUSPICIOUS, float(np.median(sure)) if len(sure) else 1.0)
    return [mistake for mistake in result.mistakes if mistake.probability > limit]


def _next_steps(result: Evaluation, training: Training | None) -> list[str]:
    steps = []
    if result.interval.is_wide:
        more = "images of more groups" if result.grouped else "more images"
        steps.append(f"Evaluate on {more}, so that the accuracy is known better.")
    top1, correct = result.top1, result.class_counts.correct.tolist()
    weak = [
        (score.images - correct[place], place, score)
        for place, score in enumerate(result.per_class)
        if score.recall is not None and score.recall < top1
    ]
    weak = sorted((row for row in weak if row[0] > 1), key=lambda row: (-row[0], row[1]))[:MAX_NAMED]
    if weak:
        named = [
            f"{score.name} ({score.images - errors} of {score.images} correct"
            + (f", {training.counts[place]:,} training images)" if training is not None else ")")
            for errors, place, score in weak
        ]
        steps.append(f"Add training images of the weakest classes: {', '.join(named)}.")
    if labels := suspicious(result):
        named = [
            f"{mistake.key} (labelled {mistake.true}, predicted {mistake.predicted}, {100 * mistake.probability:.0f} %)"
            for mistake in labels[:MAX_NAMED]
        ]
        more = f" and {len(labels) - MAX_NAMED} more below" if len(labels) > MAX_NAMED else ""
        steps.append(f"Check these labels, of confident errors: {', '.join(named)}{more}.")
    if training is not None:
        steps += _advice_on_rare_classes(result, training)
        steps += [training.mirrored] if training.mirrored else []
        steps += _advice_on_length(training)
    return steps or ["No weakness stands out. Try the model on images of its later use: weft predict RUN IMAGES."]


def _advice_on_rare_classes(result: Evaluation, training: Training) -> list[str]:
    """Return advice if a class that is never predicted is rarer than others in training."""
    most = max(training.counts)
    rare = [name for name, images in zip(result.classes, training.counts, strict=True) if images < most]
    if not set(rare) & set(result.never_predicted):
        return []
    return [
        "Let rare classes count more: --set loss.class_weights=balanced, and --set best=balanced, which chooses the"
        " epoch by the balanced accuracy."
    ]


def _advice_on_length(training: Training) -> list[str]:
    """Return advice on the number of epochs, from the curves."""
    last = training.history[-1].epoch
    best = next(row for row in training.history if row.epoch == training.best_epoch)
    if best.epoch > LATE * last and best.train_top1 < LEARNED:
        return [f"Train longer: the best epoch, {best.epoch}, is among the last. For example --epochs {2 * last}."]
    if best.train_top1 - best.val_top1 > OVERFITTED:
        return [
            f"Training accuracy is {best.train_top1 - best.val_top1:.0f} points above held-out accuracy: more images or"
            " stronger augmentation help, more epochs do not."
        ]
    return []
