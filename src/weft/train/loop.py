"""The training loop: one step and one epoch. Everything that a step changes is in `Learner`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from weft.data import mix_seed
from weft.data.order import Key
from weft.errors import CheckpointError
from weft.lazy import LazyModule
from weft.machine.runtime import Runtime
from weft.models.contract import mean_logits
from weft.recipes import Recipe
from weft.train.objective import Mixing, Objective
from weft.train.schedule import lr_at

timm_optim: Any = LazyModule("timm.optim")
timm_utils: Any = LazyModule("timm.utils")

STEP = -1  # used as sample index in seeds, so that steps and samples draw from different random streams

Batch = tuple[Tensor, Tensor]
"""Normalised images (b c h w) and class indices (b)."""
Count = Annotated[int, Field(ge=0, le=1 << 48)]
"""A number, with the limits that pydantic checks in a saved state."""


class StepResult(NamedTuple):
    """Result of one step over all micro-batches and processes.

    Attributes:
        loss_sum: sum of the loss over the images, in nats.
        hits: number of correct predictions.
        images: number of images.
        grad_norm: gradient norm before clipping.
    """

    loss_sum: float
    hits: float
    images: int
    grad_norm: float

    @property
    def loss(self) -> float:
        """Mean loss per image in nats."""
        return self.loss_sum / self.images

    @property
    def is_finite(self) -> bool:
        """Whether the step changed the weights: loss and gradient were finite."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


@dataclass
class Meter:
    """Running metrics of one epoch.

    Attributes:
        step: number of completed steps of the epoch.
        steps: total number of steps of the epoch.
        count: number of images.
        loss_sum: sum of the loss over these images, in nats.
        hits: number of correct predictions on these augmented images; for a mixed image, its largest class counts.
        seconds: time since the start of the epoch, or since the run was resumed within it.
        waiting: part of `seconds` spent waiting for data.
        seen: number of images in `seconds`.
    """

    step: Count = 0
    steps: Count = 0
    count: Count = 0
    loss_sum: float = 0.0
    hits: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    seen: Count = 0

    @property
    def loss(self) -> float:
        """Mean loss per image in nats."""
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.hits / self.count if self.count else math.nan

    @property
    def images_per_second(self) -> float:
        """Throughput of all processes together."""
        return self.seen / self.seconds if self.seconds else 0.0

    @property
    def waiting_percent(self) -> float:
        """Percentage of the time spent waiting for data."""
        return 100 * self.waiting / self.seconds if self.seconds else 0.0

    def add(self, result: StepResult) -> None:
        """Add the result of a step."""
        self.step += 1
        self.seen += result.images
        self.count += result.images
        self.loss_sum += result.loss_sum
        self.hits += result.hits


