"""`train`: from data and a recipe to a run directory, or from a run that was stopped to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoints import load_model_dir
from weft.data import Splits, image_size_hint
from weft.data.order import epochs_of
from weft.durable import sweep
from weft.errors import UsageError
from weft.recipes import Recipe, dump, load_recipe
from weft.train.build import (
    batch_arithmetic,
    begin_from,
    build_model,
    default_name,
    environment,
    evaluation_batches,
    open_splits,
    training_batches,
    training_images,
)
from weft.train.defaults import default_recipe, fill_in, overrides_of
from weft.train.distillation import answers_are_fixed, open_teacher
from weft.train.finder import find_batch_size
from weft.train.loop import Learner
from weft.train.metrics import Evaluation
from weft.train.mistakes import mistakes_figure
from weft.train.objective import balanced_weights
from weft.train.progress import Reporter, clock, counting
from weft.train.report import write_report
from weft.train.resume import Resumed, check_data, record_data, resumed
from weft.train.rundir import locked, make_dir, refuse_taken, remove, write_text
from weft.train.runtime import Runtime, Stop
from weft.train.session import Session
from weft.train.shared_norm import share_batchnorm
from weft.train.state import State
from weft.train.track import Tracker, check_trackers


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Accuracies of the best epoch, in percent, on the held-out images.

    Attributes:
        out: the run directory.
        model: name of the model.
        data: what it learned from.
        epochs: how many were run.
        best_epoch: the one that was kept, from 1.
        count: held-out images.
        seconds: of training and evaluation together.
    """

    out: Path
    model: str
    data: str
    epochs: int
    best_epoch: int
    top1: float
    top5: float
    loss: float
    count: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**dataclasses.asdict(self), "out": str(self.out)}


