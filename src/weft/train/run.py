"""`train`: start a training run from a dataset and a recipe, or resume one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.capabilities import bf16_note
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import source_of
from weft.checkpoints.model_dir import read_config
from weft.data.loading.order import epochs_of
from weft.errors import UsageError
from weft.files import remove, sweep, write_text
from weft.inference.arguments import check_other
from weft.inference.inputs import evaluation_batches
from weft.inference.metrics import Evaluation
from weft.intervals import grouped_text
from weft.models.contract import preprocessing
from weft.models.own import register_module
from weft.processor import busy_note
from weft.progress import counting, say
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import arguments_of, default_recipe, overrides_of, recipe_names
from weft.runs.directory import Reservation, check_run_dir, locked, reserved, reserved_numbered
from weft.runtime import Runtime
from weft.train.arguments import check_resume, checked_recipe, load_plan_recipe
from weft.train.batches import batch_arithmetic
from weft.train.distillation import Teacher, is_cached
from weft.train.environment import environment
from weft.train.extend import extend as extend_run
from weft.train.extend import extended_recipe
from weft.train.few_images import with_available_weights
from weft.train.folds import cross_validate, write_cross_validation
from weft.train.linear_probe import balance_of, fit_heads
from weft.train.loop import Learner
from weft.train.network import load_start_weights
from weft.train.plan import Plan, default_name, leaves_batch_size, make_plan, open_splits
from weft.train.refusals import memory_error, refusing
from weft.train.reporter import Reporter
from weft.train.results import RunResult, calibrated, write_run_report
from weft.train.resume import ResumedRun, check_data, open_run, record_data
from weft.train.run_loop import Session
from weft.train.state import State, newest_step
from weft.train.stop import Stop, seconds_of
from weft.train.track import Tracker, check_trackers
from weft.train.unknown import read_public_classifier, store_public_classifier

FEATURE_BATCH = 32  # images per forward pass of the frozen network


def train(
    data: str | Path | None = None,
    model: str | nn.Module | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    start_from: str | Path | None = None,
    extend: str | Path | None = None,
    from_scratch: bool = False,
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
    folds: int | None = None,
    group: str | None = None,
    other: str | Path | None = None,
    follow_links: bool | None = None,
    skip_nonfinite: int | None = None,
    max_time: str | float | None = None,
    stop_after: int | None = None,
    track: str | Sequence[str] = (),
    force: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Train a classifier and write a run directory.

    Args:
        data: a folder of images (one folder per class, or train/ and val/ above them), any other source that
            `weft.data.open_data` reads, or 'digits'; None where the recipe names it.
        model: name of a network, or a module that returns logits, of which a copy is trained
            (`weft.register_module`); None to choose a network by the size and number of the images.
        recipe: name of a recipe of weft, or a YAML file.
        settings: dotted keys of the recipe and their values, such as `{"optim.lr": 3e-4}`.
        start_from: a run, a model directory or a checkpoint file with the weights to start from.
        extend: a run whose classes are extended by those of `data`. Its layers stay frozen, and its settings apply; the
            classifier is fitted again, to the features of its images, which it stored, and of the new ones.
        from_scratch: start from random weights also where weft would choose public ones, because the images are few.
        resume: run directory of an interrupted run. The resumed run ends with the same bits as an uninterrupted one.
            Its settings are those of the run.
        override: with `resume`, replace settings of the run by those that are given.
        epochs, batch_size, img_size, seed, device, precision, workers, skip_nonfinite: settings with an argument of
            their own.
        limit, folds, group, other, follow_links: settings of the dataset (`data.limit`, ...) with an argument of their
            own.
        out: the run directory; None for runs/MODEL-DATA, or runs/MODEL-DATA-2 and so on if that exists.
        max_time: stop after this time and save the state: seconds, or '90s', '45m', '2h', '1h30m'.
        stop_after: stop at the end of this epoch, counted from 1, and save the state.
        track: 'tensorboard', 'wandb', or both.
        force: replace an existing run.
        quiet: print no progress and no notes.

    Returns:
        The run directory and the results of the best epoch.

    Raises:
        UsageError: an invalid setting, or a run directory that is taken.
        DataError: the dataset cannot be used, or changed since the run began.
        CheckpointError: the weights to start from, or the state to resume from, cannot be used.
        DivergedError: loss or gradient is not finite.
        StorageError: a file cannot be written.
        StoppedError: the run reached `max_time` or `stop_after`.
    """
    if isinstance(model, nn.Module):
        model = register_module(model, img_size=_size_of(img_size, resume))
    elif not isinstance(model, (str, type(None))):
        raise UsageError(f"model must be a name or a torch.nn.Module; got a {type(model).__name__}.")
    given = arguments_of(locals())
    trackers = [track] if isinstance(track, str) else list(track)
    check_trackers(trackers)
    if stop_after is not None and stop_after < 1:
        raise UsageError(f"stop_after must be an epoch, from 1; got {stop_after}.")
    stop = Stop(None if max_time is None else seconds_of(max_time), stop_after)
    if resume is not None:
        if extend is not None:
            raise UsageError("--extend starts a new run, and --resume continues one. Omit one of them.")
        check_resume(resume, recipe, out, force=force, from_scratch=from_scratch)
        overrides = overrides_of(data, settings or {}, given)
        return _resume(Path(resume), overrides, override, stop, trackers, quiet)
    if override:
        raise UsageError("--override changes settings of a run that is resumed; got no --resume. Omit it.")
    loaded, reason = checked_recipe(data, recipe, settings, given, from_scratch=from_scratch), ""
    if recipe in recipe_names() and given.get("model") is None and "model" not in (settings or {}):
        loaded, reason = with_available_weights(loaded)
    if loaded.extend is not None:
        more = {"from_scratch": from_scratch, "stop_after": stop_after, "max_time": max_time, "track": trackers}
        if names := [name for name, value in more.items() if value]:
            raise UsageError(f"--extend trains no epochs, so {names[0]} does not apply. Omit it.")
        loaded = extended_recipe(loaded, data, recipe, settings or {}, given)
        return _extend(loaded, out, force=force, quiet=quiet)

    def reload(base: str, name: str) -> Recipe:
        return load_plan_recipe(data, base, settings, {**given, "model": name})

    is_open = recipe is None and not from_scratch and default_recipe(data) is None
    is_open = is_open and loaded.start_from is None and not loaded.pretrained
    return _start(
        loaded,
        out,
        stop,
        trackers,
        reason,
        fit_batch_size=leaves_batch_size(data, recipe, settings, given),
        reload=reload if is_open else None,
        force=force,
        quiet=quiet,
    )


