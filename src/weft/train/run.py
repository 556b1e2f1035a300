"""`train`: start a run from data and a recipe, or resume one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.model_dir import checked_names, read_config
from weft.data import Splits, image_size_hint
from weft.data.loading.order import epochs_of
from weft.durable import sweep
from weft.errors import DataError, UsageError, WeftError
from weft.recipes import Recipe, dump, load_recipe
from weft.train.build import (
    batch_arithmetic,
    begin_from,
    build_model,
    default_name,
    environment,
    evaluation_batches,
    open_splits,
    preprocessing,
    training_batches,
    training_images,
)
from weft.train.defaults import default_recipe, fill_in, overrides_of
from weft.train.distillation import Teacher, answers_are_fixed, open_teacher
from weft.train.finder import find_batch_size
from weft.train.loop import Learner
from weft.train.metrics import Evaluation
from weft.train.mistakes import mistakes_figure
from weft.train.objective import balanced_weights
from weft.train.progress import Reporter, clock, counting
from weft.train.report import write_report
from weft.train.resume import Resumed, check_data, record_data, resumed
from weft.train.rundir import Reservation, check_place, locked, remove, reserved, write_text
from weft.train.runtime import Runtime, Stop
from weft.train.session import Session, is_of_memory, memory_error
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
    quiet = quiet or not runtime.is_main
    with contextlib.ExitStack() as held:

        def reserve() -> Reservation:
            folder = Path(out) if out is not None else Path("runs") / (plan.name or default_name(plan))
            check_place(folder, str(plan.data.source))
            if not runtime.is_main:
                return Reservation(folder, force=force)
            return held.enter_context(reserved(folder, force=force))

        has_place = out is not None or plan.name is not None or plan.model is not None
        place = reserve() if has_place else None
        splits = open_splits(plan, quiet)
        check_class_names(splits.classes)
        plan, decisions = fill_in(plan, image_size_hint(splits.train), len(splits.train), runtime.world)
        place = place or reserve()
        with refusing(f"{plan.model} must be able to learn here"):
            if plan.batch_size == "auto":
                size, said = find_batch_size(plan, len(splits.classes), len(splits.train), runtime)
                plan, decisions = dataclasses.replace(plan, batch_size=size), [*decisions, said]
        job = _Job(plan, splits, place.path, runtime, stop, names, quiet)
        return job.begin(place, [*splits.notes, *decisions])


def _go_on(
    out: Path, overrides: Sequence[tuple[str, Any]], override: bool, stop: Stop, names: Sequence[str], quiet: bool
) -> RunResult:
    """Resumes a run."""
    run = resumed(out, overrides, override=override)
    runtime = Runtime.of(run.recipe.device, run.recipe.precision, deterministic=run.recipe.deterministic)
    quiet = quiet or not runtime.is_main
    with locked(out) if runtime.is_main else contextlib.nullcontext():
        splits = open_splits(run.recipe, quiet)
        return _Job(run.recipe, splits, out, runtime, stop, names, quiet, is_new=False).resume(run)


class _Job:
    """Everything around a session: its directory, what it is made of, the report at its end.

    Building it refuses whatever does not fit together.
    """

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        out: Path,
        runtime: Runtime,
        stop: Stop,
        track: Sequence[str],
        quiet: bool,
        *,
        is_new: bool = True,
    ) -> None:
        self.recipe, self.splits, self.out, self.runtime, self.stop = recipe, splits, out, runtime, stop
        self.track, self.quiet = track, quiet
        with refusing(f"{recipe.model} must be able to take these images and settings"):
            # public weights are read before the first step only; later, the state has the weights
            built = recipe if is_new else dataclasses.replace(recipe, pretrained=False)
            self.model = build_model(built, len(splits.classes)).to(runtime.device)
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

    def begin(self, place: Reservation, notes: Sequence[str]) -> RunResult:
        """A run from its first step."""
        notes = list(notes)
        if self.recipe.start_from is not None:
            notes.append(begin_from(self.model, self.recipe.start_from, self.splits.classes))
        if weights := getattr(self.model, "pretrained_cfg", {}).get("hf_hub_id") if self.recipe.pretrained else None:
            notes.append(f"Starts from the public weights {weights}.")
        learner = self._learner()
        self._rehearse(learner)
        if self.runtime.is_main:
            self._rehearse_saving()
        self._ask_teacher(learner)
        if self.runtime.is_main:
            place.fill()
            recorded = dataclasses.replace(self.recipe, environment=environment(self.runtime, self.splits))
            write_text(self.out / "recipe.yaml", dump(recorded))
            record_data(self.out, self.splits)
        try:
            return self._carry_out(learner, None, notes, place.settle)
        finally:
            place.is_kept = learner.step > 0

    def resume(self, run: Resumed) -> RunResult:
        """A run from where it stopped."""
        check_data(self.out, self.splits, str(self.recipe.data.source))
        if self.runtime.device.type == "cpu":
            torch.set_num_threads(run.state.facts["machine"]["threads"])  # the bits of a sum depend on how it is split
        learner = self._learner()
        notes = [*run.notes(self.runtime), *run.check_teacher(getattr(learner.teacher, "record", None))]
        notes.append(f"Goes on after step {run.state.facts['step']} of {self.steps}.")
        if run.state.facts["step"] < self.steps:
            self._rehearse(learner)
            self._ask_teacher(learner)
        if self.runtime.is_main:
            run.tidy(self.recipe)
            sweep(self.out, remove)
        return self._carry_out(learner, run.state, notes, is_changed=run.changes_result)

    def _rehearse(self, learner: Learner) -> None:
        """Refuses what would fail in the first step."""
        recipe, count = self.recipe, len(self.batches.order.parts(0, 0)[0])
        channels, height, width = preprocessing(self.model)["input_size"]
        images = torch.zeros(count, channels, height, width, device=self.runtime.device)
        of_memory = memory_error(recipe)
        needed = f"{recipe.model} must be able to learn from batches of {count} at {height}x{width} pixels"
        with refusing(needed, of_memory, " Or set compile=false." if recipe.compile else ""):
            learner.rehearse(images)
        if learner.teacher is not None:
            with refusing(f"{recipe.distill.teacher} must be able to teach at {height}x{width} pixels", of_memory):
                learner.teacher(images, ())

    def _rehearse_saving(self) -> None:
        """Refuses what would fail when the best model is saved, or read again."""
        place = self.out / f".rehearsal.{os.getpid()}.part"  # a name that is swept, should this process be killed
        try:
            read_config(save_model_dir(self.model, place, label_names=self.splits.classes, force=True))
        finally:
            remove(place)

    def _carry_out(
        self,
        learner: Learner,
        state: State | None,
        notes: Sequence[str],
        on_start: Callable[[], None] = lambda: None,
        *,
        is_changed: bool = False,
    ) -> RunResult:
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
            if is_changed:  # from here on, the state has the new settings
                session.save()
        on_start()
        session.carry_out()
        return self._finished(session)

    def _learner(self) -> Learner:
        recipe, model, weights, teacher = self.recipe, self.model, None, None
        if recipe.loss.class_weights == "balanced":
            weights = balanced_weights(self.splits.train.labels, len(self.splits.classes))
        if recipe.distill.teacher is not None:
            teacher = open_teacher(recipe, model, self.splits.classes, self.runtime)
        num_classes = len(self.splits.classes)
        with refusing(f"{recipe.model} must be able to learn with these settings"):
            return Learner(model, recipe, self.runtime, self.steps_per_epoch, self.steps, num_classes, weights, teacher)

    def _ask_teacher(self, learner: Learner) -> None:
        """Asks it about every image, where its answers cannot change."""
        if isinstance(learner.teacher, Teacher) and self.recipe.distill.cache and answers_are_fixed(self.recipe):
            with counting(len(self.splits.train), quiet=self.quiet) as count:
                learner.teacher.learn_answers(self.recipe, self.model, self.splits.train, count)

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


def check_class_names(classes: Sequence[str]) -> None:
    """Refuses class names that a model directory does not take.

    Raises:
        DataError: one holds control characters.
    """
    try:
        checked_names(classes, what="Class names")
    except UsageError as error:
        raise DataError(f"{error} Rename the class.") from None


@contextlib.contextmanager
def refusing(needed: str, of_memory: WeftError | None = None, advice: str = "") -> Iterator[None]:
    """Turns whatever a network raises that cannot do what is asked of it into a sentence.

    Args:
        needed: what must hold.
        of_memory: raised where memory does not suffice; None for no difference.
        advice: what else to do, beside other sizes or another model.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # constructors and layers fail in any way
        if of_memory is not None and is_of_memory(error):
            raise of_memory from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"{needed}; {reason}. Choose another --img-size, --batch-size or --model.{advice}") from error


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