def train(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    start_from: str | Path | None = None,
    resume: str | Path | None = None,
    override: bool = False,
    epochs: int | None = None,
    batch_size: int | str | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    limit: int | None = None,
    skip_nonfinite: int | None = None,
    max_time: str | float | None = None,
    stop_after: int | None = None,
    track: str | Sequence[str] = (),
    force: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Trains a classifier and leaves a run directory.

    Args:
        data: a folder of images (one folder per class, or train/ and val/ above them), any other source that
            `weft.data.open_data` reads, or 'digits'; None where the recipe names it.
        model: a name; None to choose by the images' size and number.
        recipe: name of a recipe that comes with weft, or a YAML file.
        settings: dotted keys of the recipe and their values, such as `{"optim.lr": 3e-4}`.
        start_from: a run, a model directory or a checkpoint file whose weights to start from.
        resume: a run directory: go on where it stopped, to the same bits that it would have come to without a stop.
            Everything else is then as it was.
        override: let settings given beside `resume` take the place of those the run began with.
        epochs, batch_size, img_size, seed, device, precision, workers, limit, skip_nonfinite: settings that have an
            argument of their own; `limit` is the largest number of training images.
        out: the run directory; None for runs/MODEL-DATA.
        max_time: stop after so many seconds, or '90s', '45m', '2h', '1h30m', with everything saved.
        stop_after: stop at the end of this epoch, counted from 1, with everything saved: the run goes on from there to
            what it would have come to without.
        track: 'tensorboard', 'wandb', or both.
        force: take the place of a run that is there.
        quiet: no progress and no notes.

    Returns:
        Where everything is, and how good the best epoch was.

    Raises:
        UsageError: a setting that does not fit, or a run directory that is taken.
        DataError: data that cannot be used, or that changed since the run began.
        CheckpointError: weights to start from, or a state to go on from, that cannot be used.
        DivergedError: loss or gradient is not finite.
        StorageError: the disk did not take what had to be written.
        StoppedError: `max_time` is over, or the epoch `stop_after`.
    """
    given = dict(
        model=model,
        epochs=epochs,
        batch_size=batch_size,
        img_size=img_size,
        seed=seed,
        device=device,
        precision=precision,
        workers=workers,
        limit=limit,
        skip_nonfinite=skip_nonfinite,
        start_from=None if start_from is None else str(start_from),
    )
    names = [track] if isinstance(track, str) else list(track)
    check_trackers(names)
    if stop_after is not None and stop_after < 1:
        raise UsageError(f"stop_after must be an epoch, from 1; got {stop_after}.")
    stop = Stop(None if max_time is None else seconds_of(max_time), stop_after)
    overrides = overrides_of(data, settings or {}, given)
    if resume is not None:
        if recipe is not None or out is not None or force:
            raise UsageError(
                "A run that is resumed has its recipe and its directory; drop --recipe, --out and --force."
            )
        return _go_on(Path(resume), overrides, override, stop, names, quiet)
    plan = load_recipe(recipe or default_recipe(data), overrides)
    if plan.data.source is None:
        raise UsageError("Training needs images; got none. Name a folder or `digits`: weft train DATA.")
    runtime = Runtime.of(plan.device, plan.precision, deterministic=plan.deterministic)
    if out is not None:
        refuse_taken(Path(out), force=force)
    quiet = quiet or not runtime.is_main
    splits = open_splits(plan, quiet)
    plan, decisions = fill_in(plan, image_size_hint(splits.train), len(splits.train), runtime.world)
    if plan.batch_size == "auto":
        size, said = find_batch_size(plan, len(splits.classes), len(splits.train), runtime)
        plan, decisions = dataclasses.replace(plan, batch_size=size), [*decisions, said]
    folder = Path(out) if out is not None else Path("runs") / (plan.name or default_name(plan))
    refuse_taken(folder, force=force)
    return _Job(plan, splits, folder, runtime, stop, names, quiet).begin([*splits.notes, *decisions], force=force)


def _go_on(
    out: Path, overrides: Sequence[tuple[str, Any]], override: bool, stop: Stop, names: Sequence[str], quiet: bool
) -> RunResult:
    """Resumes a run."""
    run = resumed(out, overrides, override=override)
    runtime = Runtime.of(run.recipe.device, run.recipe.precision, deterministic=run.recipe.deterministic)
    quiet = quiet or not runtime.is_main
    return _Job(run.recipe, open_splits(run.recipe, quiet), out, runtime, stop, names, quiet).resume(run)


class _Job:
    """Everything around a session: its directory, what it is made of, the report at its end.

    Building it refuses whatever does not fit together, before anything is written.
    """

    def __init__(
        self, recipe: Recipe, splits: Splits, out: Path, runtime: Runtime, stop: Stop, track: Sequence[str], quiet: bool
    ) -> None:
        self.recipe, self.splits, self.out, self.runtime, self.stop = recipe, splits, out, runtime, stop
        self.track, self.quiet = track, quiet
        self.model = build_model(recipe, len(splits.classes)).to(runtime.device)
        if recipe.sync_bn and runtime.world > 1:
            self.model = share_batchnorm(self.model, runtime.device)
        images = training_images(recipe, splits.train, self.model)
        self.batches = training_batches(recipe, images, self.model, runtime)
        self.val_batches = evaluation_batches(
            splits.val,
            self.model,
            self.batches.order.batch_size,
            recipe.workers,
            share=dataclasses.replace(self.batches.order.share, accumulate=1),
            on_lost=recipe.data.on_lost,
        )
        self.steps_per_epoch = self.batches.order.steps_per_epoch
        self.steps = recipe.steps or self.steps_per_epoch * (recipe.epochs or 0)

    def begin(self, notes: Sequence[str], *, force: bool) -> RunResult:
        """A run from its first step."""
        notes = list(notes)
        if self.recipe.start_from is not None:
            notes.append(begin_from(self.model, self.recipe.start_from, self.splits.classes))
        if weights := getattr(self.model, "pretrained_cfg", {}).get("hf_hub_id") if self.recipe.pretrained else None:
            notes.append(f"Starts from the public weights {weights}.")
        learner = self._learner()
        with self._held():
            if self.runtime.is_main:
                make_dir(self.out, force=force)
                recorded = dataclasses.replace(self.recipe, environment=environment(self.runtime, self.splits))
                write_text(self.out / "recipe.yaml", dump(recorded))
                record_data(self.out, self.splits)
            return self._carry_out(learner, None, notes)

    def resume(self, run: Resumed) -> RunResult:
        """A run from where it stopped."""
        check_data(self.out, self.splits, str(self.recipe.data.source))
        if self.runtime.device.type == "cpu":
            torch.set_num_threads(run.state.facts["machine"]["threads"])  # the bits of a sum depend on how it is split
        learner = self._learner()
        notes = [*run.notes(self.runtime), f"Goes on after step {run.state.facts['step']} of {self.steps}."]
        with self._held():
            if self.runtime.is_main:
                run.tidy(self.recipe)
                sweep(self.out, remove)
            return self._carry_out(learner, run.state, notes)

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """The run directory, for the process that writes to it."""
        return locked(self.out) if self.runtime.is_main else contextlib.nullcontext()

    def _carry_out(self, learner: Learner, state: State | None, notes: Sequence[str]) -> RunResult:
        """Goes through all epochs, and writes the report."""
        reporter = Reporter(epochs_of(self.steps, self.steps_per_epoch), quiet=self.quiet)
        arithmetic = f"{batch_arithmetic(self.recipe, self.runtime.world)}; {self.steps:,} steps."
        for note in [*notes, arithmetic]:
            reporter.note(note)
        self.runtime.wait()
        session = Session(
            self.recipe,
            self.splits,
            self.out,
            learner,
            self.batches,
            self.val_batches,
            self.runtime,
            reporter,
            self.stop,
            Tracker(self.track if self.runtime.is_main else (), self.recipe, self.out),
        )
        if state is not None:
            session.restore(state)
        session.carry_out()
        return self._finished(session)

    def _learner(self) -> Learner:
        recipe, model, weights, teacher = self.recipe, self.model, None, None
        if recipe.loss.class_weights == "balanced":
            weights = balanced_weights(self.splits.train.labels, len(self.splits.classes))
        if recipe.distill.teacher is not None:
            teacher = open_teacher(recipe, model, self.splits.classes, self.runtime)
            if recipe.distill.cache and answers_are_fixed(recipe):
                with counting(len(self.splits.train), quiet=self.quiet) as count:
                    teacher.learn_answers(recipe, model, self.splits.train, count)
        num_classes = len(self.splits.classes)
        return Learner(model, recipe, self.runtime, self.steps_per_epoch, self.steps, num_classes, weights, teacher)

    def _finished(self, session: Session) -> RunResult:
        best_result = session.result()
        assert session.best is not None
        result = RunResult(
            out=self.out,
            model=str(self.recipe.model),
            data=str(self.recipe.data.source),
            epochs=session.epoch,
            best_epoch=session.best.epoch,
            top1=session.best.top1,
            top5=session.best.top5,
            loss=session.best.loss,
            count=session.best.count,
            seconds=session.seconds,
        )
        if self.runtime.is_main:
            self._report(session, best_result, result)
        self.runtime.wait()
        return result

    def _report(self, session: Session, best: Evaluation, result: RunResult) -> None:
        params = sum(parameter.numel() for parameter in session.learner.model.parameters())
        left_out = f", {len(best.excluded)} excluded as unreadable" if best.excluded else ""
        facts = [
            ("held-out images", f"{best.count}{left_out}"),
            ("best epoch", f"{result.best_epoch} of {result.epochs}"),
            ("top-1, top-5", f"{best.top1:.2f} %, {best.top5:.2f} %"),
            ("training images", f"{len(self.splits.train)}"),
            ("parameters", f"{params:,}"),
            ("training and evaluation", f"{clock(result.seconds)} on {self.runtime.device.type}"),
            ("again", f"weft train --config {self.out / 'recipe.yaml'} --out DIR"),
        ]
        model, _ = load_model_dir(self.out / "best")
        seen = mistakes_figure(model, self.splits.val, best.mistakes)
        write_report(self.out / "report", f"{result.model} on {result.data}", facts, best, session.history, seen)


def seconds_of(text: str | float, option: str = "--max-time") -> float:
    """Reads a length of time: seconds, or '90s', '45m', '2h', '1h30m', '1d'.

    Raises:
        UsageError: anything else.
    """
    if isinstance(text, (int, float)) or re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    else:
        parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
        if parts is None or not text:
            raise UsageError(f"{option} must be a length of time such as 90s, 45m or 1h30m; got '{text}'.")
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds > 0:
        raise UsageError(f"{option} must be longer than nothing; got '{text}'.")
    return float(seconds)