def _start(
    recipe: Recipe,
    out: str | Path | None,
    stop: Stop,
    trackers: Sequence[str],
    reason: str,
    *,
    fit_batch_size: bool,
    reload: Callable[[str, str], Recipe] | None,
    force: bool,
    quiet: bool,
) -> RunResult:
    """Start a new run. `reason` is a note on the recipe; `fit_batch_size` and `reload` are those of `make_plan`."""
    runtime = Runtime.of(recipe.device, recipe.precision, deterministic=recipe.deterministic)
    quiet = quiet or not runtime.is_main
    if reason and not quiet:
        say(reason)
    with _NewDirectory(out, runtime, force=force, quiet=quiet) as directory:
        directory.reserve(recipe)
        plan = make_plan(
            recipe,
            runtime,
            quiet=quiet,
            fit_batch_size=fit_batch_size,
            on_decided=directory.reserve,
            reload=reload,
        )
        assert directory.reservation is not None
        run = _Run(plan, directory.reservation.path, stop, trackers, quiet)
        return run.cross_validate(run.start(directory.reservation))


class _NewDirectory(contextlib.ExitStack):
    """The directory of a new run, which is reserved as soon as its name is known.

    Args:
        out: the directory; None for one in runs/, named after the model and the data, and numbered if it exists.
        runtime: whose first process reserves it.
        force: replace an existing run.
        quiet: print no notes.
    """

    def __init__(self, out: str | Path | None, runtime: Runtime, *, force: bool, quiet: bool) -> None:
        super().__init__()
        self.out, self.runtime, self.force, self.quiet = out, runtime, force, quiet
        self.reservation: Reservation | None = None

    def reserve(self, recipe: Recipe) -> None:
        """Reserve the directory, unless it is reserved, or its name depends on a model that is not chosen yet."""
        if self.reservation or (self.out is None and recipe.name is None and recipe.model is None):
            return
        folder = _folder_of(recipe, self.out)
        reservation = None
        if self.runtime.is_main:
            is_numbered = self.out is None and not self.force
            reservation = self.enter_context(
                reserved_numbered(folder) if is_numbered else reserved(folder, force=self.force)
            )
            if reservation.path != folder and not self.quiet:
                say(f"{folder} exists; this run is {reservation.path}.")
        chosen = self.runtime.gather(None if reservation is None else str(reservation.path))[0]  # of the first process
        self.reservation = reservation or Reservation(Path(chosen), force=self.force)


