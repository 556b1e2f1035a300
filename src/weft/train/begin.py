"""Begin a run: all that may fail comes before the first step, and before anything of an earlier run is removed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from weft.checkpoints import save_model_dir
from weft.checkpoints.config import read_config
from weft.data.fingerprint import fingerprint
from weft.data.groups import write_groups
from weft.data.preprocessing import eval_transform
from weft.errors import StorageError, UsageError
from weft.files import remove, sha256_of, temporary_path, write_file
from weft.inference.arguments import check_unknown_images
from weft.machine.processor import bf16_note
from weft.models.contract import preprocessing
from weft.progress import Work, say
from weft.recipes import dump
from weft.runs.directory import CANDIDATES, FINGERPRINT, PUBLIC_CLASSIFIER, REPLACEABLE, SERIES, clear, refuse_taken
from weft.train.candidates import write_candidates
from weft.train.distillation import Teacher, is_cached
from weft.train.environment import environment
from weft.train.loop import Learner
from weft.train.plan import Plan, batch_arithmetic
from weft.train.refusals import memory_error, refusing
from weft.train.resume import SavedRun
from weft.train.run import Run
from weft.train.state import newest_step
from weft.train.stop import Stop
from weft.train.track import Tracker
from weft.train.unknown import public_classifier, read_public_classifier


def start(
    plan: Plan, out: Path, stop: Stop, trackers: Sequence[str] = (), whole: Path | None = None, *, force: bool
) -> Run:
    """Train from the first step to the last; with `force`, in place of the run that the directory holds.

    Args:
        plan: of which everything is decided.
        out: the run directory, locked by the first process.
        stop: requests to stop between two steps.
        trackers: names of the services to log to.
        whole: of a fold, the run directory of the cross-validation; its notes are those of the first fold.
        force: replace an existing run.

    Raises:
        UsageError: settings that do not work together, a tracker that cannot start, or other files are in the directory
            by now.
        KeyboardInterrupt, SystemExit, StoppedError, DivergedError, StorageError: as in `Run.train`.
    """
    note, runtime = _ignore if whole else say, plan.runtime
    plan.build()
    cut = eval_transform(preprocessing(plan.network)).note(plan.splits.sizes)
    for text in filter(None, (*plan.notes, cut, bf16_note(runtime.device.type, runtime.precision))):
        note(text)
    plan.initialise(note)
    learner = plan.learner()
    if runtime.is_main:
        rehearse_saving(plan, out)
    prepare_steps(plan, learner)
    with _replacing(plan, learner, out, trackers, force=force) as tracker:
        note(f"{batch_arithmetic(plan.recipe, runtime.world)}; {plan.steps:,} steps.")
        run = Run(plan, learner, out, stop, tracker, whole or out)
        run.train()
    return run


def resume(plan: Plan, saved: SavedRun, stop: Stop, trackers: Sequence[str] = (), whole: Path | None = None) -> Run:
    """Train from a saved state to the last step.

    Args:
        plan: of the recipe of `saved`.
        saved: the interrupted run.
        stop, trackers, whole: as in `start`.

    Raises:
        DataError, CheckpointError, UsageError: dataset, teacher or settings are not those of the run.
        KeyboardInterrupt, SystemExit, StoppedError, DivergedError, StorageError: as in `Run.train`.
    """
    note, runtime, recipe, out = _ignore if whole else say, plan.runtime, plan.recipe, saved.out
    plan.build()
    saved.check_data(plan.splits)
    if recipe.data.unknown_images is not None:
        check_unknown_images(recipe.data.unknown_images, recipe.data.max_pixels)
    read_public_classifier(out)  # damage shows now, not after the last epoch
    if runtime.device.type == "cpu":
        torch.set_num_threads(saved.state.machine["threads"])  # it determines the order of sums, and so their last bits
    saved.check_length(plan.steps)
    learner = plan.learner()
    saved.check_teacher(getattr(learner.teacher, "record", None))
    for text in filter(None, (*saved.notes(runtime), bf16_note(runtime.device.type, runtime.precision))):
        note(text)
    note(f"Resuming after step {saved.state.step} of {plan.steps}.")
    if saved.state.step < plan.steps:
        prepare_steps(plan, learner)
    if runtime.is_main:
        saved.clean_up(recipe)
    tracker = Tracker(trackers if runtime.is_main else (), recipe, out)
    run = Run(plan, learner, out, stop, tracker, whole or out)
    note(f"{batch_arithmetic(recipe, runtime.world)}; {plan.steps:,} steps.")
    run.train(saved)
    return run


def _ignore(text: str) -> None: ...


@contextlib.contextmanager
def _replacing(plan: Plan, learner: Learner, out: Path, trackers: Sequence[str], *, force: bool) -> Iterator[Tracker]:
    """Replace the run that is there once nothing else can fail; yield the tracker. Only the first process writes."""
    if not plan.runtime.is_main:
        yield Tracker((), plan.recipe, out)
        return
    refuse_taken(out, force=force)
    images, classifier = fingerprint(plan.splits), public_classifier(plan.recipe)
    clear(out, trackers)
    try:
        tracker = Tracker(trackers, plan.recipe, out)
    except UsageError:
        clear(out, trackers)  # of one that has started before
        raise
    try:
        clear(out, [name for name in REPLACEABLE if name not in trackers])
        if plan.series:
            write_groups(out / SERIES, plan.series)
        if plan.candidates:
            write_candidates(out / CANDIDATES, plan.candidates)
        series = sha256_of(out / SERIES) if plan.series else None
        recorded = dataclasses.replace(plan.recipe, environment=environment(plan.runtime, plan.splits, series))
        write_file(out / "recipe.yaml", dump(recorded))
        images.write(out / FINGERPRINT)
        if classifier is not None:
            write_file(out / PUBLIC_CLASSIFIER, classifier)
        yield tracker
    except BaseException:
        if not learner.step and newest_step(out / "state") is None:
            with contextlib.suppress(StorageError):  # nothing to resume from, nothing to see
                clear(out, REPLACEABLE)
        raise


def prepare_steps(plan: Plan, learner: Learner) -> None:
    """Run one step, and the teacher, on black images, and discard it; cache the teacher's logits if they never change.

    Raises:
        UsageError: the step does not work with these settings, or does not fit into memory.
    """
    recipe, count = plan.recipe, len(plan.batches.order.parts(0, 0)[0])
    channels, height, width = preprocessing(plan.network)["input_size"]
    images = torch.zeros(count, channels, height, width, device=plan.runtime.device)
    requirement = f"{recipe.model} must support training on batches of {count} at {height}x{width} pixels"
    advice = " Or set compile=false; compile=true needs a C++ compiler, such as g++." if recipe.compile else ""
    with refusing(requirement, memory_error(recipe), advice):
        learner.dry_run(images)
    if learner.teacher is not None:
        requirement = f"The teacher {recipe.distill.teacher} must support {height}x{width} pixels"
        with refusing(requirement, memory_error(recipe)):
            learner.teacher(images, ())
    if isinstance(learner.teacher, Teacher) and is_cached(recipe):
        with Work("teacher", len(plan.splits.train)) as work:
            learner.teacher.cache_outputs(recipe, plan.network, plan.splits.train, work.advance)


def rehearse_saving(plan: Plan, out: Path) -> None:
    """Save and load a model directory within a run directory, and remove it.

    Raises:
        WeftError: the model cannot be saved, or not loaded again.
    """
    folder = temporary_path(out / "rehearsal")  # which `sweep` removes after a kill
    try:
        read_config(save_model_dir(plan.network, folder, label_names=plan.splits.classes, force=True))
    finally:
        remove(folder)
