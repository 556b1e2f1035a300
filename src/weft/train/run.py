"""`train`: start a training run from a dataset and a recipe, or resume one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from weft.errors import UsageError
from weft.models.own import register_module
from weft.progress import say
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import arguments_of, default_recipe, overrides_of, recipe_names
from weft.runs.directory import Reservation, check_run_dir, locked, reserved, reserved_numbered
from weft.runtime import Runtime
from weft.train.arguments import check_resume, checked_recipe, load_plan_recipe
from weft.train.extend import extend as extend_run
from weft.train.extend import extended_recipe
from weft.train.few_images import with_available_weights
from weft.train.plan import Plan, default_name, leaves_batch_size, make_plan, open_splits
from weft.train.results import RunResult
from weft.train.resume import open_run
from weft.train.single_run import TrainingRun
from weft.train.stop import Stop, seconds_of
from weft.train.track import check_trackers


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
    max_pixels: int | None = None,
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
        limit, max_pixels, folds, group, other, follow_links: settings of the dataset (`data.limit`, ...) with an
            argument of their own.
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
        run = TrainingRun(plan, directory.reservation.path, stop, trackers, quiet)
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
        resumed = TrainingRun(plan, out, stop, trackers, quiet)
        return resumed.cross_validate(resumed.resume(run))
