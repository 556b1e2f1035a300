"""`train`, `find_lr`, `planned_run` and `preview`: the functions that start or prepare a training run.

Each one checks its request before torch is imported, and takes its plan from `make_plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.folder import check_new_file
from weft.data.groups import write_groups
from weft.errors import UsageError
from weft.files import writing
from weft.machine.system import file_name
from weft.progress import is_first_process, loading, obeys_quiet, say
from weft.recipes import load_recipe
from weft.recipes.fields import seconds_of
from weft.recipes.load import arguments_of
from weft.runs.directory import check_run_dir, locked, refuse_taken, reserved, reserved_numbered
from weft.train.request import Request, recipe_file
from weft.train.stop import Stop
from weft.train.track import check_trackers

if TYPE_CHECKING:
    from torch import nn

    from weft.train.estimate import Loading, PlannedRun
    from weft.train.lr_finder import LrFinding
    from weft.train.plan import Plan
    from weft.train.result import RunResult
    from weft.train.run import Run


@obeys_quiet
def train(
    data: str | Path | None = None,
    model: str | nn.Module | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    start_from: str | Path | None = None,
    from_scratch: bool = False,
    candidates: str | Sequence[str] = (),
    budget: str | float | None = None,
    resume: str | Path | None = None,
    override: bool = False,
    epochs: int | None = None,
    batch_size: int | str | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    out: str | Path | None = None,
    lr: float | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | str | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    folds: int | None = None,
    group: str | None = None,
    unknown_images: str | Path | None = None,
    follow_links: bool | None = None,
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
        model: name of a network, or a module that returns logits, of which a copy is trained;
            None to choose a network by the size and number of the images.
        recipe: name of a recipe of weft, or a YAML file.
        settings: dotted keys of the recipe and their values, such as `{"optim.lr": 3e-4}`.
        start_from: a run, a model directory or a checkpoint file with the weights to start from.
        from_scratch: start from random weights also where weft would choose public ones, because the images are few.
        candidates: networks with public weights, of which the training images choose one; of weft's own choice if none
            are named. A comma separates names in a text.
        budget: time for the whole run, as `max_time`: fine-tuning takes as many epochs as fit. None for 15 minutes if
            network and number of epochs are left to weft, else for no limit.
        resume: run directory of an interrupted run. The resumed run ends with the same bits as an uninterrupted one.
            Its settings are those of the run.
        override: with `resume`, replace settings of the run by those that are given.
        epochs, batch_size, lr, img_size, seed, device, precision, workers: settings with an argument of their own.
        limit, max_pixels, folds, group, unknown_images, follow_links: settings of the dataset (`data.limit`, ...) with
            an argument of their own.
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
    if model is not None and not isinstance(model, str):
        model = _registered(model, img_size, resume)
    given = arguments_of(locals())
    trackers = [track] if isinstance(track, str) else list(track)
    check_trackers(trackers)
    if stop_after is not None and stop_after < 1:
        raise UsageError(f"stop_after must be an epoch, from 1; got {stop_after}.")
    stop = Stop(None if max_time is None else seconds_of(max_time, "--max-time"), stop_after)
    names = [name for name in candidates.split(",") if name] if isinstance(candidates, str) else list(candidates)
    if names and (model is not None or start_from is not None or from_scratch or resume is not None):
        raise UsageError("--candidates excludes --model, --from, --from-scratch and --resume; omit one of them.")
    seconds = None if budget is None else seconds_of(budget, "--budget")
    request = Request(data, recipe, settings, given, from_scratch=from_scratch, candidates=names, budget=seconds)
    if seconds is not None and (resume is not None or not request.leaves_length):
        raise UsageError(
            "--budget decides the number of epochs; got --resume, --epochs, or a recipe file that has it. Omit one."
        )
    if resume is not None:
        if recipe is not None or out is not None or force:
            raise UsageError(
                "--resume uses the recipe and the directory of the run; got --recipe, --out or --force. Omit them."
            )
        if from_scratch:
            raise UsageError("--resume continues from the saved state of a run; got --from-scratch. Omit one of them.")
        recipe_file(Path(resume))  # is there, before torch is imported
        return _resume(Path(resume), request.overrides, override, stop, trackers)
    if override:
        raise UsageError("--override changes settings of a run that is resumed; got no --resume. Omit it.")
    if out is not None:
        check_run_dir(Path(out), str(request.resolved.data.source))
        refuse_taken(Path(out), force=force)
    plan = _planned(request)
    from weft.train import begin
    from weft.train.race import raced
    from weft.train.series import in_series

    plan = raced(in_series(plan))
    with _reserved(plan, out, force=force) as folder:
        return _finished(begin.start(plan.measured(), folder, stop, trackers, force=force))


@obeys_quiet
def find_lr(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    steps: int = 100,
    quiet: bool = False,
    **given: Any,
) -> LrFinding:
    """Try learning rates from 1e-7 to 1 in steps of the run that `train` would start, and suggest one.

    Writes no files.

    Args:
        data, model, recipe, settings, from_scratch, quiet: as in `train`.
        steps: number of rates to try.
        given: other arguments of `train` that are settings, such as `batch_size`.

    Raises:
        UsageError, DataError, CheckpointError: as in `train`; also for a recipe without training steps.
    """
    if steps < 1:
        raise UsageError(f"steps must be at least 1; got {steps}.")
    more = {"model": model, **given}
    request = Request(data, recipe, settings, more, from_scratch=from_scratch, option="--find-lr")
    plan = _prepared(request, needs_steps=True)
    from weft.train.lr_finder import sweep_lr

    return sweep_lr(plan, steps)


@obeys_quiet
def planned_run(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    seconds: float = 60.0,
    quiet: bool = False,
    **given: Any,
) -> PlannedRun:
    """Estimate duration, memory and disk space of the run that `train` would start, by 20 of its steps.

    Writes no files, and loads no weights.

    Args:
        data, model, recipe, settings, from_scratch, given, quiet: as in `find_lr`.
        seconds: time after which fewer steps suffice, at least 3.

    Raises:
        UsageError, DataError, CheckpointError: as in `find_lr`.
    """
    more = {"model": model, **given}
    request = Request(data, recipe, settings, more, from_scratch=from_scratch, option="--plan")
    plan = _prepared(request, needs_steps=True, loads_weights=False)
    from weft.train.estimate import measure_run

    return measure_run(plan, seconds)


@obeys_quiet
def loading_speed(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    seconds: float = 5.0,
    quiet: bool = False,
    **given: Any,
) -> Loading:
    """Measure how fast the training images of the run that `train` would start are loaded, by number of processes.

    Writes no files, and loads no weights.

    Args:
        data, model, recipe, settings, from_scratch, given, quiet: as in `find_lr`.
        seconds: time for each number of processes, above 0.

    Raises:
        UsageError, DataError: as in `train`; or several processes.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds must be above 0 and finite; got {seconds}.")
    more = {"model": model, **given}
    request = Request(data, recipe, settings, more, from_scratch=from_scratch)
    plan = _prepared(request, loads_weights=False)
    if plan.runtime.world > 1:
        raise UsageError(f"weft data bench runs in one process; got {plan.runtime.world}. Omit torchrun.")
    from weft.train.estimate import measure_loading

    return measure_loading(plan, seconds)


