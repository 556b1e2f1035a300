"""Numbers of an evaluation, against scikit-learn's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score
from torch import Tensor
from torch.nn import functional as F

from tests.evaluations import evaluation_of
from weft.checkpoints.unknown import Threshold
from weft.inference.measurement import measure
from weft.inference.metrics import MOST_MISTAKES, Evaluation, class_lines
from weft.inference.real_labels import RealScore
from weft.inference.scores import BINS
from weft.machine.runtime import Runtime

CPU = Runtime.of("cpu", "fp32")
CLASSES = [f"class {number}" for number in range(7)]
GENERATOR = torch.Generator().manual_seed(5)
LABELS = torch.randint(6, (200,), generator=GENERATOR)  # the last class has no image
LOGITS = torch.randn(200, 7, generator=GENERATOR) + F.one_hot(LABELS, 7)


def evaluated(logits: Tensor = LOGITS, labels: Tensor = LABELS, batch_size: int = 32) -> Evaluation:
    """The evaluation of a model whose logits are its inputs."""
    batches = list(zip(logits.split(batch_size), labels.split(batch_size), strict=True))
    excluded = [("bad.png", "truncated")]
    return measure(lambda images: images, batches, CLASSES, CPU, key_of="image {}".format, excluded=excluded)


def test_scores_are_those_of_scikit_learn() -> None:
    result, taken = evaluated(), LOGITS.argmax(dim=1)
    assert result.count == result.as_dict()["n"] == sum(map(sum, result.as_dict()["confusion"])) == 200
    assert result.as_dict()["excluded"] == [{"image": "bad.png", "reason": "truncated"}]
    assert result.top1 == pytest.approx(100 * (taken == LABELS).float().mean().item())
    assert result.top5 == pytest.approx(100 * top_k_accuracy_score(LABELS, LOGITS, k=5, labels=range(7)))
    assert result.loss == pytest.approx(F.cross_entropy(LOGITS, LABELS).item(), rel=1e-5)
    np.testing.assert_array_equal(result.confusion, confusion_matrix(LABELS, taken, labels=range(7)))
    theirs = np.array(precision_recall_fscore_support(LABELS, taken, labels=range(7), zero_division=np.nan)).T
    ours = np.array([[score.precision, score.recall, score.f1, score.images] for score in result.per_class[:6]], float)
    np.testing.assert_allclose(ours / [100, 100, 100, 1], theirs[:6], rtol=1e-12)
    assert [score.name for score in result.per_class] == CLASSES
    assert result.per_class[6] == ("class 6", 0, None, None, None)


def test_calibration_is_that_of_scikit_learn() -> None:
    result = evaluated()
    right, sure = calibration_curve(result.is_correct, result.confidence, n_bins=BINS)
    np.testing.assert_allclose([row.right for row in result.calibration], right)
    np.testing.assert_allclose([row.sure for row in result.calibration], sure, rtol=1e-6)
    shares = [row.images / result.count for row in result.calibration]
    assert sum(shares) == pytest.approx(1)
    assert result.ece == pytest.approx(100 * np.dot(shares, np.abs(right - sure)), rel=1e-6)
    assert result.as_dict()["ece"] == result.ece > 1


def test_a_probability_on_an_edge_is_in_one_bin() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e9, -1e9, -1e9, -1e9, -1e9], [99.0, 0, 0, 0, 0, 0, 0]])
    result = evaluated(logits, torch.tensor([0, 1]))
    assert [(row.images, row.right) for row in result.calibration] == [(1, 1.0), (1, 0.0)]
    assert result.calibration[-1].high == 1
    assert result.ece == pytest.approx(75)


def test_classes_that_are_never_predicted_are_named() -> None:
    labels = torch.tensor([0] * 19 + [1])
    result = evaluated(F.one_hot(torch.zeros(20, dtype=torch.int64), 7).float(), labels)
    assert result.never_predicted == result.as_dict()["never_predicted"] == ["class 1"]  # the others have no image
    assert class_lines(result) == [
        "balanced accuracy: 50.00 % (mean recall of the classes)",
        "1 class is never predicted: class 1 (1 image).",
    ]
    balanced = torch.arange(7).repeat(3)
    assert class_lines(evaluated(F.one_hot(balanced, 7).float(), balanced)) == []


def test_the_batch_size_does_not_matter() -> None:
    one, other = (evaluated(batch_size=size).as_dict() for size in (200, 7))
    assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6)
    assert one == other


def test_the_most_confident_mistakes_come_first() -> None:
    mistakes = evaluated().mistakes
    assert len(mistakes) == MOST_MISTAKES
    shares = [mistake.probability for mistake in mistakes]
    assert shares == sorted(shares, reverse=True)
    probability, taken = LOGITS.softmax(dim=1).max(dim=1)
    worst = torch.where(taken != LABELS, probability, -1).argmax().item()
    assert mistakes[0].key == f"image {worst}"
    assert (mistakes[0].true, mistakes[0].predicted) == (CLASSES[LABELS[worst]], CLASSES[taken[worst]])
    assert mistakes[0].probability == pytest.approx(probability[worst].item())


def test_scores_of_nothing_are_none() -> None:
    """No image of a class, and no prediction of a class."""
    nothing, never = np.zeros((2, 2), dtype=int), np.array([[3, 0], [2, 0]])
    assert [tuple(score)[1:] for score in evaluation_of("ab", nothing).per_class] == [(0, None, None, None)] * 2
    assert evaluation_of("ab", never).per_class[1] == ("b", 2, None, 0, 0)
    assert evaluation_of("ab", never.T).per_class[1] == ("b", 0, None, None, None)


def test_accuracies_have_their_images_and_interval() -> None:
    result = evaluated()
    low, high = binomtest(round(2 * result.top1), 200).proportion_ci(method="wilson")
    assert result.as_dict()["top1_interval"] == pytest.approx([100 * low, 100 * high])
    assert not result.as_dict()["too_few_images"]
    confusion = 9 * np.eye(10, dtype=int) + np.roll(np.eye(10, dtype=int), 1, axis=0)
    balanced = evaluation_of("abcdefghij", confusion, num_top5=98)
    assert dict(balanced.accuracies("held-out images")) == {
        "top-1": "90.00 % of 100 held-out images (95 % CI 82.6 to 94.5 %)",
        "top-5": "98.00 % of 100 held-out images (95 % CI 93.0 to 99.4 %)",
    }
    few = evaluation_of("abcde", confusion[:5, :5])
    assert "top-5" not in dict(few.accuracies())  # it is always 100 %


def test_unequal_classes_have_macro_scores() -> None:
    result = evaluation_of("abc", np.array([[8, 0, 0], [1, 1, 0], [0, 0, 0]]))
    assert result.balanced_accuracy == pytest.approx((100 + 50) / 2)  # a class without images has no recall
    assert result.macro_f1 == pytest.approx((200 * 8 / 17 + 200 / 3) / 2)
    found = result.as_dict()
    assert (found["balanced_accuracy"], found["macro_f1"]) == (result.balanced_accuracy, result.macro_f1)
    assert dict(result.accuracies())["balanced accuracy"] == "75.00 % (mean recall of the classes)"


def test_a_summary_has_all_that_was_measured_and_nothing_else() -> None:
    result = evaluation_of("ab", np.array([[30, 10], [0, 40]]))  # the errors have confidences from 0.41 to 0.52
    plain = ["top-1", "loss", "expected calibration error", "top-1 by confidence"]
    assert [name for name, _ in result.summary()] == plain
    threshold = Threshold(0.4, count=80, unknown=4, other_count=10, other_unknown=9, auroc=0.95)
    whole = dataclasses.replace(result, real=RealScore(90.0, 70, 10), threshold=0.5, unknown=threshold)
    lines = dict(whole.summary())
    assert list(lines) == ["top-1", "ReaL top-1", *plain[1:], "accepted", "images of no class"]
    assert lines["ReaL top-1"].startswith("90.00 % of 70 images with a ReaL label")
    assert lines["ReaL top-1"].endswith("; 10 without one")
    assert lines["loss"] == "1.0000"
    assert lines["top-1 by confidence"] == "86.11 % of the most confident 90 %; 82.14 % of the most confident 70 %"
    assert lines["accepted"].startswith("42 of 80 images (52.5 %), from 0.500; top-1 95.24 % of 42 accepted images")
    assert lines["images of no class"].startswith("AUROC 0.950; unknown are 9 of 10 other images and 4 of 80 images")
