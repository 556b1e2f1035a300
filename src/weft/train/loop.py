"""The loop: one step, one epoch. Readable in one sitting; everything that a step changes is in `Learner`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data import mix_seed
from weft.errors import DivergedError
from weft.recipes import Recipe
from weft.train.runtime import Runtime
from weft.train.schedule import peak_lr

STEP = -1  # stands where a sample has its index, so that steps and samples draw from different streams


class Meter(NamedTuple):
    """What is known of an epoch so far.

    Attributes:
        step: steps done in this epoch.
        steps: steps of a whole epoch.
        loss: mean over the images seen.
        top1: percent of the images seen, as augmented.
        images_per_second: since the epoch began.
    """

    step: int
    steps: int
    loss: float
    top1: float
    images_per_second: float


class Learner:
    """A model with what moves it.

    Args:
        model: on the runtime's device.
        recipe: optimiser, schedule, loss.
        runtime: where and how.
        steps_per_epoch: batches of one epoch.
        epochs: of the whole run.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, runtime: Runtime, steps_per_epoch: int, epochs: int) -> None:
        self.model, self.recipe, self.runtime = model, recipe, runtime
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.optimizer = _optimizer(model, recipe)
        self.scheduler = _scheduler(self.optimizer, recipe, steps_per_epoch, steps_per_epoch * epochs)
        decay = recipe.optim.ema_decay
        self.ema = ModelEmaV3(model, decay=decay, use_warmup=True) if decay else None

    @property
    def best_guess(self) -> nn.Module:
        """The weights to evaluate and keep: their average where there is one."""
        return self.ema.module if self.ema is not None else self.model

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def learn(self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"]) -> tuple[float, int]:
        """One step.

        Args:
            images: normalised.
            labels: class numbers.

        Returns:
            The loss, and how many images the step got right before it moved.

        Raises:
            DivergedError: loss or gradient is not finite; the weights are as they were before the step.
        """
        torch.manual_seed(mix_seed(self.recipe.seed, self.step, STEP))  # for drop-path and dropout
        with self.runtime.autocast():
            logits = self.model(images)
            loss = classification_loss(logits, labels, self.recipe.loss.label_smoothing)
        value = loss.item()
        self._check_finite("loss", value)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit = self.recipe.optim.clip_grad or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._check_finite("norm of the gradient", norm.item())
        self.optimizer.step()
        self.step += 1
        self.scheduler.step_update(self.step)
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        return value, int((mean_logits(logits).argmax(dim=1) == labels).sum())

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergedError(
                f"The {what} must be finite; got {value} at step {self.step + 1}"
                f" (epoch {self.step // self.steps_per_epoch + 1}) with learning rate {self.lr:.3g}."
                " This step did not change the weights."
                f" Lower optim.lr (now {peak_lr(self.recipe):g}) or lengthen schedule.warmup_epochs."
            )


def train_epoch(learner: Learner, batches: Iterable[tuple[Tensor, Tensor]], on_step: Callable[[Meter], None]) -> Meter:
    """One pass over the training images.

    Args:
        learner: what learns.
        batches: (images, labels) pairs.
        on_step: told after every step; it may raise to stop the run there.
    """
    learner.model.train()
    begun = time.perf_counter()
    seen, loss_sum, right = 0, 0.0, 0
    meter = Meter(0, learner.steps_per_epoch, math.nan, math.nan, 0.0)
    for number, (images, labels) in enumerate(batches, start=1):
        loss, hits = learner.learn(learner.runtime.put(images), learner.runtime.put(labels))
        seen += len(labels)
        loss_sum += loss * len(labels)
        right += hits
        speed = seen / (time.perf_counter() - begun)
        meter = Meter(number, learner.steps_per_epoch, loss_sum / seen, 100 * right / seen, speed)
        on_step(meter)
    return meter


def classification_loss(logits: Tensor | tuple[Tensor, ...], labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy; of several heads, the mean of theirs, as evaluation takes the mean of their logits."""
    heads = logits if isinstance(logits, tuple) else (logits,)
    losses = [F.cross_entropy(head.float(), labels, label_smoothing=label_smoothing) for head in heads]
    return torch.stack(losses).mean()


def mean_logits(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Logits (b classes) of a model with one head or several."""
    return torch.stack(logits).mean(dim=0) if isinstance(logits, tuple) else logits


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    optim = recipe.optim
    words: dict[str, Any] = dict(opt=optim.opt, lr=peak_lr(recipe), weight_decay=optim.weight_decay)
    if optim.opt == "sgd":
        words |= dict(momentum=optim.momentum, nesterov=optim.momentum > 0)
    else:
        words |= dict(betas=(optim.momentum, optim.beta2))
    return create_optimizer_v2(model, **words)


def _scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int, steps: int) -> CosineLRScheduler:
    warmup = min(round(recipe.schedule.warmup_epochs * steps_per_epoch), steps // 5)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 2),  # of a single step timm would warn that it is no schedule
        lr_min=min(recipe.schedule.min_lr, peak_lr(recipe)),
        warmup_t=warmup,
        warmup_lr_init=min(recipe.schedule.warmup_lr, peak_lr(recipe)),
        warmup_prefix=True,
        t_in_epochs=False,
    )
    scheduler.step_update(0)
    return scheduler
