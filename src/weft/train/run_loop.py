"""A run in progress: epochs, evaluations, saved states, stops.

A run resumes bit-exactly, because everything random is a pure function: the images of a step and their augmentation of
(seed, epoch, index), stochastic depth and dropout of (seed, step), and the learning rate of the step. So a state only
holds the weights, their average, the optimizer state, the step and the metrics so far.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, distributed

from weft.checkpoints import load_model_dir, save_model_dir
from weft.data.order import Key, epochs_of
from weft.errors import CheckpointError, DivergedError, WeftError
from weft.files import writing
from weft.inference.inputs import name_of
from weft.inference.metrics import Evaluation, measure
from weft.memory import is_out_of_memory
from weft.progress import say
from weft.runs.directory import EpochRow, StepLog, best_of, write_metrics
from weft.text import first_few, printable
from weft.train.environment import machine
from weft.train.loop import Batch, Learner, Meter, StepResult, group_into_steps, train_epoch
from weft.train.plan import Plan
from weft.train.refusals import memory_error
from weft.train.reporter import Reporter, epoch_line
from weft.train.resume import recipe_record
from weft.train.state import State, newest_step, save_state
from weft.train.stop import Stop
from weft.train.track import Tracker

MAX_NAMES = 16  # image names in a message


@dataclass(frozen=True)
class Best:
    """The best epoch so far, counted from 1 (0 is before training): validation loss in nats, accuracies in percent."""

    epoch: int
    loss: float
    top1: float
    top5: float
    count: int


class EvaluationInterrupted(Exception):
    """Raised to leave an evaluation when a stop is requested; the run resumes after the last step of its epoch."""


class Session:
    """A run in progress.

    Args:
        plan: recipe, dataset and batches.
        out: the run directory.
        learner: model and optimizer, at the first step.
        stop: requests to stop between two steps.
        tracker: logs to TensorBoard or Weights & Biases.
        resumed_by: the run directory to name in messages; None for `out`.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        learner: Learner,
        stop: Stop,
        tracker: Tracker,
        resumed_by: Path | None = None,
    ) -> None:
        self.recipe, self.splits, self.out, self.learner = plan.recipe, plan.splits, out, learner
        self.resumed_by = resumed_by or out
        self.train_batches, self.val_batches, self.runtime = plan.batches, plan.val_batches, plan.runtime
        self.stop, self.tracker = stop, tracker
        self.epoch = 0
        self.history: list[EpochRow] = []
        self.meter = Meter(steps=self._steps_of_epoch)
        self.best: Best | None = None
        self.best_result: Evaluation | None = None
        self.evaluations_since_best = 0
        self.seconds = 0.0
        self._start: float | None = None  # of `run`, minus the seconds of earlier processes
        self._log: StepLog | None = None
        self._reporter: Reporter
        self._saved_at = time.monotonic()

    def restore(self, state: State) -> None:
        """Restore model, optimizer and metrics from a state, and metrics.csv from the latter.

        Raises:
            CheckpointError: the state does not fit the model or the optimizer.
        """
        metadata = state.metadata
        restore_learner(self.learner, state)
        self.epoch, self.evaluations_since_best = metadata["epoch"], metadata["without_better"]
        self.history = [EpochRow(*row) for row in metadata["history"]]
        self.meter = Meter(**{**metadata["meter"], "steps": self._steps_of_epoch})
        self.best = Best(**metadata["best"]) if metadata["best"] else None
        self.seconds = metadata["seconds"]
        if self.runtime.is_main:
            write_metrics(self.out / "metrics.csv", self.history)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are trained and evaluated, or early stopping applies."""
        patience = self.recipe.patience
        is_stopped = patience is not None and self.evaluations_since_best >= patience
        return self._first_step >= self.learner.steps or is_stopped

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run."""
        return self.epoch + epochs_of(self.learner.steps - self._first_step, self.learner.steps_per_epoch)

    @property
    def _first_step(self) -> int:
        """Step at which the epoch in progress begins.

        It follows from the history, since earlier epochs may be shorter: the last one of a run that was finished, and
        then resumed for more steps.
        """
        return self.history[-1].step if self.history else 0

    @property
    def _steps_of_epoch(self) -> int:
        """Number of steps of the epoch in progress; the last epoch may be shorter."""
        return min(self.learner.steps_per_epoch, self.learner.steps - self._first_step)

    def run(self) -> None:
        """Run all remaining epochs. After every step, check for signals, the time limit and non-finite losses.

        Raises:
            KeyboardInterrupt, SystemExit, StoppedError: a stop was requested; the state is saved.
            DivergedError: loss or gradient is not finite.
            StorageError: a file cannot be written.
            UsageError: a step does not fit into memory.
        """
        self._log = StepLog(self.out / "steps.csv", self.learner.step) if self.runtime.is_main else None
        start = self._start = time.perf_counter() - self.seconds
        try:
            with Reporter(self.epochs) as self._reporter, self.stop:
                while not self.is_finished:
                    if self.stop.after_epochs is not None and self.epoch >= self.stop.after_epochs:
                        self._stop_run(Stop.EPOCHS)
                    self._epoch()
                    self.seconds = time.perf_counter() - start
                    self.save()
        except EvaluationInterrupted:
            self._stop_run(self.stop.reason)
        except (MemoryError, RuntimeError) as error:
            self._raise_explained(error)
        finally:
            self._start = None
            if self._log is not None:
                self._log.close()
            self.tracker.finish()

    def evaluate_start(self) -> None:
        """Evaluate the initial weights as epoch 0, and save them: the best model may be the one before training."""
        start = time.perf_counter()
        self.meter = Meter()
        result = self._evaluate(self.learner.eval_model)
        self._add_row(start, 0.0, result)
        self._save_models(result)
        self.meter = Meter(steps=self._steps_of_epoch)
        self.seconds = time.perf_counter() - start
        self.save()

    def result(self) -> Evaluation:
        """Return the results of the best epoch; if it was before the run was resumed, evaluate its model again."""
        assert self.best is not None, "the last epoch is evaluated"
        if self.best_result is None:
            model, _ = load_model_dir(self.out / "best")
            self.best_result = self._evaluate(model.to(self.runtime.device))
        return self.best_result

    def _epoch(self) -> None:
        start = time.perf_counter()
        first, is_last = self.meter.step, self._first_step + self.meter.steps == self.learner.steps
        lr = self.learner.lr_at(self._first_step)
        self.train_batches.start_at(self.epoch, first)
        train_epoch(self.learner, self._steps(first), self.meter, self._after_step)
        self.epoch += 1
        result = None
        if is_last or self.epoch % self.recipe.evaluate_every == 0:
            self.runtime.share_buffers(self.learner.eval_model)
            result = self._evaluate(self.learner.eval_model, self._check_stop_in_evaluation)
        self._add_row(start, lr, result)
        self._save_models(result)
        self.meter = Meter(steps=self._steps_of_epoch)

    def _steps(self, first: int) -> Iterator[tuple[list[Batch], Sequence[Sequence[Key]]]]:
        """Yield the remaining steps of the epoch."""
        order = self.train_batches.order
        steps = group_into_steps(
            self.train_batches,
            lambda step: order.parts(self.epoch, step),
            first,
            self.recipe.accumulate,
            self.runtime,
        )
        return itertools.islice(steps, self.meter.steps - first)

    def _after_step(self, meter: Meter, result: StepResult) -> None:
        """Log a step, save the state if it is due, and stop if requested."""
        step = self.learner.step
        lr = self.learner.lr_at(step - 1)
        if self._log is not None:
            self._log.add(step, self.epoch + 1, lr, result.loss, result.grad_norm)
        if not result.is_finite:
            self._raise_diverged(result, lr)
        self._reporter.step(self.epoch + 1, meter)
        self.tracker.step(step, loss=result.loss, lr=lr, grad_norm=result.grad_norm)
        reason, is_due = self.runtime.max([self.stop.reason, self._is_save_due(step)])
        if is_due or reason:
            self.save()
        if reason:
            self._stop_run(int(reason))

    def _is_save_due(self, step: int) -> bool:
        save = self.recipe.save
        is_step = save.every_steps is not None and step % save.every_steps == 0
        return is_step or bool(save.every_minutes and time.monotonic() - self._saved_at > 60 * save.every_minutes)

    def _raise_diverged(self, result: StepResult, lr: float) -> NoReturn:
        is_loss = not math.isfinite(result.loss)
        name, value = ("loss", result.loss) if is_loss else ("gradient norm", result.grad_norm)
        keys = self.train_batches.order.keys(self.epoch, self.meter.step - 1)
        if self._log is not None:
            self._log.flush()
        raise DivergedError(
            f"The {name} must be finite; got {value} at step {self.learner.step} (epoch {self.epoch + 1}), learning"
            f" rate {lr:.3g}, images {self._names(keys)}. This step did not change the weights, and the last state is"
            " kept. Lower the learning rate, increase schedule.warmup_epochs, or check these images."
        )

    def _names(self, keys: list[Key]) -> str:
        indices = list(dict.fromkeys(index for _, index, _ in keys))
        return first_few((name_of(self.splits.train, index) for index in indices), MAX_NAMES)

    def _evaluate(self, model: Any, on_batch: Callable[[int], None] = lambda count: None) -> Evaluation:
        return measure(
            model,
            self.val_batches,
            self.splits.classes,
            self.runtime,
            key_of=lambda index: name_of(self.splits.val, index),
            excluded=[(printable(bad.key), bad.reason) for bad in self.splits.bad if bad.split != "train"],
            on_batch=on_batch,
        )

    def _check_stop_in_evaluation(self, count: int) -> None:
        """Interrupt the evaluation if a stop is requested; several processes, which synchronise, finish it first."""
        if self.stop.reason and self.runtime.world == 1:
            self.epoch -= 1
            self.save()
            raise EvaluationInterrupted

    def _add_row(self, start: float, lr: float, result: Evaluation | None) -> None:
        meter = self.meter
        scores = (result.loss, result.top1, result.top5) if result is not None else (math.nan, math.nan, math.nan)
        balanced = math.nan if result is None else result.balanced_accuracy
        throughput, seconds = meter.images_per_second, time.perf_counter() - start
        training = (self.learner.step, lr, meter.loss, meter.top1)
        row = EpochRow(self.epoch, *training, *scores, throughput, meter.waiting_percent, seconds, balanced)
        self.history.append(row)
        is_best = result is not None and best_of(self.history, self.recipe.best) is row
        if result is not None:
            self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        if is_best and result is not None:
            self.best = Best(self.epoch, result.loss, result.top1, result.top5, result.count)
            self.best_result = result
        say(epoch_line(row, self.epochs, is_best=is_best))
        self.tracker.step(self.learner.step, **{k: v for k, v in row._asdict().items() if k not in ("step", "lr")})

    def _save_models(self, result: Evaluation | None) -> None:
        if not self.runtime.is_main:
            return
        if result is not None and self.best is not None and self.best.epoch == self.epoch:
            self._save_model("best")
        self._save_model("last")
        write_metrics(self.out / "metrics.csv", self.history)

    def _save_model(self, name: str) -> None:
        with writing(self.out / name):
            save_model_dir(self.learner.eval_model, self.out / name, label_names=self.splits.classes, force=True)

    def save(self) -> None:
        """Save the state of the current step."""
        self._saved_at = time.monotonic()
        if not self.runtime.is_main:
            return
        tensors, metadata = learner_state(self.learner)
        if self._log is not None:
            self._log.flush()
        metadata |= {
            "epoch": self.epoch,
            "meter": self.meter.as_dict(),
            "history": [list(row) for row in self.history],
            "best": vars(self.best) if self.best else None,
            "without_better": self.evaluations_since_best,
            "seconds": self.seconds if self._start is None else time.perf_counter() - self._start,
            "machine": machine(self.runtime),
            "recipe": recipe_record(self.recipe),
            "teacher": getattr(self.learner.teacher, "record", None),
        }
        save_state(self.out / "state", self.learner.step, tensors, metadata, self.recipe.save.keep)

    def _stop_run(self, reason: int) -> NoReturn:
        message = (
            f"Stopped after step {self.learner.step} of {self.learner.steps}: {Stop.REASONS[reason]}."
            f" Saved in {self.out / 'state'}; resume with: weft train --resume {self.resumed_by}"
        )
        if self.runtime.is_main:
            self._save_model("last")
        self._exit(reason, message)

    def _exit(self, reason: int, message: str) -> NoReturn:
        if self.runtime.is_main and reason in Stop.CODES:
            # SystemExit prints no message; the command line prints those of the other exceptions
            say(message, always=True)
        self.stop.raise_for(reason, message)

    def _raise_explained(self, error: MemoryError | RuntimeError) -> NoReturn:
        """Raise an error of PyTorch that the machine caused as a WeftError with advice; others unchanged.

        Saves no state. The error may have occurred within a step, after BatchNorm has updated its statistics and before
        the weights changed: a run that resumed from such a state would silently end with different weights.
        """
        text = str(error)
        # a signal to a process group may end another process before this one has stopped
        if self.stop.requested is not None and _is_lost_process(error):
            reason = Stop.REASONS[self.stop.reason]
            message = f"Stopped: {reason}; the step in progress was discarded. {self._newest_state_text()}"
            self._exit(self.stop.reason, message)
        if "DataLoader worker" in text:
            raise WeftError(
                f"The worker processes must run until the end; one was terminated ({text.splitlines()[0]})."
                f" The machine may be out of memory: lower --workers. {self._newest_state_text()}"
            ) from error
        if is_out_of_memory(error):
            raise memory_error(self.recipe) from error
        raise error

    def _newest_state_text(self) -> str:
        """Return a sentence that names the newest saved state and how to resume from it."""
        newest = newest_step(self.out / "state")
        if newest is None:
            return "No state was saved yet: start the run again."
        return f"The newest saved state is of step {newest}; resume with: weft train --resume {self.resumed_by}"


