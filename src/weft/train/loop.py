"""The training loop: one step and one epoch. Everything that a step changes is in `Learner`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from timm.utils.clip_grad import dispatch_clip_grad
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.data import mix_seed
from weft.data.loading.dataset import LOST
from weft.data.loading.order import Key
from weft.errors import DataError
from weft.recipes import Recipe
from weft.train.objective import Mixing, Objective, mean_logits
from weft.train.runtime import Runtime
from weft.train.schedule import lr_at
from weft.train.sharded import Shards, gathered

STEP = -1  # stands where a sample has its index, so that steps and samples draw from different streams

Batch = tuple[Tensor, Tensor]
"""Images (b c h w), normalised, and class numbers (b); `LOST` for an image that is not there any more."""


class StepResult(NamedTuple):
    """What one step came to, over all parts and processes: sums over `images`, and the norm of the gradient.

    A step that is skipped had a loss or gradient that is not finite, and changed nothing.
    """

    loss_sum: float
    hits: float
    images: int
    grad_norm: float
    is_skipped: bool = False

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.loss_sum / self.images


@dataclass
class Meter:
    """What is known of an epoch so far.

    Attributes:
        step: steps done in this epoch.
        steps: steps of this epoch when it is whole.
        count: images seen by the steps that were not left out.
        loss_sum: over these images.
        hits: of these images, how many were right, as augmented; of mixed ones, how many were taken for what they
            mostly are.
        seconds: since the epoch, or what was left of it, began.
        waiting: seconds of these in which the loop had no batch to work on.
        seen: images seen in these seconds.
    """

    step: int = 0
    steps: int = 0
    count: int = 0
    loss_sum: float = 0.0
    hits: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    seen: int = 0

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def top1(self) -> float:
        """Percent of the images."""
        return 100 * self.hits / self.count if self.count else math.nan

    @property
    def images_per_second(self) -> float:
        """Of all processes together."""
        return self.seen / self.seconds if self.seconds else 0.0

    @property
    def waiting_percent(self) -> float:
        """Share of the time that went by waiting for data."""
        return 100 * self.waiting / self.seconds if self.seconds else 0.0

    def add(self, result: StepResult) -> None:
        """Counts a step."""
        self.step += 1
        self.seen += result.images
        if not result.is_skipped:
            self.count += result.images
            self.loss_sum += result.loss_sum
            self.hits += result.hits

    def as_dict(self) -> dict[str, Any]:
        """What a resumed epoch needs: everything but the clock."""
        return {key: value for key, value in asdict(self).items() if key not in ("seconds", "waiting", "seen")}


class Learner:
    """A model with what moves it.

    Args:
        model: on the runtime's device.
        recipe: optimiser, schedule, loss; with all sizes decided.
        runtime: where and how.
        steps_per_epoch: of a whole epoch.
        steps: of the whole run.
        num_classes: of the data.
        class_weights: weight of each class in the loss, or None.
        teacher: from (images, their keys) to its logits, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        runtime: Runtime,
        steps_per_epoch: int,
        steps: int,
        num_classes: int,
        class_weights: Tensor | None = None,
        teacher: Callable[[Tensor, Sequence[Key]], Tensor] | None = None,
    ) -> None:
        self.model, self.recipe, self.runtime, self.teacher = model, recipe, runtime, teacher
        self.steps_per_epoch, self.steps = steps_per_epoch, steps
        self.step, self.skipped = 0, 0
        self.rate: Callable[[int], float] = lambda step: lr_at(recipe, step, steps_per_epoch, steps)
        _freeze(model, recipe)
        self.ema = ModelEmaV3(model, decay=recipe.optim.ema_decay, use_warmup=True) if recipe.optim.ema_decay else None
        is_sharded = recipe.parallel == "fsdp" and runtime.world > 1
        self.shards = Shards(model, recipe, runtime, self.ema is not None) if is_sharded else None
        self.trained = model if self.shards is None else self.shards.network
        self.optimizer = _optimizer(self.trained, recipe)
        self.wrapped = runtime.wrap(model) if self.shards is None else self.shards.network
        if recipe.compile:
            self.wrapped = cast(nn.Module, torch.compile(self.wrapped))
        self.mixing = Mixing(recipe, num_classes)
        self.objective = Objective(recipe, None if class_weights is None else runtime.put(class_weights))

    @property
    def best_guess(self) -> nn.Module:
        """The weights to evaluate and keep: their average where there is one."""
        return self.ema.module if self.ema is not None else self.model

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.rate(step)

    def begin(self) -> None:
        """Puts the model into the mode in which this recipe trains."""
        self.trained.train(self.recipe.train_mode == "train")
        if self.recipe.optim.freeze == "backbone":
            self.trained.eval()
            for head in _heads(self.trained):
                head.train()

    def gather(self) -> None:
        """Brings `model` and `best_guess` up to date where they are spread over the processes, which all come here."""
        if self.shards is not None:
            self.shards.gather(self.model, None if self.ema is None else self.ema.module)

    def optimizer_state(self) -> dict[str, Any]:
        """Of the optimiser, whole; for that, too, all processes come here."""
        state = self.optimizer.state_dict()
        return state if self.shards is None else gathered(state)

    def learn(self, parts: Sequence[Batch], keys: Sequence[Sequence[Key]] = ()) -> StepResult:
        """One step.

        Args:
            parts: the batches of this process, on its device; their gradients are averaged.
            keys: for each part which images it holds; only a teacher with ready answers looks at it.

        Returns:
            What the step came to, before it moved the weights; whether it did.
        """
        before = [buffer.clone() for buffer in self.trained.buffers()] if self.recipe.skip_nonfinite else []
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, hits, count = 0.0, 0.0, 0
        for number, (images, labels) in enumerate(parts):
            torch.manual_seed(self._seed(number, len(parts)))  # for drop-path and dropout
            is_last = number == len(parts) - 1
            if self.shards is not None:
                self.shards.hold_gradients(not is_last)
            with contextlib.nullcontext() if is_last else self.runtime.without_sync(self.wrapped):
                loss, right = self._forward(images, labels, keys[number] if keys else ())
                (loss / len(parts)).backward()
            loss_sum += loss.item() * len(labels)
            hits += right
            count += len(labels)
        sums = self.runtime.sum([loss_sum, hits, count])
        norm = self._clipped_norm()
        result = StepResult(sums[0], sums[1], int(sums[2]), norm)
        is_finite = math.isfinite(result.loss_sum) and math.isfinite(norm)
        if is_finite:
            self._move()
        else:
            self.skipped += 1
            for buffer, value in zip(self.trained.buffers(), before, strict=False):
                buffer.copy_(value)  # BatchNorm has seen what is not finite
        self.step += 1
        return result._replace(is_skipped=not is_finite)

    def rehearse(self, images: Tensor) -> None:
        """Compute the gradient of one part of a step and discard it: settings that do not work fail here.

        Nothing that a step depends on is changed.

        Args:
            images: (b c h w) of any content, on the device.
        """
        before = [buffer.clone() for buffer in self.trained.buffers()]
        self.begin()
        torch.manual_seed(self._seed(0, 1))
        with self.runtime.autocast():
            logits = self.wrapped(images)
        mean_logits(logits).float().mean().backward()
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.trained.buffers(), before, strict=True):
            buffer.copy_(value)

    def _forward(self, images: Tensor, labels: Tensor, keys: Sequence[Key]) -> tuple[Tensor, int]:
        """Loss of a part, and how many of its images were right."""
        images, targets = self.mixing(images, labels, self.step)
        with self.runtime.autocast():
            logits = self.wrapped(images)
        answers = None if self.teacher is None else self.teacher(images, keys)
        right = (mean_logits(logits).detach().argmax(dim=1) == targets.argmax(dim=1)).sum()
        return self.objective(logits, targets, answers), int(right)

    def _seed(self, number: int, parts: int) -> int:
        """Of the chance inside the network: another in every part of every step, in whatever process."""
        return mix_seed(self.recipe.seed, self.step, STEP - (self.runtime.rank * parts + number))

    def _clipped_norm(self) -> float:
        """Clips the gradient, and tells its norm from before."""
        optim = self.recipe.optim
        parameters = [parameter for parameter in self.trained.parameters() if parameter.grad is not None]
        limit = optim.clip_grad if optim.clip_mode == "norm" and optim.clip_grad else math.inf
        total = nn.utils.clip_grad_norm_(parameters, limit)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if optim.clip_grad and optim.clip_mode != "norm":
            dispatch_clip_grad(parameters, optim.clip_grad, mode=optim.clip_mode)
        return norm

    def _move(self) -> None:
        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        if self.ema is not None and self.shards is not None:
            self.shards.update_average(self.ema.get_decay(self.step + 1))
        elif self.ema is not None:
            self.ema.update(self.model, step=self.step + 1)


