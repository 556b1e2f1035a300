"""A training run: its epochs, evaluations, saved states and stops.

A run resumes bit-exactly, because everything random is a pure function: the images of a step and their augmentation of
(seed, epoch, index), stochastic depth and dropout of (seed, step), and the learning rate of the step. So a state only
holds the weights, their average, the optimizer state, the step and the metrics so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

from weft.checkpoints import load_model_dir, save_model_dir
from weft.data.order import epochs_of
from weft.errors import DivergedError, WeftError
from weft.files import writing
from weft.inference.inputs import name_of
from weft.inference.measurement import measure
from weft.inference.metrics import Evaluation
from weft.inference.torch_model import infer
from weft.machine.memory import is_out_of_memory
from weft.models.contract import evaluation_mode
from weft.progress import say
from weft.runs.directory import EpochRow, StepLog, best_of, write_metrics
from weft.text import first_few, printable
from weft.train.environment import machine
from weft.train.loop import Learner, Meter, StepResult, train_epoch
from weft.train.plan import Plan
from weft.train.refusals import memory_error
from weft.train.reporter import Reporter, epoch_line
from weft.train.resume import SavedRun, recipe_record
from weft.train.state import RunState, newest_step, save_state
from weft.train.stop import Stop
from weft.train.track import Tracker

MAX_NAMES = 16  # image names in a message


class Run:
    """A training run: `weft.train.begin` makes it, `weft.train.finish` comes after it.

    Args:
        plan: recipe, dataset, network and batches.
        learner: of the plan, with the weights that training starts from.
        out: the run directory.
        stop: requests to stop between two steps.
        tracker: of the first process, open; closed after the last step.
        whole: of a fold, the run directory that resumes the whole cross-validation; else `out`.

    Attributes:
        history: a row for each epoch that has ended.
        meter: metrics of the epoch in progress.
        unimproved: evaluations since the best one, for early stopping.
        evaluation: of the best epoch; None if that was before the run was resumed.
        seconds: duration of training and evaluation.
    """

    _reporter: Reporter

    def __init__(self, plan: Plan, learner: Learner, out: Path, stop: Stop, tracker: Tracker, whole: Path) -> None:
        self.plan, self.recipe, self.splits, self.runtime = plan, plan.recipe, plan.splits, plan.runtime
        self.learner, self.out, self.stop, self._tracker, self.whole = learner, out, stop, tracker, whole
        self.history: list[EpochRow] = []
        self.meter = Meter()
        self.unimproved, self.seconds = 0, 0.0
        self.evaluation: Evaluation | None = None
        self._damaged: set[str] = set()  # in earlier processes
        self._start: float | None = None  # of the epochs, minus the seconds of earlier processes
        self._log: StepLog | None = None
        self._saved_at = time.monotonic()

    def restore(self, saved: SavedRun) -> None:
        """Restore model, optimizer and metrics from a state, and metrics.csv from the latter.

        Raises:
            CheckpointError: the state does not fit the model or the optimizer.
        """
        state = saved.state
        self.learner.restore(saved.tensors, state.optimizer, state.step)
        self.history, self.unimproved, self.seconds = state.history, state.unimproved, state.seconds
        self._damaged = set(state.damaged)
        self.meter = dataclasses.replace(state.meter, seconds=0.0, waiting=0.0, seen=0)  # times are of this process
        if self.runtime.is_main:
            write_metrics(self.out / "metrics.csv", self.history)

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self.history[-1].epoch if self.history else 0

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run."""
        return self.epoch + epochs_of(self.learner.steps - self._first_step, self.learner.steps_per_epoch)

    @property
    def best(self) -> EpochRow | None:
        """The epoch whose model is in best/; None before the first evaluation."""
        return best_of(self.history, self.recipe.best)

    @property
    def damaged(self) -> list[str]:
        """Keys of the training images in place of which others were used; all processes must ask together."""
        if self.recipe.data.damaged == "stop":
            return []
        own = [self.splits.train.keys[index] for index in sorted(self.plan.batches.damaged)]
        return sorted(self._damaged.union(*self.runtime.gather(own)))

    @property
    def is_finished(self) -> bool:
        """Whether all steps are trained and evaluated, or early stopping applies."""
        patience = self.recipe.patience
        is_stopped = patience is not None and self.unimproved >= patience
        return self._first_step >= self.learner.steps or is_stopped

    @property
    def _first_step(self) -> int:
        """Step at which the epoch in progress begins."""
        # earlier epochs may be shorter: the last one of a run that was finished, and then resumed for more steps
        return self.history[-1].step if self.history else 0

    @property
    def _steps_of_epoch(self) -> int:
        """Number of steps of the epoch in progress; the last epoch may be shorter."""
        return min(self.learner.steps_per_epoch, self.learner.steps - self._first_step)

    def evaluate_best(self) -> Evaluation:
        """Return the evaluation of the best epoch; if it was before the run was resumed, evaluate its model again."""
        if self.evaluation is None:
            model, _ = load_model_dir(self.out / "best")
            self.evaluation = self._evaluate(model.to(self.runtime.device))
        return self.evaluation

    def train(self, saved: SavedRun | None = None) -> None:
        """Train all remaining epochs. After every step, check for signals, the time limit and non-finite losses.

        Args:
            saved: the state to resume from; None for a new run.

        Raises:
            KeyboardInterrupt, SystemExit, StoppedError: a stop was requested; the state is saved.
            DivergedError: loss or gradient is not finite.
            StorageError: a file cannot be written.
            UsageError: a step does not fit into memory.
        """
        self.runtime.wait()
        if saved is not None:
            self.restore(saved)
            if saved.changes_result:  # later states have the new settings, and early stopping counts from here on
                self.unimproved = 0
                self.save()
        elif self.recipe.head_init == "probe":
            self._evaluate_start()
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
        except (MemoryError, RuntimeError) as error:
            # Saves no state: the error may have occurred within a step, after BatchNorm has updated its statistics and
            # before the weights changed. A run resumed from such a state would silently end with different weights.
            self._raise_explained(error)
        finally:
            self._start = None
            if self._log is not None:
                self._log.close()
            self._tracker.finish()

    def _evaluate_start(self) -> None:
        """Evaluate the initial weights as epoch 0, and save them: the best model may be the one before training."""
        start = time.perf_counter()
        self._end_epoch(0, start, 0.0, self._evaluate(self.learner.eval_model))
        self.seconds = time.perf_counter() - start
        self.save()

    def _epoch(self) -> None:
        start, number = time.perf_counter(), self.epoch + 1
        self.meter.steps = self._steps_of_epoch
        first, is_last = self.meter.step, self._first_step + self.meter.steps == self.learner.steps
        lr = self.learner.lr_at(self._first_step)
        steps = itertools.islice(self.plan.training_steps(self.epoch, first), self.meter.steps - first)
        train_epoch(self.learner, steps, self.meter, self._after_step)
        evaluation = None
        if is_last or number % self.recipe.evaluate_every == 0:
            self.runtime.share_buffers(self.learner.eval_model)
            evaluation = self._evaluate(self.learner.eval_model, self._check_stop_in_evaluation)
        self._end_epoch(number, start, lr, evaluation)

    def _after_step(self, meter: Meter, result: StepResult) -> None:
        """Log a step, save the state if it is due, and stop if requested."""
        step = self.learner.step
        lr = self.learner.lr_at(step - 1)
        if self._log is not None:
            self._log.add(step, self.epoch + 1, lr, result.loss, result.grad_norm)
        if not result.is_finite:
            self._flush_log()
            raise self._diverged(meter, result, lr)
        self._reporter.step(self.epoch + 1, meter)
        self._tracker.step(step, loss=result.loss, lr=lr, grad_norm=result.grad_norm)
        reason, is_due = self.runtime.max([self.stop.reason, self._is_save_due(step)])
        if is_due or reason:
            self.save()
        if reason:
            self._stop_run(int(reason))

    def _is_save_due(self, step: int) -> bool:
        save = self.recipe.save
        is_step = save.every_steps is not None and step % save.every_steps == 0
        return is_step or bool(save.every_minutes and time.monotonic() - self._saved_at > 60 * save.every_minutes)

    def _evaluate(self, model: Any, on_batch: Callable[[int], None] = lambda count: None) -> Evaluation:
        with evaluation_mode(model):
            return measure(
                lambda images: infer(model, images, self.runtime),
                self.plan.val_batches,
                self.splits.classes,
                self.runtime,
                key_of=lambda index: name_of(self.splits.val, index),
                excluded=[(printable(bad.key), bad.reason) for bad in self.splits.bad if bad.split != "train"],
                on_batch=on_batch,
            )

    def _check_stop_in_evaluation(self, count: int) -> None:
        """Stop within an evaluation if requested; several processes, which synchronise, finish it first."""
        if (reason := self.stop.reason) and self.runtime.world == 1:
            self.save()
            self._stop_run(reason)

    def _end_epoch(self, number: int, start: float, lr: float, evaluation: Evaluation | None) -> None:
        """Add the row of an epoch that began at `start`, print it, and save the models."""
        meter, none = self.meter, (math.nan, math.nan, math.nan)
        row = EpochRow(
            number,
            self.learner.step,
            lr,
            meter.loss,
            meter.top1,
            *(none if evaluation is None else (evaluation.loss, evaluation.top1, evaluation.top5)),
            meter.images_per_second,
            meter.waiting_percent,
            time.perf_counter() - start,
            math.nan if evaluation is None else evaluation.balanced_accuracy,
        )
        self.history.append(row)
        self.meter = Meter()
        is_best = evaluation is not None and self.best is row
        if is_best:
            self.evaluation = evaluation
        if evaluation is not None:
            self.unimproved = 0 if is_best else self.unimproved + 1
        say(epoch_line(row, self.epochs, is_best=is_best))
        self._tracker.step(self.learner.step, **{k: v for k, v in row._asdict().items() if k not in ("step", "lr")})
        if self.runtime.is_main:
            for name in ("best", "last") if is_best else ("last",):
                self._save_model(name)
            write_metrics(self.out / "metrics.csv", self.history)

    def _save_model(self, name: str) -> None:
        with writing(self.out / name):
            save_model_dir(self.learner.eval_model, self.out / name, label_names=self.splits.classes, force=True)

    def _flush_log(self) -> None:
        if self._log is not None:
            self._log.flush()

    def save(self) -> None:
        """Save the state of the current step."""
        self._saved_at, damaged = time.monotonic(), self.damaged
        if not self.runtime.is_main:
            return
        self._flush_log()
        tensors, optimizer = self.learner.state()
        state = RunState(
            step=self.learner.step,
            meter=self.meter,
            history=self.history,
            unimproved=self.unimproved,
            seconds=self.seconds if self._start is None else time.perf_counter() - self._start,
            optimizer=optimizer,
            recipe=recipe_record(self.recipe),
            machine=machine(self.runtime),
            teacher=getattr(self.learner.teacher, "record", None),
            damaged=damaged,
            by_files=self.splits.train.blocks is not None,
        )
        save_state(self.out / "state", tensors, state, self.recipe.save.keep)

    def _stop_run(self, reason: int) -> NoReturn:
        if self.runtime.is_main:
            self._save_model("last")
        self.stop.end(
            reason,
            f"Stopped after step {self.learner.step} of {self.learner.steps}: {Stop.REASONS[reason]}."
            f" Saved in {self.out / 'state'}; resume with: weft train --resume {self.whole}",
        )

    def _diverged(self, meter: Meter, result: StepResult, lr: float) -> DivergedError:
        """Return the error for the last step, whose loss or gradient is not finite."""
        is_loss = not math.isfinite(result.loss)
        name, value = ("loss", result.loss) if is_loss else ("gradient norm", result.grad_norm)
        keys = self.plan.batches.order.keys(self.epoch, meter.step - 1)
        names = (name_of(self.splits.train, index) for index in dict.fromkeys(index for _, index, _ in keys))
        return DivergedError(
            f"The {name} must be finite; got {value} at step {self.learner.step} (epoch {self.epoch + 1}), learning"
            f" rate {lr:.3g}, images {first_few(names, MAX_NAMES)}. This step did not change the weights, and the last"
            " state is kept. Lower the learning rate, increase schedule.warmup_epochs, or check these images."
        )

    def _raise_explained(self, error: MemoryError | RuntimeError) -> NoReturn:
        """Raise an error of PyTorch that the machine caused as a WeftError with advice; others unchanged."""
        text, newest, stop = str(error), newest_step(self.out / "state"), self.stop
        is_of_worker = "DataLoader worker" in text
        is_of_process = is_of_worker or isinstance(error, distributed.DistError) or "gloo" in text.lower()
        advice = "No state was saved yet: start the run again."
        if newest is not None:
            advice = f"The newest saved state is of step {newest}; resume with: weft train --resume {self.whole}"
        # a signal to a process group may end another process before this one has stopped
        if stop.requested is not None and is_of_process:
            reason = Stop.REASONS[stop.reason]
            stop.end(stop.reason, f"Stopped: {reason}; the step in progress was discarded. {advice}")
        if is_of_worker:
            raise WeftError(
                f"The worker processes must run until the end; one was terminated ({text.splitlines()[0]})."
                f" The machine may be out of memory: lower --workers. {advice}"
            ) from error
        if is_out_of_memory(error):
            raise memory_error(self.recipe) from error
        raise error