def _is_lost_process(error: BaseException) -> bool:
    """Return whether an error comes from the end of another process: a data loader worker, or one of the same run."""
    text = str(error)
    return isinstance(error, distributed.DistError) or "DataLoader worker" in text or "gloo" in text.lower()


def learner_state(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return everything that training changes: tensors, and metadata."""
    tensors = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    if learner.ema is not None:
        tensors |= {f"ema.{name}": tensor for name, tensor in learner.ema.module.state_dict().items()}
    optimizer = learner.optimizer.state_dict()
    plain: dict[str, Any] = {}
    for number, entry in optimizer["state"].items():
        for name, value in entry.items():
            (tensors if isinstance(value, Tensor) else plain)[f"optimizer.{number}.{name}"] = value
    groups = [{"step": int(group["step"])} if "step" in group else {} for group in optimizer["param_groups"]]
    return tensors, {"step": learner.step, "optimizer": plain, "groups": groups}


def restore_learner(learner: Learner, state: State) -> None:
    """Restore the result of `learner_state`.

    Raises:
        CheckpointError: the state is of another model or optimizer.
    """
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for name, tensor in state.tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    try:
        learner.model.load_state_dict(parts["model"])
        if learner.ema is not None:
            learner.ema.module.load_state_dict(parts["ema"] or parts["model"])  # a run that had none starts one
        _restore_optimizer(learner, parts["optimizer"], state.metadata)
    except (RuntimeError, KeyError, ValueError) as error:
        detail = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"A saved state must fit the model and optimizer of its run; {detail.rstrip('.')}."
        ) from error
    learner.step = state.metadata["step"]


def _restore_optimizer(learner: Learner, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    plain = {name.removeprefix("optimizer."): value for name, value in metadata["optimizer"].items()}
    own = learner.optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **plain}.items():
        number, _, field = name.partition(".")
        entries.setdefault(int(number), {})[field] = value
    groups = [group | saved for group, saved in zip(own["param_groups"], metadata["groups"], strict=True)]
    learner.optimizer.load_state_dict({"state": entries, "param_groups": groups})
