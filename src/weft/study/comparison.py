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
from weft.data.folder import check_outside
from weft.data.preprocessing import eval_transform
from weft.errors import DataError, UsageError, WeftError
from weft.grid import Grid
from weft.intervals import accuracy_of
from weft.progress import Work, obeys_quiet, rate, say
from weft.recipes import Recipe, load_recipe
from weft.study.advice import advise, pareto
from weft.study.candidates import SCALE, candidates_of, find_weights, recipe_from_scratch, study_of, with_weights
from weft.study.directory import Directory, opened, refuse_other
from weft.study.engine import Engine
from weft.study.experiment import Experiment
from weft.study.forms import measure_forms
from weft.study.halving import (
    EVALUATION,
    Budget,
    plan_within,
    seconds_per_image,
    staying,
    time_text,
    training_seconds,
)
from weft.study.jobs import Result
from weft.study.plan import Study, check_one_fold, slug
from weft.study.protocol import AUTO, shared_settings, with_shared
from weft.study.result import ExperimentResult, Limits, Row
from weft.study.run import write
from weft.text import first_few
from weft.train.decisions import fill_in
from weft.train.plan import open_splits

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
    splits = open_splits(dataclasses.replace(given, data=dataclasses.replace(given.data, source=data)))
    _check_val_size(splits)
    side = min(image_size_hint(splits.train))
    base, chosen = recipe or recipe_from_scratch(data, side), candidates_of(models, side)
    for variant in study_of(chosen, data, base, settings, dict.fromkeys(chosen, "any")).at_scale(SCALE):
        variant.check(has_weights=True)  # which have weights is found later
    protocol = load_recipe(base, settings.items())
    where.check([protocol])
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    check_outside(folder, data)
    names = [own["model"] for own in chosen.values()]
    command = {"study": "compare", "data": data, "models": names, "recipe": base, "settings": settings}
    with opened(folder, command, force=force) as directory:
        time.before = directory.decisions.get("seconds", 0.0)
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
        comparison = _Comparison(directory, study, weights, splits, where, time, seeds)
        try:
            comparison.train()
            rows = comparison.rows()
        finally:
            comparison.save_time()
        limits = Limits(
            None if max_latency is None else 1000 * max_latency, None if max_size is None else max_size / 1e6
        )
        epochs = comparison.epochs
        result = ExperimentResult(
            folder,
            comparison.study,
            SCALE,
            data,
            seeds,
            rows,
            comparison.experiment.seconds,
            tuple(splits.notes),
            max((epoch for row in rows for epoch, _ in row.curve), default=0) if epochs is None else epochs,
            comparison.protocol(),
            limits,
            pareto(rows, limits),
            advise(rows, limits),
        )
        write(result)
    return result


def _check_length(
    given: Recipe, budget: float | None, seeds: int, recipe: str | None, settings: Mapping[str, Any]
) -> None:
    """Check that the number of runs and their length have one source."""
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1; got {seeds}.")
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


