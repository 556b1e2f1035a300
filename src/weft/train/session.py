"""A run in progress: epochs, evaluations, saved states, stops.

What a kill cannot change: which images a step sees and how they are varied (functions of seed, epoch and index), the
chance inside a step (a function of seed and step), and the learning rate (a function of the step). So a state holds the
weights, their average, the moments of the optimiser, the number of the step, and what was counted so far; no more.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import Splits
from weft.data.loading.loader import ImageLoader
from weft.data.loading.order import Key, epochs_of
from weft.durable import writing
from weft.errors import CheckpointError, DivergedError, UsageError, WeftError
from weft.recipes import Recipe
from weft.text import printable
from weft.train.build import machine, name_of
from weft.train.loop import Batch, Learner, Meter, StepResult, in_steps, train_epoch
from weft.train.metrics import Evaluation, measure
from weft.train.progress import Reporter, say
from weft.train.resume import recipe_record
from weft.train.rundir import EpochRow, StepLog, write_metrics
from weft.train.runtime import Runtime, Stop
from weft.train.state import State, newest_step, save_state
from weft.train.track import Tracker

SHOWN = 16  # names of images in a message


@dataclass(frozen=True)
class Best:
    """The best epoch so far, from 1, and what it reached on the held-out images: nats and percent."""

    epoch: int
    loss: float
    top1: float
    top5: float
    count: int


class Stopping(Exception):
    """Raised inside an evaluation to leave it; the run goes on from the step before it."""


class Session:
    """One run.

    Args:
        recipe: with everything decided.
        splits: what it learns from and is measured on.
        out: its directory.
        learner: model and optimiser, at the first step.
        train_batches, val_batches: this process's share of either.
        runtime: where.
        reporter: tells the person.
        stop: what may end it between two steps.
        tracker: tells other programs.
    """

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        out: Path,
        learner: Learner,
        train_batches: ImageLoader,
        val_batches: ImageLoader,
        runtime: Runtime,
        reporter: Reporter,
        stop: Stop,
        tracker: Tracker,
    ) -> None:
        self.recipe, self.splits, self.out, self.learner = recipe, splits, out, learner
        self.train_batches, self.val_batches = train_batches, val_batches
        self.runtime, self.reporter, self.stop, self.tracker = runtime, reporter, stop, tracker
        self.epochs = epochs_of(learner.steps, learner.steps_per_epoch)
        self.epoch = 0
        self.meter = Meter(steps=self._steps_of(0))
        self.history: list[EpochRow] = []
        self.best: Best | None = None
        self.best_result: Evaluation | None = None
        self.without_better = 0
        self.seconds = 0.0
        self._log: StepLog | None = None
        self._saved_at = time.monotonic()
        self._lost: set[int] = set()

    def restore(self, state: State) -> None:
        """Goes on from a state.

        Raises:
            CheckpointError: it is not one of this run.
        """
        facts = state.facts
        restore_learner(self.learner, state)
        self.epoch, self.without_better = facts["epoch"], facts["without_better"]
        self.meter = Meter(**facts["meter"])
        self.history = [EpochRow(*row) for row in facts["history"]]
        self.best = Best(**facts["best"]) if facts["best"] else None
        self.seconds = facts["seconds"]

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or there has been no better one for too long."""
        patience = self.recipe.patience
        return self.epoch == self.epochs or (patience is not None and self.without_better >= patience)

    def carry_out(self) -> None:
        """All that is left to do. Every step is followed by what may end it: a signal, the clock, a loss out of bounds.

        Raises:
            KeyboardInterrupt, SystemExit, StoppedError: somebody wanted it to stop; its state is saved.
            DivergedError: loss or gradient is not finite.
            StorageError: the disk did not take what had to be written.
            UsageError: the memory does not suffice.
        """
        self._log = StepLog(self.out / "steps.csv", self.learner.step) if self.runtime.is_main else None
        begun = time.perf_counter() - self.seconds
        try:
            with self.reporter, self.stop:
                while not self.is_over:
                    if self.stop.after_epochs is not None and self.epoch >= self.stop.after_epochs:
                        self._leave(Stop.EPOCHS)
                    self._epoch()
                    self.seconds = time.perf_counter() - begun
                    self.save()
        except Stopping:
            self._leave(self.stop.reason)
        except (MemoryError, RuntimeError) as error:
            self._explain(error)
        finally:
            if self._log is not None:
                self._log.close()
            self.tracker.finish()

    def result(self) -> Evaluation:
        """The best epoch on the held-out images; measured again where that was before a kill."""
        assert self.best is not None, "the last epoch is evaluated"
        if self.best_result is None:
            model, _ = load_model_dir(self.out / "best")
            self.best_result = self._measured(model.to(self.runtime.device))
        return self.best_result

    def _epoch(self) -> None:
        begun = time.perf_counter()
        first = self.meter.step
        lr = self.learner.lr_at(self.epoch * self.learner.steps_per_epoch)
        self.train_batches.start_at(self.epoch, first)
        train_epoch(self.learner, self._steps(first), self.meter, self._after_step)
        self.epoch += 1
        self.learner.gather()
        result = None
        if self._is_measured_after(self.epoch):
            self.runtime.share_buffers(self.learner.best_guess)
            result = self._measured(self.learner.best_guess, self._between_evaluated)
        self._add_row(begun, lr, result)
        self._keep_models(result)
        self.meter = Meter(steps=self._steps_of(self.epoch))

    def _steps(self, first: int) -> Iterator[tuple[list[Batch], list[Any]]]:
        """What is left of an epoch, step by step."""
        order = self.train_batches.order
        steps = in_steps(
            self.train_batches,
            lambda step: order.parts(self.epoch, step),
            first,
            self.recipe.accumulate,
            self.runtime,
            self._note_lost,
        )
        return itertools.islice(steps, self.meter.steps - first)

    def _steps_of(self, epoch: int) -> int:
        """Steps of an epoch: the last may be shorter."""
        return min(self.learner.steps_per_epoch, self.learner.steps - epoch * self.learner.steps_per_epoch)

    def _is_measured_after(self, epoch: int) -> bool:
        return epoch == self.epochs or epoch % self.recipe.evaluate_every == 0

    def _after_step(self, meter: Meter, result: StepResult) -> None:
        """Tells of a step, saves when it is time, and stops where that is wanted."""
        step = self.learner.step
        lr = self.learner.lr_at(step - 1)
        if self._log is not None:
            self._log.add(step, self.epoch + 1, lr, result.loss, result.grad_norm)
        if result.is_skipped:
            self._judge_skipped(result, lr)
        self.reporter.step(self.epoch + 1, meter)
        self.tracker.step(step, loss=result.loss, lr=lr, grad_norm=result.grad_norm)
        reason, is_due = self.runtime.max([self.stop.reason, self._is_save_due(step)])
        if is_due or reason:
            self.save()
        if reason:
            self._leave(int(reason))

    def _is_save_due(self, step: int) -> bool:
        save = self.recipe.save
        is_step = save.every_steps is not None and step % save.every_steps == 0
        return is_step or bool(save.every_minutes and time.monotonic() - self._saved_at > 60 * save.every_minutes)

    def _judge_skipped(self, result: StepResult, lr: float) -> None:
        """A step whose loss or gradient was not finite, and which therefore moved nothing."""
        skipped, allowed = self.learner.skipped, self.recipe.skip_nonfinite
        is_loss = not math.isfinite(result.loss)
        what, value = ("loss", result.loss) if is_loss else ("norm of the gradient", result.grad_norm)
        keys = self.train_batches.order.keys(self.epoch, self.meter.step - 1)
        where = (
            f"at step {self.learner.step} (epoch {self.epoch + 1}), learning rate {lr:.3g}, images {self._names(keys)}"
        )
        if skipped <= allowed:
            self.reporter.note(f"Left out a step: the {what} was {value} {where} ({skipped} of {allowed} allowed).")
            return
        if self._log is not None:
            self._log.flush()
        before = f" {allowed} such steps were left out before." if allowed else ""
        raise DivergedError(
            f"The {what} must be finite; got {value} {where}. This step did not change the weights, and the last state "
            f"is kept.{before} Lower the learning rate, lengthen schedule.warmup_epochs, or look at these images."
        )

    def _names(self, keys: list[Key]) -> str:
        indices = list(dict.fromkeys(index for _, index, _ in keys))
        named = ", ".join(name_of(self.splits.train, index) for index in indices[:SHOWN])
        return named + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")

    def _note_lost(self, key: Key) -> None:
        if key[1] not in self._lost:
            self._lost.add(key[1])
            self.reporter.note(f"{name_of(self.splits.train, key[1])} vanished or broke; training goes on without it.")

    def _measured(self, model: Any, on_batch: Callable[[int], None] = lambda count: None) -> Evaluation:
        return measure(
            model,
            self.val_batches,
            self.splits.classes,
            self.runtime,
            key_of=lambda place: name_of(self.splits.val, place),
            excluded=[(printable(bad.key), bad.reason) for bad in self.splits.bad if bad.split != "train"],
            on_batch=on_batch,
        )

    def _between_evaluated(self, count: int) -> None:
        """Leaves an evaluation where a stop is wanted; several processes, which wait for each other, end it first."""
        if self.stop.reason and self.runtime.world == 1:
            self.epoch -= 1
            self.save()
            raise Stopping

    def _add_row(self, begun: float, lr: float, result: Evaluation | None) -> None:
        meter = self.meter
        scores = (result.loss, result.top1, result.top5) if result is not None else (math.nan, math.nan, math.nan)
        speed, seconds = meter.images_per_second, time.perf_counter() - begun
        learned = (self.learner.step, lr, meter.loss, meter.top1)
        row = EpochRow(self.epoch, *learned, *scores, speed, meter.waiting_percent, seconds)
        self.history.append(row)
        is_best = result is not None and self._is_better(result)
        if result is not None:
            self.without_better = 0 if is_best else self.without_better + 1
        if is_best and result is not None:
            self.best = Best(self.epoch, result.loss, result.top1, result.top5, result.count)
            self.best_result = result
        self.reporter.epoch(row, is_best)
        self.tracker.step(self.learner.step, **{k: v for k, v in row._asdict().items() if k not in ("step", "lr")})

    def _is_better(self, result: Evaluation) -> bool:
        return self.best is None or (result.top1, -result.loss) > (self.best.top1, -self.best.loss)

    def _keep_models(self, result: Evaluation | None) -> None:
        if not self.runtime.is_main:
            return
        if result is not None and self.best is not None and self.best.epoch == self.epoch:
            self._keep("best")
        self._keep("last")
        write_metrics(self.out / "metrics.csv", self.history)

    def _keep(self, name: str) -> None:
        with writing(self.out / name):
            save_model_dir(self.learner.best_guess, self.out / name, label_names=self.splits.classes, force=True)

    def save(self) -> None:
        """Writes the state of this step."""
        self._saved_at = time.monotonic()
        self.learner.gather()
        tensors, facts = learner_state(self.learner)
        if not self.runtime.is_main:
            return
        if self._log is not None:
            self._log.flush()
        facts |= {
            "epoch": self.epoch,
            "meter": self.meter.as_dict(),
            "history": [list(row) for row in self.history],
            "best": vars(self.best) if self.best else None,
            "without_better": self.without_better,
            "seconds": self.seconds,
            "machine": machine(self.runtime),
            "recipe": recipe_record(self.recipe),
            "teacher": getattr(self.learner.teacher, "record", None),
        }
        save_state(self.out / "state", self.learner.step, tensors, facts, self.recipe.save.keep)

    def _leave(self, reason: int) -> NoReturn:
        message = (
            f"Stopped after step {self.learner.step} of {self.learner.steps}: {Stop.REASONS[reason]}."
            f" Saved in {self.out / 'state'}; go on with: weft train --resume {self.out}"
        )
        if self.runtime.is_main:
            self._keep("last")
        self._depart(reason, message)

    def _depart(self, reason: int, message: str) -> NoReturn:
        if self.runtime.is_main and reason in Stop.CODES:
            say(message)  # the others are told where they are caught
        self.stop.leave(reason, message)

    def _explain(self, error: MemoryError | RuntimeError) -> NoReturn:
        """Turn errors of torch that are the run's circumstances into sentences.

        Nothing is saved here. The error may have come in the middle of a step, when BatchNorm has seen images that the
        weights have not: a run that resumed from such a state would end with other weights, without a sign.
        """
        text = str(error)
        if self.stop.reason:  # a signal to all processes of a group may end another one before this one has stopped
            message = f"Stopped: {Stop.REASONS[self.stop.reason]}; the step in progress was left. {self._last_saved()}"
            self._depart(self.stop.reason, message)
        if "DataLoader worker" in text:
            raise WeftError(
                f"A process that reads images must not end while a run needs it; one did ({text.splitlines()[0]})."
                f" Memory may have run out: try fewer --workers. {self._last_saved()}"
            ) from error
        if is_of_memory(error):
            raise memory_error(self.recipe) from error
        raise error

    def _last_saved(self) -> str:
        """Sentence on the newest state on the disk."""
        newest = newest_step(self.out / "state")
        if newest is None:
            return "No state had been saved yet: start again."
        return f"The last saved state is that of step {newest}; go on with: weft train --resume {self.out}"


