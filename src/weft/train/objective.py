"""The loss: label smoothing, mixing, class weights, distillation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor
from torch.nn import functional as F

from weft.data.loading.seeding import seeded_rng
from weft.errors import UsageError
from weft.recipes import Recipe

MIX = -1_000_000  # stands where a sample has its index, so that the mixing of a step draws from a stream of its own


class Mixing:
    """Mixup and cutmix of a batch with itself turned round, with labels to match, as timm's `Mixup` does it.

    What a step draws depends on (seed, step) alone: all parts of a step, in whatever process, are mixed alike. (The
    released trainings draw anew in every process.)
    """

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        augment = recipe.augment
        self.seed, self.num_classes, self.smoothing = recipe.seed, num_classes, recipe.loss.label_smoothing
        self.mixup = None
        if augment.mixup or augment.cutmix:
            self.mixup = Mixup(
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
        """The images, which may be changed in place, and for each a share of every class."""
        if self.mixup is None:
            return images, mixup_target(labels, self.num_classes, 1.0, self.smoothing)
        with seeded_rng(self.seed, step, MIX):
            return self.mixup(images, labels)


def check_mixing(recipe: Recipe, part_size: int, parts: int) -> None:
    """Refuses a batch that mixup and cutmix cannot pair.

    Raises:
        UsageError: they are on, and a part of a step has an odd number of images.
    """
    if (recipe.augment.mixup or recipe.augment.cutmix) and part_size % 2:
        raise UsageError(
            f"Mixup and cutmix join images in pairs; a batch of {part_size} (batch_size {recipe.batch_size} in {parts} "
            f"{'part' if parts == 1 else 'parts'}) has one left over. Make it even, or set augment.mixup and "
            "augment.cutmix to 0."
        )


def balanced_weights(labels: Sequence[int], num_classes: int) -> Float[Tensor, " classes"]:
    """Weights that make every class count the same, 1 on average over the images; a class without images has 0."""
    count = Counter(labels)
    present = len(count)
    weights = [len(labels) / (present * count[number]) if count[number] else 0.0 for number in range(num_classes)]
    return torch.tensor(weights)


class Objective:
    """The loss of a batch, a mean over its images.

    Args:
        recipe: loss and distillation.
        class_weights: weight of each class, or None for equal ones.
    """

    def __init__(self, recipe: Recipe, class_weights: Tensor | None = None) -> None:
        self.distill, self.class_weights = recipe.distill, class_weights

    def __call__(
        self,
        logits: Tensor | tuple[Tensor, ...],
        targets: Float[Tensor, "b classes"],
        teacher_logits: Float[Tensor, "b classes"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss.

        Args:
            logits: (b classes) of a model with one head; of one with two, (labels' head, teacher's head).
            targets: for each image a share of every class.
            teacher_logits: what the teacher says of the same images, or None without a teacher. Two heads then learn
                the same, and the loss is the mean of theirs, as evaluation takes the mean of their logits.
        """
        heads = logits if isinstance(logits, tuple) else (logits,)
        if teacher_logits is None:
            return torch.stack([self._of_labels(head, targets) for head in heads]).mean()
        alpha = self.distill.alpha
        return (1 - alpha) * self._of_labels(heads[0], targets) + alpha * self._of_teacher(heads[-1], teacher_logits)

    def _of_labels(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, weight=self.class_weights)

    def _of_teacher(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """DeiT (arXiv 2012.12877), equations 2 (soft) and 3 (hard), without alpha."""
        student, teacher = logits.float(), teacher_logits.float()
        if self.distill.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(dim=1))
        heat = self.distill.temperature
        divergence = F.kl_div(
            F.log_softmax(student / heat, dim=1), F.log_softmax(teacher / heat, dim=1), reduction="sum", log_target=True
        )
        count = student.numel() if self.distill.soft_mean == "released" else len(student)
        return divergence * heat**2 / count


def mean_logits(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Logits (b classes) of a model with one head or several."""
    return torch.stack(logits).mean(dim=0) if isinstance(logits, tuple) else logits
