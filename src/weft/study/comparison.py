"""`compare`: compare models by accuracy and speed on the user's images and machine.

A comparison is a study of models under one protocol: the same recipe, images, split, length, seeds, batch size and
precision. All seeds hold out the same images. For large images the models start from public weights if these can be
downloaded; one without any is trained from scratch, with a recipe for that, and marked. Within a time budget they run
in stages, and after each stage the worse half stops (successive halving, arXiv 1502.07943). All runs follow the
schedule of a complete run, so nothing is trained twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import Splits, image_size_hint
from weft.data.preprocessing import eval_transform
from weft.errors import DataError, UsageError
from weft.grid import Grid
from weft.models.families import check_name
from weft.progress import loading, obeys_quiet, say
from weft.recipes import Recipe, load_recipe
from weft.recipes.checks import check_argument
from weft.recipes.schema import Positive
from weft.study.directory import check_request, opened
from weft.study.engine import Engine
from weft.study.halving import Budget
from weft.study.plan import check_one_fold, slug
from weft.study.report import write_report
from weft.study.result import ExperimentResult, Limits
from weft.text import first_few

MIN_PER_CLASS = 5  # validation images per class; with fewer, an accuracy is a guess


@obeys_quiet
def compare(
    data: str | Path,
    *,
    models: Sequence[str] = (),
    budget: float | None = None,
    seeds: int = 1,
    recipe: str | None = None,
    settings: Mapping[str, Any] | None = None,
    max_latency: float | None = None,
    max_size: float | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    jobs: int = 1,
    threads: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> ExperimentResult:
    """Train several models under one protocol, measure their speed, and recommend one.

    Args:
        data: as in `train`.
        models: model names; empty for one of each family of weft, a DeiT and a ResNet of similar cost.
        budget: time limit for everything, in seconds: timing each model, training, and measuring speed. None for the
            epochs of the recipe. It is met approximately: the time of a run is an estimate, and a machine may become
            slower.
        seeds: number of complete runs per remaining candidate.
        recipe: base recipe of all runs; None to choose by the images.
        settings: recipe settings of all runs, by dotted key.
        max_latency, max_size: limits of the recommendation: latency of one image here in seconds, size of the file in
            bytes.
        out: directory; None for runs/compare-DATA. An interrupted comparison resumes there.
        engine, jobs, threads: as in `run_study`.
        force: replace another comparison in `out`.
        quiet: print no progress and no notes.

    Raises:
        UsageError: an unknown model or setting, a budget that is too small, or a directory that is taken.
        DataError: the dataset cannot be used, or has too few validation images to compare on.
    """
    where, time = Engine(engine, jobs, threads), Budget(budget)
    data, settings = str(data), dict(settings or {})
    given = load_recipe(recipe, settings.items())
    _check_length(given, budget, seeds, recipe, settings)
    check_one_fold(given.data)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    check_request([data], folder, force=force)
    with loading():
        from weft.study.candidates import (
            SCALE,
            candidates_of,
            find_weights,
            recipe_from_scratch,
            study_of,
            with_weights,
        )
        from weft.study.stages import StagedRuns
        from weft.train.plan import open_splits

        for name in models:
            check_name(name)
    splits = open_splits(dataclasses.replace(given, data=dataclasses.replace(given.data, source=data)))
    _check_val_size(splits)
    side = min(image_size_hint(splits.train))
    base, chosen = recipe or recipe_from_scratch(data, side), candidates_of(models, side)
    for variant in study_of(chosen, data, base, settings, dict.fromkeys(chosen, "any")).at_scale(SCALE):
        variant.check(has_weights=True)  # which have weights is found later
    protocol = load_recipe(base, settings.items())
    where.check([protocol])
    names = [own["model"] for own in chosen.values()]
    command = {"study": "compare", "data": data, "models": names, "recipe": base, "settings": settings}
    with opened(folder, command, force=force) as directory:
        if group := directory.group_of(data, recipe, settings):
            settings["data.group"] = group
            splits = open_splits(load_recipe(recipe, {"data.source": data, **settings}.items()))
            _check_val_size(splits)
        say(
            f"Comparing {', '.join(chosen)} on {len(splits.train):,} training images and {len(splits.val):,} held-out"
            f" images of {data}, in {folder}."
        )
        crop = eval_transform({"input_size": (3, *Grid.of(given.img_size or side))})
        if note := crop.note(splits.sizes):
            say(note)
        weights = directory.decide("weights", lambda: find_weights(chosen, base, settings))
        chosen = with_weights(chosen, weights) if protocol.epochs == 0 else chosen
        study = study_of(chosen, data, base, settings, weights)
        limits = Limits(
            None if max_latency is None else 1000 * max_latency, None if max_size is None else max_size / 1e6
        )
        result = StagedRuns(directory, study, weights, splits, where, time, seeds).result(limits)
        write_report(result)
    return result


def _check_length(
    given: Recipe, budget: float | None, seeds: int, recipe: str | None, settings: Mapping[str, Any]
) -> None:
    """Check that the number of runs and their length have one source."""
    check_argument("seeds", seeds, Positive)
    if budget is not None and "epochs" in settings:
        raise UsageError("A budget decides the number of epochs; pass --budget or --epochs, not both.")
    if budget is not None and ("steps" in settings or given.epochs == 0):
        length = f"steps={given.steps}" if "steps" in settings else f"recipe {recipe} with epochs 0"
        raise UsageError(f"A budget decides the number of epochs; got {length}. Omit it, or omit --budget.")


def _check_val_size(splits: Splits) -> None:
    counts = np.bincount(splits.val.labels, minlength=len(splits.classes))
    few = np.flatnonzero(counts < MIN_PER_CLASS)
    if not len(few):
        return
    shown = first_few(f"{splits.classes[number]}: {counts[number]}" for number in few)
    least = (counts + np.bincount(splits.train.labels, minlength=len(counts)))[few].min()
    advice = "Add images to these classes, or leave them out."
    if not splits.is_given and least >= 2 * MIN_PER_CLASS:
        fraction = math.ceil(100 * MIN_PER_CLASS / least) / 100
        advice = f"Add images, or hold out more of them: --set data.val_fraction={fraction:g}."
    raise DataError(
        f"A comparison needs at least {MIN_PER_CLASS} held-out images of every class; got {shown}. {advice}"
    )