def train_epoch(
    learner: Learner,
    steps: Iterable[tuple[Sequence[Batch], Sequence[Sequence[Key]]]],
    meter: Meter,
    on_step: Callable[[Meter, StepResult], None],
) -> None:
    """One pass over the training images, or what is left of it.

    Args:
        learner: what learns.
        steps: for each step the batches of this process, and which images they hold.
        meter: what is known of the epoch so far; goes on from there.
        on_step: told after every step; it may raise to stop the run there.
    """
    learner.begin()
    begun = asked = time.perf_counter()
    for parts, keys in steps:
        meter.waiting += time.perf_counter() - asked
        result = learner.learn(parts, keys)
        meter.add(result)
        meter.seconds = time.perf_counter() - begun
        on_step(meter, result)
        asked = time.perf_counter()


def in_steps(
    batches: Iterable[Batch],
    keys_of: Callable[[int], Sequence[Sequence[Key]]],
    first: int,
    accumulate: int,
    runtime: Runtime,
    on_lost: Callable[[Key], None],
) -> Iterator[tuple[list[Batch], list[Sequence[Key]]]]:
    """Batches on the device, `accumulate` at a time, without images that are lost and those they would be mixed with.

    Args:
        batches: of one epoch, from step `first` on.
        keys_of: from the number of a step to which images its parts hold.
        on_lost: told of every image that was left out.

    Raises:
        DataError: all images of a step are lost.
    """
    parts: list[Batch] = []
    keys: list[Sequence[Key]] = []
    step = first
    for images, labels in batches:
        part_keys = keys_of(step)[len(parts)]
        if (labels == LOST).any():
            images, labels, part_keys = _without_lost(images, labels, part_keys, on_lost)
        parts.append((runtime.put(images), runtime.put(labels)))
        keys.append(part_keys)
        if len(parts) == accumulate:
            there = [place for place, part in enumerate(keys) if part]
            if not there:
                raise DataError(f"A step must have images; all of step {step + 1} of this epoch are lost.")
            yield [parts[place] for place in there], [keys[place] for place in there]
            parts, keys, step = [], [], step + 1


