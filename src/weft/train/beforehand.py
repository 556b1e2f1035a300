"""`find_lr` and `preview`: run a part of training without writing a run directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backend_bases import FigureCanvasBase

from weft.data import Splits, image_size_hint
from weft.durable import writing
from weft.errors import UsageError
from weft.recipes import Recipe, load_recipe
from weft.train.augmented import augmented_figure
from weft.train.build import begin_from, build_model, open_splits, training_batches, training_images
from weft.train.defaults import default_recipe, fill_in, overrides_of
from weft.train.finder import LrFinding, find_batch_size, sweep_lr
from weft.train.rundir import check_writable
from weft.train.runtime import Runtime


def find_lr(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: int = 100,
    quiet: bool = False,
    **given: Any,
) -> LrFinding:
    """Tries learning rates from 1e-7 to 1 on the training images, and suggests one. Leaves nothing behind.

    Args:
        data, model, recipe, settings, quiet: as in `train`.
        steps: how many to try.
        given: further arguments of `train` that are settings, such as `batch_size`.

    Raises:
        UsageError, DataError, CheckpointError: as in `train`.
    """
    plan, splits, runtime = _planned("--find-lr", data, model, recipe, settings, quiet, given)
    if plan.batch_size == "auto":
        size, _ = find_batch_size(plan, len(splits.classes), len(splits.train), runtime)
        plan = dataclasses.replace(plan, batch_size=size)
    network = build_model(plan, len(splits.classes)).to(runtime.device)
    if plan.start_from is not None:
        begin_from(network, plan.start_from, splits.classes)
    batches = training_batches(plan, training_images(plan, splits.train, network), network, runtime)
    plan = dataclasses.replace(plan, distill=dataclasses.replace(plan.distill, teacher=None))
    return sweep_lr(network, plan, batches, runtime, len(splits.classes), steps)


def preview(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
    quiet: bool = False,
    **given: Any,
) -> Path:
    """Draws some training images as the network is going to see them in the first epochs: cropped, varied, mixed.

    Args:
        data, model, recipe, settings, quiet: as in `train`.
        out: the file; `.png`, `.pdf`, `.svg` or another that matplotlib writes.
        force: overwrite it.
        given: further arguments of `train` that are settings, such as `img_size`.

    Raises:
        UsageError: `out` is taken, or of a kind that cannot be written; and as in `train`.
        DataError: as in `train`.
        StorageError: the disk did not take it.
    """
    path = Path(out)
    if path.exists() and not (force and path.is_file()):
        raise UsageError(f"--preview must name a new file; {path} is there already. Pass --force or another name.")
    if path.suffix.lstrip(".") not in FigureCanvasBase.filetypes:
        raise UsageError(f"--preview must name a picture, such as seen.png; got {path.name}.")
    check_writable(path.parent)
    plan, splits, _ = _planned("--preview FILE", data, model, recipe, settings, quiet, given)
    network = build_model(dataclasses.replace(plan, pretrained=False), len(splits.classes))  # its weights are not asked
    figure = augmented_figure(plan, splits, network)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return path


class _Planned(NamedTuple):
    plan: Recipe
    splits: Splits
    runtime: Runtime


def _planned(
    option: str,
    data: str | Path | None,
    model: str | None,
    recipe: str | Path | None,
    settings: Mapping[str, Any] | None,
    quiet: bool,
    given: Mapping[str, Any],
) -> _Planned:
    """What a training with these arguments would be."""
    plan = load_recipe(recipe or default_recipe(data), overrides_of(data, settings or {}, {"model": model, **given}))
    if plan.data.source is None:
        raise UsageError(f"Training needs images; got none. Name a folder or `digits`: weft train DATA {option}.")
    runtime = Runtime.of(plan.device, plan.precision)
    splits = open_splits(plan, quiet)
    plan, _ = fill_in(plan, image_size_hint(splits.train), len(splits.train), runtime.world)
    return _Planned(plan, splits, runtime)