def is_of_memory(error: Exception) -> bool:
    """Whether memory did not suffice, of the machine or of a GPU."""
    signs = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def memory_error(recipe: Recipe) -> UsageError:
    """The error for a step that does not fit into memory."""
    return UsageError(
        f"A step must fit into memory; batch_size {recipe.batch_size} in {recipe.accumulate} part(s) does not."
        " Lower --batch-size, or raise accumulate, or set grad_checkpointing."
    )


def learner_state(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that training has changed: tensors, and plain values. Asked of all processes at once, after a `gather`."""
    tensors = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    if learner.ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in learner.ema.module.state_dict().items()}
    optimizer = learner.optimizer_state()
    plain: dict[str, Any] = {}
    for number, moments in optimizer["state"].items():
        for name, value in moments.items():
            (tensors if isinstance(value, Tensor) else plain)[f"optimizer.{number}.{name}"] = value
    groups = [{"step": int(group["step"])} if "step" in group else {} for group in optimizer["param_groups"]]
    return tensors, {"step": learner.step, "skipped": learner.skipped, "optimizer": plain, "groups": groups}


def restore_learner(learner: Learner, state: State) -> None:
    """Puts back what `learner_state` took.

    Raises:
        CheckpointError: it was taken of another model or optimiser.
    """
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for name, tensor in state.tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    try:
        learner.model.load_state_dict(parts["model"])
        if learner.ema is not None:
            learner.ema.module.load_state_dict(parts["ema"])
        if learner.shards is not None:
            learner.shards.spread(learner.model, None if learner.ema is None else learner.ema.module)
        _restore_optimizer(learner, parts["optimizer"], state.facts)
    except (RuntimeError, KeyError, ValueError) as error:
        detail = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"A run's state must fit its model and optimiser; this one does not: {detail}") from error
    learner.step, learner.skipped = state.facts["step"], state.facts["skipped"]


def _restore_optimizer(learner: Learner, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    plain = {name.removeprefix("optimizer."): value for name, value in facts["optimizer"].items()}
    own = learner.optimizer.state_dict()
    moments: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **plain}.items():
        number, _, moment = name.partition(".")
        moments.setdefault(int(number), {})[moment] = value
    if learner.shards is not None:
        weights = [weight for group in learner.optimizer.param_groups for weight in group["params"]]
        for number, entry in moments.items():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    entry[name] = learner.shards.part_of(value, weights[number])
    groups = [group | more for group, more in zip(own["param_groups"], facts["groups"], strict=True)]
    learner.optimizer.load_state_dict({"state": moments, "param_groups": groups})