def _folder_of(recipe: Recipe, out: str | Path | None) -> Path:
    """Return the directory of a run as it is named, before it is numbered."""
    folder = Path(out) if out is not None else Path("runs") / (recipe.name or default_name(recipe))
    check_run_dir(folder, str(recipe.data.source))
    return folder


def _extend(recipe: Recipe, out: str | Path | None, *, force: bool, quiet: bool) -> RunResult:
    """Extend a run."""
    runtime = Runtime.of(recipe.device, recipe.precision, deterministic=recipe.deterministic)
    quiet = quiet or not runtime.is_main
    if runtime.world > 1:
        raise UsageError(f"--extend runs in one process; got {runtime.world}. Start it without torchrun.")
    recipe = dataclasses.replace(recipe, precision=runtime.precision)
    folder = _folder_of(recipe, out)
    if folder.resolve() == Path(str(recipe.extend)).resolve():
        raise UsageError(f"The run that is extended stays as it is; got {folder} also as --out. Choose another --out.")
    with reserved(folder, force=force) if out is not None or force else reserved_numbered(folder) as reservation:
        result = extend_run(recipe, reservation, runtime, quiet=quiet)
    return RunResult(
        out=reservation.path,
        model=str(recipe.model),
        data=str(recipe.data.source),
        epochs=0,
        best_epoch=0,
        top1=result.evaluation.top1,
        top5=result.evaluation.top5,
        balanced_accuracy=result.evaluation.balanced_accuracy,
        macro_f1=result.evaluation.macro_f1,
        loss=result.evaluation.loss,
        count=result.evaluation.count,
        seconds=result.seconds,
        extension=result.extension,
    )


def _size_of(img_size: int | tuple[int, int] | str | None, resume: str | Path | None) -> int | tuple[int, int] | None:
    """Return an image size as numbers; that of the run to resume, if none is given."""
    if img_size is None and resume is not None and (file := Path(resume) / "recipe.yaml").is_file():
        return load_recipe(file).img_size
    return load_recipe(None, [("img_size", img_size)]).img_size if isinstance(img_size, str) else img_size


def _resume(
    out: Path, overrides: Sequence[tuple[str, Any]], override: bool, stop: Stop, trackers: Sequence[str], quiet: bool
) -> RunResult:
    run = open_run(out, overrides, override=override)
    runtime = Runtime.of(run.recipe.device, run.recipe.precision, deterministic=run.recipe.deterministic)
    quiet = quiet or not runtime.is_main
    with locked(out) if runtime.is_main else contextlib.nullcontext():
        recipe = dataclasses.replace(run.recipe, precision=runtime.precision)  # that of an override may be `auto`
        plan = Plan(recipe, open_splits(recipe, quiet), runtime, is_resumed=True)
        resumed = _Run(plan, out, stop, trackers, quiet)
        return resumed.cross_validate(resumed.resume(run))


