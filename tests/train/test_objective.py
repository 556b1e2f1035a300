"""What is made small: mixed labels, weighted classes, a teacher, each against its formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.train.tiny import recipe_of as recipe
from weft.models.contract import mean_logits
from weft.recipes import Recipe
from weft.train.objective import Mixing, Objective, balanced_weights

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, OTHER, TEACHER = torch.randn(3, 6, 4, generator=GENERATOR)
LABELS = torch.tensor([0, 1, 2, 3, 1, 1])


def one_hot(smoothing: float = 0.0) -> torch.Tensor:
    return F.one_hot(LABELS, 4) * (1 - smoothing) + smoothing / 4


def test_labels_alone_are_cross_entropy_with_smoothing() -> None:
    images, targets = Mixing(recipe(loss__label_smoothing=0.1), 4)(torch.zeros(6, 3, 2, 2), LABELS, 0)
    torch.testing.assert_close(targets, one_hot(0.1))
    loss = Objective(Recipe())(LOGITS, targets)
    torch.testing.assert_close(loss, F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))
    assert images.shape == (6, 3, 2, 2)


def test_two_heads_without_a_teacher_learn_the_same() -> None:
    loss = Objective(Recipe())((LOGITS, OTHER), one_hot())
    each = [F.cross_entropy(head, LABELS) for head in (LOGITS, OTHER)]
    torch.testing.assert_close(loss, (each[0] + each[1]) / 2)
    torch.testing.assert_close(mean_logits((LOGITS, OTHER)), (LOGITS + OTHER) / 2)
    assert mean_logits(LOGITS) is LOGITS


@pytest.mark.parametrize("heads", [(LOGITS, OTHER), LOGITS])
def test_a_hard_teacher(heads: object) -> None:
    """DeiT, equation 3: one head per task, or one for both."""
    last = heads[1] if isinstance(heads, tuple) else heads
    loss = Objective(recipe(distill__alpha=0.3))(heads, one_hot(0.1), TEACHER)
    labels = F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1)
    torch.testing.assert_close(loss, 0.7 * labels + 0.3 * F.cross_entropy(last, TEACHER.argmax(1)))


@pytest.mark.parametrize(("mean", "count"), [("images", 6), ("released", 24)])
def test_a_soft_teacher(mean: str, count: int) -> None:
    """DeiT, equation 2: tau squared times the divergence of the softened answers."""
    settings = dict(distill__kind="soft", distill__alpha=0.1, distill__temperature=3.0, distill__soft_mean=mean)
    loss = Objective(recipe(**settings))((LOGITS, OTHER), one_hot(), TEACHER)
    target = (TEACHER / 3).softmax(1)
    divergence = (target * (target.log() - (OTHER / 3).softmax(1).log())).sum()
    torch.testing.assert_close(loss, 0.9 * F.cross_entropy(LOGITS, LABELS) + 0.1 * 9 * divergence / count)


def test_balanced_classes_weigh_the_same() -> None:
    weights = balanced_weights([0] * 6 + [1] * 2 + [3] * 4, 5)
    torch.testing.assert_close(weights, torch.tensor([12 / 18, 2.0, 0.0, 1.0, 0.0]))
    assert sum(weights[label] for label in [0] * 6 + [1] * 2 + [3] * 4).item() == pytest.approx(12)
    labels = [0] * 6 + [1] * 2 + [2] * 6 + [3] * 6
    loss = Objective(recipe(loss__class_weights="balanced"), labels, 4)(LOGITS, one_hot())
    each = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(loss, (each * torch.where(LABELS == 1, 20 / 8, 20 / 24)).mean())


@pytest.mark.parametrize("kind", ["augment__mixup", "augment__cutmix"])
def test_mixing_is_a_function_of_seed_and_step(kind: str) -> None:
    mix = Mixing(recipe(**{kind: 1.0}, loss__label_smoothing=0), 4)
    images = torch.rand(6, 3, 8, 8)
    first = mix(images.clone(), LABELS, 5)
    torch.rand(3)
    again = mix(images.clone(), LABELS, 5)
    other = mix(images.clone(), LABELS, 6)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    torch.testing.assert_close(first[1].sum(1), torch.ones(6))
    share = first[1][0, LABELS[0]]  # of the first image and the last, which it is mixed with
    if kind == "augment__mixup":
        torch.testing.assert_close(first[0][0], images[0] * share + images[-1] * (1 - share))
    else:
        changed = (first[0][0] != images[0]).any(0).float().mean()
        assert changed.item() == pytest.approx(1 - share.item(), abs=1e-6)


def test_parts_of_a_step_are_mixed_as_the_whole() -> None:
    mix = Mixing(recipe(augment__mixup=0.8, augment__cutmix=1.0), 4)
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    whole, targets = mix(images.clone(), labels, 3)
    for part in ([0, 1, 6, 7], [2, 3, 4, 5]):  # pairs stay together
        mixed, shares = mix(images[part].clone(), labels[part], 3)
        assert torch.equal(mixed, whole[part])
        assert torch.equal(shares, targets[part])