@obeys_quiet
def find_series(
    data: str | Path,
    model: str | None = None,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    force: bool = False,
    quiet: bool = False,
    **given: Any,
) -> dict[str, str]:
    """Find series of similar images, as `train` finds them, and write them to a file that `train` reads.

    Args:
        data, model, recipe, settings, from_scratch, given, quiet: as in `find_lr`.
        out: CSV file with the columns `image` and `group`, a row per image; the group of an image that is in no series
            is empty.
        force: overwrite an existing file.

    Returns:
        The series of each image that is in one, by its key; empty if the images are not in series.

    Raises:
        UsageError: `out` exists or is in the dataset; and as in `train`.
        DataError, CheckpointError: as in `train`.
        StorageError: the file cannot be written.
    """
    if is_first_process():
        check_new_file(Path(out), "--series", str(data), force=force)
    more = {"model": model, **given}
    request = Request(data, recipe, settings, more, from_scratch=from_scratch, option="--series FILE")
    plan = _planned(request)
    from weft.train.series import series_of_images

    series = series_of_images(plan)
    if plan.runtime.is_main:
        splits = plan.splits
        write_groups(Path(out), {**dict.fromkeys((*splits.train.keys, *splits.val.keys), ""), **series})
    plan.runtime.wait()
    return series


@obeys_quiet
def preview(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    force: bool = False,
    quiet: bool = False,
    **given: Any,
) -> Path:
    """Draw training images as the network receives them in the first epochs: cropped, augmented and mixed.

    Args:
        data, model, recipe, settings, from_scratch, given, quiet: as in `find_lr`.
        out: file to write; `.png`, `.pdf`, `.svg` or another format of matplotlib.
        force: overwrite an existing file.

    Raises:
        UsageError: `out` exists or has an unsupported format; and as in `train`.
        DataError: as in `train`.
        StorageError: the file cannot be written.
    """
    path, more = Path(out), {"model": model, **given}
    request = Request(data, recipe, settings, more, from_scratch=from_scratch, option="--preview FILE")
    if is_first_process():
        _check_image_file(path, str(request.resolved.data.source), force=force)
    plan = _prepared(request, measure=False, loads_weights=False)
    if plan.runtime.is_main:
        from weft.train.augment_preview import augmented_figure

        figure = augmented_figure(plan.recipe, plan.splits, plan.network)
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
    plan.runtime.wait()
    return path