class _Run:
    """A run from its plan to its report. Settings that do not work together fail before the first step."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        stop: Stop,
        trackers: Sequence[str],
        quiet: bool,
        resumed_by: Path | None = None,
    ) -> None:
        self.evaluation: Evaluation | None = None  # of the best epoch, once the run has finished
        self.resumed_by = resumed_by
        self.plan, self.recipe, self.splits, self.runtime = plan, plan.recipe, plan.splits, plan.runtime
        self.out, self.stop, self.trackers, self.quiet = out, stop, trackers, quiet
        self.held_out_groups = set(plan.splits.val_groups or ())  # and those of other folds, once these have finished
        self.model = plan.build()
        self.reporter = Reporter(epochs_of(plan.steps, plan.steps_per_epoch), quiet=quiet)

    def note(self, text: str) -> None:
        """Print a note; those of a fold are those of the run."""
        if self.resumed_by is None:
            self.reporter.note(text)

    def start(self, reservation: Reservation) -> RunResult:
        """Train from the first step."""
        for text in self.plan.notes:
            self.note(text)
        if self.runtime.device.type == "cpu" and (busy := busy_note(torch.get_num_threads())) is not None:
            self.note(busy)
        if (emulated := bf16_note(self.runtime.device.type, self.runtime.precision)) is not None:
            self.note(emulated)
        if self.recipe.start_from is not None:
            self.note(load_start_weights(self.model, self.recipe.start_from, self.splits.classes))
        if self.recipe.pretrained:
            self.note(f"Starts from the public weights {source_of(str(self.recipe.model))}.")
        if self.recipe.head_init == "probe":
            self._fit_heads()
        learner = self.plan.learner()
        self._dry_run(learner)
        if self.runtime.is_main:
            self._check_saving()
        self._cache_teacher(learner)
        if self.runtime.is_main:
            reservation.move_aside()
            recorded = dataclasses.replace(self.recipe, environment=environment(self.runtime, self.splits))
            write_text(self.out / "recipe.yaml", dump(recorded))
            record_data(self.out, self.splits)
            store_public_classifier(self.recipe, self.out)
        try:
            return self._train(learner, None, reservation.discard_replaced)
        finally:
            reservation.is_kept = learner.step > 0 or (
                self.recipe.head_init == "probe" and (self.out / "metrics.csv").exists()
            )

    def resume(self, run: ResumedRun) -> RunResult:
        """Train from the newest saved state."""
        check_data(self.out, self.splits, str(self.recipe.data.source))
        if self.recipe.data.other is not None:
            check_other(self.recipe.data.other)
        read_public_classifier(self.out)  # damage shows now, not after the last epoch
        if self.runtime.device.type == "cpu":
            # the number of threads determines the order of sums, and so their last bits
            torch.set_num_threads(run.state.metadata["machine"]["threads"])
        learner = self.plan.learner()
        for text in (*run.notes(self.runtime), *run.check_teacher(getattr(learner.teacher, "record", None))):
            self.note(text)
        if (emulated := bf16_note(self.runtime.device.type, self.runtime.precision)) is not None:
            self.note(emulated)
        self.note(f"Resuming after step {run.state.metadata['step']} of {self.plan.steps}.")
        if run.state.metadata["step"] < self.plan.steps:
            self._dry_run(learner)
            self._cache_teacher(learner)
        if self.runtime.is_main:
            run.clean_up(self.recipe)
            sweep(self.out, remove)
        return self._train(learner, run.state, is_changed=run.changes_result)

    def cross_validate(self, result: RunResult) -> RunResult:
        """Run the other folds, if the recipe asks for them, after the run itself has finished."""
        if self.recipe.data.folds is None or self.recipe.data.fold is not None:
            return result
        assert self.evaluation is not None
        folds = cross_validate(self.recipe, self.out, self.evaluation, self._run_fold, quiet=self.quiet)
        if self.runtime.is_main:
            grouped = grouped_text(folds.evaluation.count, len(self.held_out_groups))
            if grouped and not self.quiet:
                say(grouped)
            write_cross_validation(self.out, folds, result.model, result.data, grouped)
        self.runtime.wait()
        return dataclasses.replace(result, cross_validation=folds)

    def _run_fold(self, recipe: Recipe, folder: Path) -> Evaluation:
        """Start or resume the run of a fold."""
        is_started = self.runtime.max([float(newest_step(folder / "state") is not None)])[0]
        saved = open_run(folder, (), override=False) if is_started else None
        plan = Plan(recipe, open_splits(recipe, quiet=True), self.runtime, is_resumed=saved is not None)
        run = _Run(plan, folder, self.stop, (), self.quiet, self.resumed_by or self.out)
        if saved is not None:
            run.resume(saved)
        else:
            main = reserved(folder, force=True) if self.runtime.is_main else contextlib.nullcontext()
            with main as reservation:
                run.start(reservation or Reservation(folder, force=True))
        assert run.evaluation is not None
        self.held_out_groups |= run.held_out_groups
        return run.evaluation

    def _dry_run(self, learner: Learner) -> None:
        """Run one step and discard it, so that settings that do not work fail before the run starts."""
        recipe, count = self.recipe, len(self.plan.batches.order.parts(0, 0)[0])
        channels, height, width = preprocessing(self.model)["input_size"]
        images = torch.zeros(count, channels, height, width, device=self.runtime.device)
        out_of_memory = memory_error(recipe)
        requirement = f"{recipe.model} must support training on batches of {count} at {height}x{width} pixels"
        with refusing(
            requirement,
            out_of_memory,
            " Or set compile=false; compile=true needs a C++ compiler, such as g++." if recipe.compile else "",
        ):
            learner.dry_run(images)
        if learner.teacher is not None:
            requirement = f"The teacher {recipe.distill.teacher} must support {height}x{width} pixels"
            with refusing(requirement, out_of_memory):
                learner.teacher(images, ())

    def _fit_heads(self) -> None:
        """Fit the classifiers of the network to the features of the training images, with a note on each."""
        images = evaluation_batches(
            self.splits.train, self.model, FEATURE_BATCH, self.recipe.workers, on_lost=self.recipe.data.on_lost
        )
        num_classes = len(self.splits.classes)
        with counting(len(self.splits.train), quiet=self.quiet, task_name="features") as count:
            probes = fit_heads(
                self.model,
                images,
                num_classes,
                self.runtime,
                balance=balance_of(self.recipe),
                groups=self.splits.groups,
                seed=self.recipe.seed,
                label_smoothing=self.recipe.loss.label_smoothing if self.plan.steps else 0.0,
                on_batch=count,
            )
        for probe in probes:
            self.note(probe.describe(self.splits.classes))

    def _check_saving(self) -> None:
        """Save and load a model directory, so that a model that cannot be saved fails before the run starts."""
        folder = self.out / f".rehearsal.{os.getpid()}.part"  # a temporary name, which `sweep` removes after a kill
        try:
            read_config(save_model_dir(self.model, folder, label_names=self.splits.classes, force=True))
        finally:
            remove(folder)

    def _cache_teacher(self, learner: Learner) -> None:
        """Cache the teacher's logits of all training images, if the recipe asks for it and has no augmentation."""
        if isinstance(learner.teacher, Teacher) and is_cached(self.recipe):
            with counting(len(self.splits.train), quiet=self.quiet, task_name="teacher") as count:
                learner.teacher.cache_outputs(self.recipe, self.model, self.splits.train, count)

    def _train(
        self,
        learner: Learner,
        state: State | None,
        on_start: Callable[[], None] = lambda: None,
        *,
        is_changed: bool = False,
    ) -> RunResult:
        """Run all remaining epochs, and write the report."""
        self.note(f"{batch_arithmetic(self.recipe, self.runtime.world)}; {self.plan.steps:,} steps.")
        self.runtime.wait()
        tracker = Tracker(self.trackers if self.runtime.is_main else (), self.recipe, self.out)
        session = Session(self.plan, self.out, learner, self.reporter, self.stop, tracker, self.resumed_by)
        if state is not None:
            session.restore(state)
            if is_changed:  # later states have the new settings
                session.save()
        on_start()
        if state is None and self.recipe.head_init == "probe":
            session.evaluate_start()
        session.run()
        return self._finish(session)

    def _finish(self, session: Session) -> RunResult:
        """Collect the results of the best epoch, and write the report in the first process."""
        best_result = session.result()
        assert session.best is not None
        is_fitted = False
        if self.runtime.is_main:
            best_result, is_fitted = calibrated(self.plan, self.out, best_result, quiet=self.quiet)
        self.evaluation = best_result
        result = RunResult(
            out=self.out,
            model=str(self.recipe.model),
            data=str(self.recipe.data.source),
            epochs=session.epoch,
            best_epoch=session.best.epoch,
            top1=session.best.top1,
            top5=session.best.top5,
            balanced_accuracy=best_result.balanced_accuracy,
            macro_f1=best_result.macro_f1,
            loss=session.best.loss,
            count=session.best.count,
            seconds=session.seconds,
        )
        if self.runtime.is_main:
            groups = len(self.held_out_groups)
            write_run_report(session, best_result, result, num_groups=groups, is_fitted=is_fitted)
        self.runtime.wait()
        return result