def _without_lost(
    images: Tensor, labels: Tensor, keys: Sequence[Key], on_lost: Callable[[Key], None]
) -> tuple[Tensor, Tensor, Sequence[Key]]:
    lost = labels == LOST
    for place in lost.nonzero().flatten().tolist():
        on_lost(keys[place])
    kept = ~(lost | lost.flip(0))  # its partner in mixup goes too
    return images[kept], labels[kept], [key for key, keep in zip(keys, kept.tolist(), strict=True) if keep]


def _heads(model: nn.Module) -> list[nn.Module]:
    network: Any = model  # torch types every attribute of a module as tensor or module
    heads = network.get_classifier()
    return list(heads) if isinstance(heads, (tuple, list)) else [heads]


def _freeze(model: nn.Module, recipe: Recipe) -> None:
    if recipe.optim.freeze == "backbone":
        model.requires_grad_(False)
        for head in _heads(model):
            head.requires_grad_(True)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    optim = recipe.optim
    words: dict[str, Any] = dict(opt=optim.opt, weight_decay=optim.weight_decay)
    if optim.opt == "sgd":
        words |= dict(momentum=optim.momentum, nesterov=optim.momentum > 0)
    else:
        words |= dict(betas=(optim.momentum, optim.beta2))
    if optim.opt == "muon":
        words |= dict(momentum=optim.momentum, nesterov=True)
    if optim.opt in ("adamw", "lamb"):
        words |= dict(eps=optim.eps)
    if optim.opt == "adamw":
        words |= dict(fused=True)  # one pass over the weights
    if optim.layer_decay < 1:
        words |= dict(layer_decay=optim.layer_decay)
    return create_optimizer_v2(model, lr=1.0, **words)  # every step sets its own rate
