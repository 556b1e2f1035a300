"""Runs of a comparison: their length, the stages after which the worse half stops, and their result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from weft.data import Splits, image_size_hint
from weft.errors import UsageError, WeftError
from weft.progress import Work, rate, say
from weft.recipes import Recipe
from weft.report.intervals import accuracy_of
from weft.study.advice import advise, pareto
from weft.study.candidates import SCALE
from weft.study.directory import Directory, refuse_other
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
from weft.study.plan import Study
from weft.study.protocol import AUTO, shared_settings, with_shared
from weft.study.result import ExperimentResult, Limits, Row
from weft.text import reason_of
from weft.train.decisions import fill_in


class StagedRuns:
    """Runs of a comparison: how long they are, and which of them continue.

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
        time.before = directory.decisions.get("seconds", 0.0)
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
                    say(f"{name} cannot be trained: {reason_of(error)}.")
                else:
                    prices[name] = seconds * images
                    say(f"{name}: about {time_text(prices[name])} per epoch ({rate(1 / seconds, 'images')}).")
                progress.advance()
        return prices

    def result(self, limits: Limits) -> ExperimentResult:
        """Train the candidates in stages, measure their speed, and return their result, within limits on deployment."""
        try:
            self._train()
            rows = self._rows()
        finally:
            self._save_time()
        longest = max((epoch for row in rows for epoch, _ in row.curve), default=0)
        return ExperimentResult(
            self.directory.path,
            self.study,
            SCALE,
            self.study.scales[SCALE].data,
            self.seeds,
            rows,
            self.experiment.seconds,
            notes=tuple(self.splits.notes),
            epochs=longest if self.epochs is None else self.epochs,
            protocol=self._protocol(),
            limits=limits,
            frontier=pareto(rows, limits),
            advice=advise(rows, limits),
        )

    def _train(self) -> None:
        """Train in stages; the worse half of the candidates stops after each."""
        alive = list(self.recipes)
        for stage in self.stages[:-1]:
            self.experiment.run(self.experiment.keys(alive, 1), self.where, stage)
            self._save_time()
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

    def _rows(self) -> tuple[Row, ...]:
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
        rows.sort(key=lambda row: (not row.top1, row.stopped_after is not None, -row.mean.value if row.mean else 0.0))
        return tuple(rows)

    def _save_time(self) -> None:
        """Keep the time used so far, for a later call."""
        self.directory.decisions["seconds"] = self.time.spent
        self.directory.save()

    def _protocol(self) -> str:
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