def _check_image_file(path: Path, source: str, *, force: bool) -> None:
    """Check that a preview can be written to a file."""
    check_new_file(path, "--preview", source, force=force)
    from matplotlib.backend_bases import FigureCanvasBase  # takes a second

    if path.suffix.lstrip(".") not in FigureCanvasBase.filetypes:
        raise UsageError(f"--preview must name an image file, such as preview.png; got {path.name}.")


def _planned(request: Request) -> Plan:
    """Return the plan of the run that a request starts, before anything is measured."""
    _ = request.resolved  # refuses what it can before torch is imported
    with loading():
        from weft.train.plan import make_plan

    return make_plan(request)


def _prepared(request: Request, *, needs_steps: bool = False, measure: bool = True, loads_weights: bool = True) -> Plan:
    """Return the plan of the run that a request starts, of which no step is trained here, and print its notes."""
    if needs_steps and request.resolved.epochs == 0:
        raise UsageError(f"{request.option} tries training steps; got epochs 0, which has none. Pass --epochs N.")
    plan = dataclasses.replace(_planned(request).measured(measure=measure), loads_weights=loads_weights)
    for note in plan.notes:
        say(note)
    if request.leaves_network(plan.recipe):
        say(f"Model {plan.recipe.model}; weft train chooses among candidates, by the images. Another: --model NAME.")
    return plan


def _finished(run: Run) -> RunResult:
    """Return the result of a run that has trained all its steps; with cross-validation, after the other folds."""
    from weft.train.cross_validation import cross_validate
    from weft.train.finish import finish

    result, data = finish(run), run.recipe.data
    return result if data.folds is None or data.fold is not None else cross_validate(run, result)


@contextlib.contextmanager
def _reserved(plan: Plan, out: str | Path | None, *, force: bool) -> Iterator[Path]:
    """Lock the directory of a new run in the first process; yields the directory in all."""
    recipe, path, data = plan.recipe, Path(out or ""), str(plan.recipe.data.source)
    if out is None:
        path = Path("runs") / (recipe.name or file_name(f"{recipe.model}-{Path(data).resolve().name}"))
        check_run_dir(path, data)
    with contextlib.ExitStack() as stack:
        if plan.runtime.is_main:
            is_numbered = out is None and not force
            folder = stack.enter_context(reserved_numbered(path) if is_numbered else reserved(path, force=force))
            if folder != path:
                say(f"{path} exists; this run is {folder}.")
            path = folder
        yield Path(plan.runtime.gather(str(path))[0])  # of the first process


def _registered(module: Any, img_size: int | tuple[int, int] | str | None, resume: str | Path | None) -> str:
    """Register a module to train, at the given image size or that of the run to resume; return its name."""
    from torch import nn

    from weft.train.own_module import register_module

    if not isinstance(module, nn.Module):
        raise UsageError(f"model must be a name or a torch.nn.Module; got a {type(module).__name__}.")
    file = None if resume is None else Path(resume) / "recipe.yaml"
    base = file if file is not None and file.is_file() else None
    return register_module(module, load_recipe(base, [] if img_size is None else [("img_size", img_size)]).img_size)


def _resume(
    out: Path, overrides: Sequence[tuple[str, Any]], override: bool, stop: Stop, trackers: Sequence[str]
) -> RunResult:
    """Resume a run."""
    with loading():
        from weft.machine.runtime import Runtime
        from weft.train import begin
        from weft.train.network import check_sync_bn
        from weft.train.plan import Plan, open_splits
        from weft.train.resume import open_run, recorded_series

    saved = open_run(out, overrides, override=override)
    runtime = Runtime.of(saved.recipe.device, saved.recipe.precision, deterministic=saved.recipe.deterministic)
    check_sync_bn(saved.recipe, runtime)
    with locked(out) if runtime.is_main else contextlib.nullcontext():
        recipe = dataclasses.replace(saved.recipe, precision=runtime.precision)  # that of an override may be `auto`
        series = recorded_series(out)
        plan = Plan(recipe, open_splits(recipe, series), runtime, loads_weights=False, series=series)
        return _finished(begin.resume(plan, saved, stop, trackers))