class _Comparison:
    """Runs of a comparison: how long they are, which of them continue, and what they show.

    Batch size, precision and length of the runs are decided once for all candidates.

    Args:
        directory: with the decisions of earlier calls.
        study: the candidates as variants.
        weights: public weights of each candidate; '' for none.
        splits: training and held-out images.
        where: engine of the runs.
        time: budget, and time used so far.
        seeds: number of complete runs per remaining candidate.

    Raises:
        UsageError: the budget does not suffice for one epoch of each candidate, or is not that of earlier calls.
    """

    def __init__(
        self,
        directory: Directory,
        study: Study,
        weights: Mapping[str, str],
        splits: Splits,
        where: Engine,
        time: Budget,
        seeds: int,
    ) -> None:
        self.directory, self.weights, self.splits, self.where = directory, weights, splits, where
        self.time, self.seeds, scale = time, seeds, study.scales[SCALE]
        self.recipes = {variant.name: self._complete(variant.recipe) for variant in study.at_scale(SCALE)}
        common = self._complete(scale.common)
        self.shared = directory.decide("shared", self._shared)
        length = directory.decide("length", lambda: self._length(common.epochs))
        refuse_other(directory.path, {"budget": length["budget"]}, {"budget": time.total})
        self.epochs, self.stages = length["epochs"], length["stages"]
        self.length = f"{common.steps} steps" if self.epochs is None else f"{self.epochs} epochs"
        if self.epochs is not None:
            scale = dataclasses.replace(scale, set={**scale.set, "epochs": self.epochs})
        self.study = dataclasses.replace(study, scales={SCALE: scale})
        self.experiment = Experiment(self.study.at_scale(SCALE), scale.common, directory.path, self.shared)

    def _complete(self, recipe: Recipe) -> Recipe:
        return fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))[0]

    def _shared(self) -> dict[str, Any]:
        recipes = list(self.recipes.values())
        if all(AUTO not in (recipe.batch_size, recipe.precision) for recipe in recipes):
            return {}
        with Work("choosing batch size and precision", unit=""):
            return self.where.call(shared_settings, recipes, len(self.splits.classes), len(self.splits.train))

    def _length(self, epochs: int | None) -> dict[str, Any]:
        """Return epochs and stages: those of the recipe, or the most that the budget allows.

        Epochs are None for a recipe that counts steps; a stage is None if it is the whole run.
        """
        if self.time.total is None:
            return {"budget": None, "epochs": epochs, "stages": [epochs]}
        return plan_within(self.time, self._seconds_per_epoch(), self.seeds)

    def _seconds_per_epoch(self) -> dict[str, float]:
        """Time a few steps of each candidate, and return the seconds of an epoch with its evaluation."""
        images = len(self.splits.train) + EVALUATION * len(self.splits.val)
        prices: dict[str, float] = {}
        with Work("timing training steps", len(self.recipes), unit="models") as progress:
            for name, recipe in self.recipes.items():
                progress.update(progress.done, name=f"timing training steps of {name}")
                try:
                    seconds = self.where.call(seconds_per_image, with_shared(recipe, self.shared), self.splits)
                except (WeftError, RuntimeError) as error:
                    say(f"{name} cannot be trained: {str(error).splitlines()[0]}")
                else:
                    prices[name] = seconds * images
                    say(f"{name}: about {time_text(prices[name])} per epoch ({rate(1 / seconds, 'images')}).")
                progress.advance()
        return prices

    def train(self) -> None:
        """Train in stages; the worse half of the candidates stops after each."""
        alive = list(self.recipes)
        for stage in self.stages[:-1]:
            self.experiment.run(self.experiment.keys(alive, 1), self.where, stage)
            self.save_time()
            alive = self._kept(alive, stage)
        self.experiment.run(self.experiment.keys(alive, self.seeds), self.where)

    def _first_runs(self, names: Sequence[str]) -> dict[str, Result]:
        """Return the results of candidates with the first seed."""
        return {name: self.experiment.runs(name)[self.experiment.first_seed] for name in names}

    def _kept(self, alive: Sequence[str], stage: int) -> list[str]:
        """Return the candidates that continue after a stage: the better half, or fewer if the budget is short."""
        results = {name: run for name, run in self._first_runs(alive).items() if not run.error}
        ranked = sorted(results, key=lambda name: -results[name].top1())
        count = most = staying(len(ranked))
        paces, left = [results[name].seconds / stage for name in ranked], self.time.left_for_training
        while count > 1 and training_seconds(paces[:count], self.epochs, self.seeds, stage) > left:
            count -= 1
        if count < most:
            say(f"Training takes longer than estimated: the budget suffices for {count} of {most} models.")
        if stopped := [name for name in alive if name in ranked[count:]]:
            say(f"Stopped after epoch {stage}: {', '.join(stopped)}.")
        return [name for name in alive if name in ranked[:count]]

    def rows(self) -> tuple[Row, ...]:
        """Measure the speed of the trained candidates, and return a row of each, the best first."""
        names, first = list(self.recipes), self.experiment.first_seed
        runs = self._first_runs(names)
        stops = {name: run.job["until"] for name, run in runs.items() if not run.error}
        if not stops:
            reasons = "; ".join(f"{name}: {run.error}" for name, run in runs.items())
            raise UsageError(f"None of the candidates could be trained. {reasons}")
        tops = {row.name: row.mean.value for row in self.experiment.rows(names) if row.mean is not None}
        best, *others = sorted(stops, key=lambda name: (stops[name] is not None, -tops[name]))
        jobs = {name: self.experiment.job((name, first), stops[name]) for name in (best, *others)}
        forms = measure_forms(self.directory.path, jobs, lambda: self.time.left)
        rows = []
        for row in self.experiment.rows(names, best):
            row = dataclasses.replace(row, model=self.recipes[row.name].model or "", weights=self.weights[row.name])
            if row.name in stops:
                stop, right = stops[row.name], runs[row.name].right()
                verdict = "best" if row.name == best else "worse than the best" if row.is_worse else "not significant"
                row = dataclasses.replace(
                    row,
                    mean=accuracy_of(int(right.sum()), right.size) if len(row.top1) == 1 else row.mean,
                    verdict=verdict if stop is None else f"stopped after epoch {stop}",
                    stopped_after=stop,
                    forms=tuple(forms[row.name]),
                )
            rows.append(row)
        top = {row.name: -math.inf if row.mean is None else row.mean.value for row in rows}
        return tuple(sorted(rows, key=lambda row: (not row.top1, row.stopped_after is not None, -top[row.name])))

    def save_time(self) -> None:
        """Keep the time used so far, for a later call."""
        self.directory.decisions["seconds"] = self.time.spent
        self.directory.save()

    def protocol(self) -> str:
        """Describe how the candidates were trained, in one sentence."""

        def name(recipe: str | None) -> str:
            return "the defaults of weft train" if recipe is None else f"recipe {recipe}"

        counts = f"{len(self.splits.train):,} training images and {len(self.splits.val):,} held-out images"
        text = f"{name(self.study.scales[SCALE].recipe)}, {self.length}, {counts}, the same for all models"
        if self.shared:
            text += f", with {', '.join(f'{key}={value}' for key, value in self.shared.items())}"
        if len(self.stages) > 1:
            text += f"; halving after epochs {', '.join(map(str, self.stages[:-1]))}"
        scratch = [variant for variant in self.experiment.variants.values() if not self.weights[variant.name]]
        text += ", from scratch" if len(scratch) == len(self.recipes) else ", from public weights"
        if 0 < len(scratch) < len(self.recipes):
            shown = ", ".join(variant.name for variant in scratch)
            text += f"; from scratch with {name(scratch[0].base)}, since there are no public weights: {shown}"
        return f"{text}; {self.seeds} seed{'s' if self.seeds > 1 else ''}."
