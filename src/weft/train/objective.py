"""Loss of training: label smoothing, mixup and cutmix, class weights, distillation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from weft.data.seeding import seeded_rng
from weft.lazy import LazyModule
from weft.recipes import Recipe

timm_mixup: Any = LazyModule("timm.data.mixup")

MIX = -1_000_000  # used as sample index in seeds, so that mixing draws from a random stream of its own


class Mixing:
    """Mixup and cutmix of a batch with its reversed copy, and the matching targets, by timm's `Mixup`.

    The random numbers are a function of (seed, step): all micro-batches of a step use the same ones, in all processes.
    (The released training code draws different ones in every process.)
    """

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        augment = recipe.augment
        self.seed, self.num_classes, self.smoothing = recipe.seed, num_classes, recipe.loss.label_smoothing
        self.mixup = None
        if augment.mixup or augment.cutmix:
            self.mixup = timm_mixup.Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mix_prob,
                switch_prob=augment.mix_switch,
                label_smoothing=self.smoothing,
                num_classes=num_classes,
            )

    def __call__(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], step: int
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b classes"]]:
        """Return mixed images, possibly changed in place, and their targets as class probabilities."""
        if self.mixup is None:
            return images, timm_mixup.mixup_target(labels, self.num_classes, 1.0, self.smoothing)
        with seeded_rng(self.seed, step, MIX):
            return self.mixup(images, labels)


def balanced_weights(labels: Sequence[int], num_classes: int) -> Float[Tensor, " classes"]:
    """Return class weights inversely proportional to class frequency, with mean 1 over the images.

    Args:
        labels: class index of every image.
        num_classes: number of classes; a class without images has weight 0.
    """
    count = Counter(labels)
    present = len(count)
    weights = [len(labels) / (present * count[number]) if count[number] else 0.0 for number in range(num_classes)]
    return torch.tensor(weights)


class Objective:
    """Loss function: mean over the images of a batch.

    Args:
        recipe: its `loss` and `distill` sections are used.
        labels: class index of every training image, where the recipe corrects class frequencies.
        num_classes: number of classes.
        device: of the logits.
    """

    def __init__(
        self, recipe: Recipe, labels: Sequence[int] = (), num_classes: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.distill, self.class_weights = recipe.distill, None
        if recipe.loss.class_weights == "balanced":
            self.class_weights = balanced_weights(labels, num_classes).to(device)

    def __call__(
        self,
        logits: Tensor | tuple[Tensor, ...],
        targets: Float[Tensor, "b classes"],
        teacher_logits: Float[Tensor, "b classes"] | None = None,
    ) -> Float[Tensor, ""]:
        """Compute the loss.

        Args:
            logits: (b classes); for a model with two heads a tuple (class head, distillation head).
            targets: class probabilities of each image.
            teacher_logits: logits of the teacher for the same images; None without a teacher. Then both heads are
                trained on the targets and the loss is their mean, as evaluation averages their logits.
        """
        heads = logits if isinstance(logits, tuple) else (logits,)
        if teacher_logits is None:
            return torch.stack([self._class_loss(head, targets) for head in heads]).mean()
        alpha = self.distill.alpha
        return (1 - alpha) * self._class_loss(heads[0], targets) + alpha * self._teacher_loss(heads[-1], teacher_logits)

    def _class_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, weight=self.class_weights)

    def _teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute equation 2 (soft) or 3 (hard) of DeiT (arXiv 2012.12877), without the factor alpha."""
        student, teacher = logits.float(), teacher_logits.float()
        if self.distill.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(dim=1))
        t = self.distill.temperature
        divergence = F.kl_div(
            F.log_softmax(student / t, dim=1), F.log_softmax(teacher / t, dim=1), reduction="sum", log_target=True
        )
        count = student.numel() if self.distill.soft_mean == "released" else len(student)
        return divergence * t**2 / count
