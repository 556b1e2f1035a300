"""One training run, from its plan to its report; with cross-validation, also the runs of the other folds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.capabilities import bf16_note
from weft.checkpoints import save_model_dir
from weft.checkpoints.config import read_config
from weft.data.preprocessing import eval_transform
from weft.files import remove, sweep, write_text
from weft.inference.arguments import check_other
from weft.inference.metrics import Evaluation, class_lines
from weft.intervals import grouped_text
from weft.models.contract import preprocessing
from weft.processor import busy_note
from weft.progress import counting, quietly, say
from weft.recipes import Recipe, dump
from weft.runs.directory import Reservation, reserved
from weft.train.batches import batch_arithmetic
from weft.train.distillation import Teacher, is_cached
from weft.train.environment import environment
from weft.train.folds import cross_validate, write_cross_validation
from weft.train.loop import Learner
from weft.train.plan import Plan, open_splits
from weft.train.refusals import memory_error, refusing
from weft.train.results import RunResult, calibrated, mirrored_note, write_run_report
from weft.train.resume import ResumedRun, check_data, check_length, open_fold, record_data
from weft.train.run_loop import Session
from weft.train.state import State, newest_step
from weft.train.stop import Stop
from weft.train.track import Tracker
from weft.train.unknown import read_public_classifier, store_public_classifier


class TrainingRun:
    """A run from its plan to its report. Settings that do not work together fail before the first step."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        stop: Stop,
        trackers: Sequence[str],
        resumed_by: Path | None = None,
    ) -> None:
        self.evaluation: Evaluation | None = None  # of the best epoch, once the run has finished
        self.resumed_by = resumed_by
        self.plan, self.recipe, self.splits, self.runtime = plan, plan.recipe, plan.splits, plan.runtime
        self.out, self.stop, self.trackers = out, stop, trackers
        self.held_out_groups = set(plan.splits.val_groups or ())  # and those of other folds, once these have finished
        self.model = plan.build()

    def note(self, text: str) -> None:
        """Print a note; those of a fold are those of the run."""
        if self.resumed_by is None:
            say(text)

    def start(self, reservation: Reservation) -> RunResult:
        """Train from the first step."""
        for text in self.plan.notes:
            self.note(text)
        if cut := eval_transform(preprocessing(self.model)).note(self.splits.sizes):
            self.note(cut)
        if self.runtime.device.type == "cpu" and (busy := busy_note(torch.get_num_threads())) is not None:
            self.note(busy)
        if (emulated := bf16_note(self.runtime.device.type, self.runtime.precision)) is not None:
            self.note(emulated)
        self.plan.initialise(self.note)
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
            check_other(self.recipe.data.other, self.recipe.data.max_pixels)
        read_public_classifier(self.out)  # damage shows now, not after the last epoch
        if self.runtime.device.type == "cpu":
            # the number of threads determines the order of sums, and so their last bits
            torch.set_num_threads(run.state.metadata["machine"]["threads"])
        check_length(run, self.plan.steps)
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
        folds = cross_validate(self.recipe, self.out, self.evaluation, self._run_fold)
        if self.runtime.is_main:
            grouped = grouped_text(folds.evaluation.count, len(self.held_out_groups))
            if grouped:
                say(grouped)
            write_cross_validation(self.out, folds, result.model, result.data, grouped)
        self.runtime.wait()
        return dataclasses.replace(result, cross_validation=folds)

    def _run_fold(self, recipe: Recipe, folder: Path) -> Evaluation:
        """Start or resume the run of a fold."""
        is_started = self.runtime.max([float(newest_step(folder / "state") is not None)])[0]
        saved = open_fold(folder, recipe) if is_started else None
        with quietly():
            plan = Plan(recipe, open_splits(recipe), self.runtime, loads_weights=saved is None)
        run = TrainingRun(plan, folder, self.stop, (), self.resumed_by or self.out)
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
            with counting(len(self.splits.train), task_name="teacher") as count:
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
        session = Session(self.plan, self.out, learner, self.stop, tracker, self.resumed_by)
        if state is not None:
            session.restore(state)
            if is_changed:  # later states have the new settings, and early stopping counts from here on
                session.evaluations_since_best = 0
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
        is_fitted, mirrored = False, ""
        if self.runtime.is_main:
            best_result, is_fitted = calibrated(self.plan, self.out, best_result)
            mirrored = mirrored_note(self.plan, self.out)
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
            notes=(*class_lines(best_result), *filter(None, [mirrored])),
        )
        if self.runtime.is_main:
            groups = len(self.held_out_groups)
            write_run_report(session, best_result, result, num_groups=groups, is_fitted=is_fitted, mirrored=mirrored)
        self.runtime.wait()
        return result