class Learner:
    """A model with its optimizer, loss, weight average (EMA) and step counter.

    Args:
        model: the network, on the device of the runtime.
        recipe: complete recipe, with batch size and epochs decided.
        runtime: device, precision and processes.
        steps_per_epoch: number of steps of a full epoch.
        steps: number of steps of the whole run.
        num_classes: number of classes of the dataset.
        labels: class index of every training image, where the loss corrects class frequencies.
        teacher: function from images (b c h w) and their keys to logits (b classes); None without distillation.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        runtime: Runtime,
        steps_per_epoch: int,
        steps: int,
        num_classes: int,
        labels: Sequence[int] = (),
        teacher: Callable[[Tensor, Sequence[Key]], Tensor] | None = None,
    ) -> None:
        self.model, self.recipe, self.runtime, self.teacher = model, recipe, runtime, teacher
        self.steps_per_epoch, self.steps = steps_per_epoch, steps
        self.step = 0
        self.lr_at: Callable[[int], float] = lambda step: lr_at(recipe, step, steps_per_epoch, steps)  # from step 0
        _freeze(model, recipe)
        decay = recipe.optim.ema_decay
        self.ema = timm_utils.ModelEmaV3(model, decay=decay, use_warmup=True) if decay else None
        self.optimizer = _optimizer(model, recipe)
        self.wrapped = runtime.wrap(model)
        if recipe.compile:
            self.wrapped = cast(nn.Module, torch.compile(self.wrapped))
        self.mixing = Mixing(recipe, num_classes)
        self.objective = Objective(recipe, labels, num_classes, runtime.device)

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and save: the weight average (EMA) if there is one."""
        return self.ema.module if self.ema is not None else self.model

    def set_train_mode(self) -> None:
        """Set the modules to training or evaluation mode, as the recipe requires."""
        self.model.train(self.recipe.train_mode == "train")
        if self.recipe.optim.freeze == "backbone":
            self.model.eval()
            for head in _heads(self.model):
                head.train()

    def train_step(self, parts: Sequence[Batch], keys: Sequence[Sequence[Key]] = ()) -> StepResult:
        """Run one optimizer step.

        Args:
            parts: micro-batches of this process, on its device; their gradients are averaged.
            keys: keys of the images of each micro-batch; only used by a teacher with cached logits.

        Returns:
            Loss, correct predictions and gradient norm before the weights were updated. If they are not finite, the
            weights are not updated; statistics of BatchNorm are.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, hits, count = 0.0, 0.0, 0
        for number, (images, labels) in enumerate(parts):
            torch.manual_seed(self._seed(number, len(parts)))  # for stochastic depth and dropout
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else self.runtime.without_sync(self.wrapped):
                loss, num_correct = self._forward(images, labels, keys[number] if keys else ())
                (loss / len(parts)).backward()
            loss_sum += loss.item() * len(labels)
            hits += num_correct
            count += len(labels)
        sums = self.runtime.sum([loss_sum, hits, count])
        norm = self._clip_gradients()
        result = StepResult(sums[0], sums[1], int(sums[2]), norm)
        if result.is_finite:
            self._update_weights()
        self.step += 1
        return result

    def dry_run(self, images: Tensor) -> None:
        """Compute the gradient of one micro-batch and discard it: settings that do not work fail here.

        Leaves everything that a step depends on unchanged.

        Args:
            images: (b c h w) with any values, on the device.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        self.set_train_mode()
        torch.manual_seed(self._seed(0, 1))
        with self.runtime.autocast():
            logits = self.wrapped(images)
        mean_logits(logits).float().mean().backward()
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)

    def _forward(self, images: Tensor, labels: Tensor, keys: Sequence[Key]) -> tuple[Tensor, int]:
        """Return the loss of a micro-batch and its number of correct predictions."""
        images, targets = self.mixing(images, labels, self.step)
        with self.runtime.autocast():
            logits = self.wrapped(images)
        teacher_logits = None if self.teacher is None else self.teacher(images, keys)
        num_correct = (mean_logits(logits).detach().argmax(dim=1) == targets.argmax(dim=1)).sum()
        return self.objective(logits, targets, teacher_logits), int(num_correct)

    def _seed(self, number: int, parts: int) -> int:
        """Return the seed of stochastic depth and dropout, different for every micro-batch, step and process."""
        return mix_seed(self.recipe.seed, self.step, STEP - (self.runtime.rank * parts + number))

    def _clip_gradients(self) -> float:
        """Clip the gradients in place, and return their norm before clipping."""
        optim = self.recipe.optim
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        limit = optim.clip_grad if optim.clip_mode == "norm" and optim.clip_grad else math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        if optim.clip_grad and optim.clip_mode != "norm":
            timm_utils.dispatch_clip_grad(parameters, optim.clip_grad, mode=optim.clip_mode)
        return norm

    def _update_weights(self) -> None:
        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model, step=self.step + 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, bool | int | float]]:
        """Return everything that training changes but the step: tensors, and other values of the optimizer, by name."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": tensor for name, tensor in self.ema.module.state_dict().items()}
        steps = [int(group["step"]) for group in self.optimizer.param_groups if "step" in group]  # of LAMB; all equal
        plain: dict[str, bool | int | float] = {"step": steps[0]} if steps else {}
        for name, parameter in self.model.named_parameters():
            for field, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{field}"] = value
                else:
                    plain[f"{name}.{field}"] = value
        return tensors, plain

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, bool | int | float], step: int) -> None:
        """Restore the result of `state`, and the number of completed steps.

        Raises:
            CheckpointError: the state is of another model or optimizer.
        """
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        try:
            self.model.load_state_dict(parts["model"])
            if self.ema is not None:
                self.ema.module.load_state_dict(parts["ema"] or parts["model"])  # a run that had none starts one
            self._restore_optimizer({**parts["optimizer"], **plain})
        except (RuntimeError, KeyError, ValueError) as error:
            detail = str(error).splitlines()[-1].strip()
            raise CheckpointError(
                f"A saved state must fit the model and optimizer of its run; {detail.rstrip('.')}."
            ) from error
        self.step = step

    def _restore_optimizer(self, values: Mapping[str, Any]) -> None:
        """Restore the optimizer, whose own state dict numbers the parameters, by their names."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
        entries: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, field = key.rpartition(".")
            if name:
                entries.setdefault(numbers[name], {})[field] = value
        of_all = {"step": values["step"]} if "step" in values else {}
        groups = [group | of_all for group in self.optimizer.state_dict()["param_groups"]]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})


def train_epoch(
    learner: Learner,
    steps: Iterable[tuple[Sequence[Batch], Sequence[Sequence[Key]]]],
    meter: Meter,
    on_step: Callable[[Meter, StepResult], None],
) -> None:
    """Train for one epoch, or for the rest of one.

    Args:
        learner: model and optimizer; updated in place.
        steps: for each step, the micro-batches of this process and the keys of their images.
        meter: metrics of the epoch so far; updated in place.
        on_step: called after every step; it may raise to stop the run.
    """
    learner.set_train_mode()
    start = wait_start = time.perf_counter()
    for parts, keys in steps:
        meter.waiting += time.perf_counter() - wait_start
        result = learner.train_step(parts, keys)
        meter.add(result)
        meter.seconds = time.perf_counter() - start
        on_step(meter, result)
        wait_start = time.perf_counter()


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
    arguments: dict[str, Any] = dict(opt=optim.opt, weight_decay=optim.weight_decay)
    if optim.opt == "sgd":
        arguments |= dict(momentum=optim.momentum, nesterov=optim.momentum > 0)
    else:
        arguments |= dict(betas=(optim.momentum, optim.beta2))
    if optim.opt == "muon":
        arguments |= dict(momentum=optim.momentum, nesterov=True)
    if optim.opt in ("adamw", "lamb"):
        arguments |= dict(eps=optim.eps)
    if optim.opt == "adamw":
        arguments |= dict(fused=True)  # one pass over the weights
    if optim.layer_decay < 1:
        arguments |= dict(layer_decay=optim.layer_decay)
    return timm_optim.create_optimizer_v2(model, lr=1.0, **arguments)  # every step sets its own learning rate
