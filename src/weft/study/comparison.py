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
from weft.processor import busy_note
from weft.progress import obeys_quiet, rate, say, working
from weft.recipes import Recipe, load_recipe
from weft.runtime import Runtime
from weft.study.advice import advise, pareto
from weft.study.candidates import (
    SCALE,
    candidates_of,
    check_candidates,
    find_weights,
    recipe_from_scratch,
    study_of,
    with_weights,
)
from weft.study.directory import Directory, opened
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
from weft.study.jobs import Job, Result
from weft.study.plan import Study, StudyVariant, check_one_fold, recipe_of, slug
from weft.study.protocol import AUTO, shared_settings, with_shared
from weft.study.result import ExperimentResult, Limits, Row
from weft.study.run import write
from weft.study.statistics import accuracy
from weft.text import first_few
from weft.train.network import check_sync_bn
from weft.train.plan import fill_in, open_splits

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
    max_latency_ms: float | None = None,
    max_megabytes: float | None = None,
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
        max_latency_ms, max_megabytes: limits of the recommendation: latency of one image here, size of the file.
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
    given = load_recipe(recipe, list(settings.items()))
    _check_length(given, budget, seeds, recipe, settings)
    check_one_fold(given.data)
    splits = open_splits(dataclasses.replace(given, data=dataclasses.replace(given.data, source=data)))
    _check_val_size(splits)
    side = min(image_size_hint(splits.train))
    base, chosen = recipe or recipe_from_scratch(data, side), candidates_of(models, side)
    check_candidates(chosen, base, settings)
    if engine == "local":  # the machines of a cluster may have GPUs that this one does not have
        check_sync_bn(load_recipe(base, list(settings.items())), Runtime.of(given.device))
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    check_outside(folder, data)
    names = [own["model"] for own in chosen.values()]
    command = {"study": "compare", "data": data, "models": names, "recipe": base, "settings": settings}
    with opened(folder, command, force=force) as directory:
        time.add(directory.decisions.get("seconds", 0.0))
        say(
            f"Comparing {', '.join(chosen)} on {len(splits.train):,} training images and {len(splits.val):,} held-out"
            f" images of {data}, in {folder}."
        )
        crop = eval_transform({"input_size": (3, *Grid.of(given.img_size or side))})
        for note in filter(None, (crop.note(splits.sizes), busy_note(jobs * where.cores))):
            say(note)
        weights = directory.decide("weights", lambda: find_weights(chosen, base, settings))
        chosen = with_weights(chosen, weights, load_recipe(base, list(settings.items())))
        comparison = _Comparison(directory, study_of(chosen, data, base, settings, weights), splits, where, time)
        comparison.decide(seeds)
        try:
            comparison.train(seeds)
            rows = comparison.rows(weights)
        finally:
            comparison.save_time()
        limits, epochs = Limits(max_latency_ms, max_megabytes), comparison.epochs
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
            comparison.protocol(seeds, weights),
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

    Args:
        directory: with the decisions of earlier calls.
        study: the candidates as variants.
        splits: training and held-out images.
        where: engine of the runs.
        time: budget, and time used so far.
    """

    def __init__(self, directory: Directory, study: Study, splits: Splits, where: Engine, time: Budget) -> None:
        self.directory, self.study, self.splits, self.where, self.time = directory, study, splits, where, time
        self.names = [variant.name for variant in study.variants]

    def decide(self, seeds: int) -> None:
        """Decide batch size, precision and length of the runs, once for all candidates.

        Raises:
            UsageError: the budget does not suffice for one epoch of each candidate, or is not that of earlier calls.
        """
        self.shared = self.directory.decide("shared", self._shared)
        length = self.directory.decide("length", lambda: self._length(seeds))
        if length["budget"] != self.time.total:
            before, now = (f"budget={value}" for value in (length["budget"], self.time.total))
            raise UsageError(
                f"{self.directory.path} has results of {before}; got {now}. Pass the same to continue them, or choose"
                " another --out. --force replaces the results."
            )
        self.epochs, self.stages = length["epochs"], length["stages"]
        scale = self.study.scales[SCALE]
        if self.epochs is not None:
            scale = dataclasses.replace(scale, set={**scale.set, "epochs": self.epochs})
        self.study = dataclasses.replace(self.study, scales={SCALE: scale})
        sources = {scale.data: scale.data}
        self.experiment = Experiment(self.study, SCALE, self.directory.path, sources, self.shared)

    def _recipe(self, variant: StudyVariant) -> Recipe:
        """Return the complete recipe of a candidate."""
        recipe = recipe_of(self.study, variant, SCALE, [("data.source", self.study.scales[SCALE].data)])
        return fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))[0]

    def _common_recipe(self) -> Recipe:
        scale = self.study.scales[SCALE]
        recipe = load_recipe(scale.recipe, list(scale.set.items()))
        return fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))[0]

    def _shared(self) -> dict[str, Any]:
        recipes = [self._recipe(variant) for variant in self.study.variants]
        if all(AUTO not in (recipe.batch_size, recipe.precision) for recipe in recipes):
            return {}
        with working("choosing batch size and precision", unit=""):
            counts = len(self.splits.classes), len(self.splits.train)
            return self.where.call(shared_settings, recipes, *counts)

    def _length(self, seeds: int) -> dict[str, Any]:
        """Return epochs and stages: those of the recipe, or the most that the budget allows.

        Epochs are None for a recipe that counts steps; a stage is None if it is the whole run.
        """
        if self.time.total is None:
            epochs = self._common_recipe().epochs
            return {"budget": None, "epochs": epochs, "stages": [epochs]}
        return plan_within(self.time, self._seconds_per_epoch(), seeds)

    def _seconds_per_epoch(self) -> dict[str, float]:
        """Time a few steps of each candidate, and return the seconds of an epoch with its evaluation."""
        images = len(self.splits.train) + EVALUATION * len(self.splits.val)
        prices: dict[str, float] = {}
        with working("timing training steps", len(self.names), unit="models") as progress:
            for variant in self.study.variants:
                progress.update(progress.done, name=f"timing training steps of {variant.name}")
                recipe = with_shared(self._recipe(variant), self.shared)
                try:
                    seconds = self.where.call(seconds_per_image, recipe, self.splits)
                except (WeftError, RuntimeError) as error:
                    say(f"{variant.name} cannot be trained: {str(error).splitlines()[0]}")
                else:
                    prices[variant.name] = seconds * images
                    epoch, speed = time_text(seconds * images), rate(1 / seconds, "images")
                    say(f"{variant.name}: about {epoch} per epoch ({speed}).")
                progress.advance()
        return prices

    def train(self, seeds: int) -> None:
        """Train in stages; the worse half of the candidates stops after each."""
        alive, first = self.names, self.experiment.first_seed
        for stage in self.stages[:-1]:
            keys = [(name, first) for name in alive]
            self.experiment.run(
                keys, self.where, until=stage, on_done=self._announce(f"epoch {stage} of {self.epochs}")
            )
            self.save_time()
            alive = self._kept(alive, stage, seeds)
        variants = [variant for variant in self.study.variants if variant.name in alive]
        length = f"{self._common_recipe().steps} steps" if self.epochs is None else f"{self.epochs} epochs"
        keys = self.experiment.keys(variants, seeds)
        self.experiment.run(keys, self.where, on_done=self._announce(length))

    def _kept(self, alive: Sequence[str], stage: int, seeds: int) -> list[str]:
        """Return the candidates that continue after a stage: the better half, or fewer if the budget is short."""
        first = self.experiment.first_seed
        results = {name: self.experiment.runs(name)[first] for name in alive}
        ranked = sorted((name for name in alive if not results[name].error), key=lambda name: -results[name].top1())
        count = most = staying(len(ranked))
        paces = [results[name].seconds / stage for name in ranked]
        while count > 1 and training_seconds(paces[:count], self.epochs, seeds, stage) > self.time.left_for_training:
            count -= 1
        if count < most:
            say(f"Training takes longer than estimated: the budget suffices for {count} of {most} models.")
        if stopped := [name for name in alive if name in ranked[count:]]:
            say(f"Stopped after epoch {stage}: {', '.join(stopped)}.")
        return [name for name in alive if name in ranked[:count]]

    def _announce(self, length: str) -> Any:
        def on_done(job: Job, result: Result) -> None:
            say(
                f"{job.folder.name}, {length}: "
                + (f"failed: {result.error}" if result.error else f"{result.top1():.2f} %")
            )

        return on_done

    def rows(self, weights: Mapping[str, str]) -> tuple[Row, ...]:
        """Measure the speed of the trained candidates, and return a row of each, the best first."""
        first = self.experiment.first_seed
        runs = {name: self.experiment.runs(name) for name in self.names}
        trained = {name: run for name in self.names if not (run := runs[name][first]).error}
        if not trained:
            reasons = "; ".join(f"{name}: {runs[name][first].error}" for name in self.names)
            raise UsageError(f"None of the candidates could be trained. {reasons}")
        stops = {name: run.job["until"] for name, run in trained.items()}
        tops = {name: float(np.mean([run.top1() for run in runs[name].values() if not run.error])) for name in trained}
        best = max(trained, key=lambda name: (stops[name] is None, tops[name]))
        order = sorted(trained, key=lambda name: (stops[name] is not None, -tops[name]))
        jobs = {name: self.experiment.job((name, first), stops[name]) for name in order}
        forms = measure_forms(self.directory.path, jobs, lambda: self.time.left)
        rows = []
        for row in self.experiment.rows(self.names, best):
            run = trained.get(row.name)
            row = dataclasses.replace(
                row, model=self.experiment.variants[row.name].set["model"], weights=weights[row.name]
            )
            if run is not None:
                stopped_after = stops[row.name]
                verdict = "best" if row.name == best else "worse than the best" if row.is_worse else "not significant"
                row = dataclasses.replace(
                    row,
                    mean=accuracy(run.right()) if len(row.top1) == 1 else row.mean,
                    verdict=verdict if stopped_after is None else f"stopped after epoch {stopped_after}",
                    stopped_after=stopped_after,
                    peak_mib=run.peak_mib,
                    forms=tuple(forms[row.name]),
                )
            rows.append(row)
        rows.sort(key=lambda row: -math.inf if row.mean is None else row.mean.value, reverse=True)
        rows.sort(key=lambda row: (not row.top1, row.stopped_after is not None))
        return tuple(rows)

    def save_time(self) -> None:
        """Keep the time used so far, for a later call."""
        self.directory.decisions["seconds"] = self.time.spent
        self.directory.save()

    def protocol(self, seeds: int, weights: Mapping[str, str]) -> str:
        """Describe how the candidates were trained, in one sentence."""

        def name(recipe: str | None) -> str:
            return "the defaults of weft train" if recipe is None else f"recipe {recipe}"

        scale = self.study.scales[SCALE]
        length = f"{self._common_recipe().steps} steps" if self.epochs is None else f"{self.epochs} epochs"
        counts = f"{len(self.splits.train):,} training images and {len(self.splits.val):,} held-out images"
        text = f"{name(scale.recipe)}, {length}, {counts}, the same for all models"
        if self.shared:
            text += f", with {', '.join(f'{key}={value}' for key, value in self.shared.items())}"
        if len(self.stages) > 1:
            text += f"; halving after epochs {', '.join(map(str, self.stages[:-1]))}"
        scratch = [variant for variant in self.study.variants if not weights[variant.name]]
        text += ", from scratch" if len(scratch) == len(self.names) else ", from public weights"
        if 0 < len(scratch) < len(self.names):
            recipe, shown = self.study.recipe(scratch[0], SCALE), ", ".join(variant.name for variant in scratch)
            text += f"; from scratch with {name(recipe)}, since there are no public weights: {shown}"
        return f"{text}; {seeds} seed{'s' if seeds > 1 else ''}."
