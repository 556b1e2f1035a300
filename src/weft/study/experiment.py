"""Experiment: variants and seeds as training runs in a directory, and the rows that compare them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.files import write_table
from weft.recipes import load_recipe
from weft.study.engine import Engine
from weft.study.jobs import REFERENCE, Job, Result, is_reference, read_result
from weft.study.plan import Study, StudyVariant, recipe_of, size_to_test, slug
from weft.study.protocol import open_keys
from weft.study.result import Row
from weft.study.statistics import Estimate, mcnemar, mean_of_runs, paired_difference
from weft.study.watch import watching

COLUMNS = ("variant", "seed", "img_size", "top1", "params", "macs", "seconds", "error", "curve")
Key = tuple[str, int]
"""Name of a variant, and seed."""


class Experiment:
    """Runs of a study at one scale.

    Args:
        study: the study, with the variants of the scale only.
        scale: name of the scale.
        folder: directory of the runs and of runs.csv.
        sources: place of each dataset, by the name that the study calls it.
        shared: settings for recipes that leave them to the machine, by `shared_settings`.

    Attributes:
        first_seed, split_seed: first seed of the runs, and seed of the split of all of them.
        results: by folder of the job; finished and failed ones.
    """

    def __init__(
        self, study: Study, scale: str, folder: Path, sources: Mapping[str, str], shared: Mapping[str, Any]
    ) -> None:
        self.study, self.scale, self.folder, self.sources, self.shared = study, scale, folder, sources, shared
        size = study.scales[scale]
        base = load_recipe(size.recipe, [item for item in size.set.items() if not is_reference(item[1])])
        self.first_seed, self.split_seed = base.seed, base.split_seed
        self.variants = {variant.name: variant for variant in study.variants}
        self.results: dict[Path, Result] = {}
        self._jobs: dict[tuple[str, int, int | None], Job] = {}

    def keys(self, variants: Sequence[StudyVariant], seeds: int) -> list[Key]:
        """Return the runs of variants with a number of seeds each, seed by seed."""
        return [
            (variant.name, self.first_seed + number)
            for number in range(seeds)
            for variant in variants
            if number < (variant.seeds or seeds)
        ]

    def job(self, key: Key, until: int | None = None) -> Job:
        """Return the job of a variant and seed, up to an epoch or to its end.

        Variants with the same settings share a job, which has the name of the first.
        """
        name, seed = key
        if (name, seed, until) not in self._jobs:
            variants = self._sharing(self.variants[name])
            first = variants[0]
            needed = {setting: self._needed(other, seed) for setting, other in self._references(first).items()}
            settings = {
                **self.study.settings(first, self.scale),
                **open_keys(recipe_of(self.study, first, self.scale), self.shared),
                **{setting: f"{REFERENCE}{job.folder.name}" for setting, job in needed.items()},
                "seed": seed,
                "data.seed": self.split_seed,
            }
            self._jobs[name, seed, until] = Job(
                self.folder / "runs" / f"{slug(first.name)}-seed{seed}",
                self.study.recipe(first, self.scale),
                self.sources[self.study.data(first, self.scale)],
                settings,
                tuple(dict.fromkeys(self._test_size(variant) for variant in variants)),
                until,
                tuple({job.folder: job for job in needed.values()}.values()),
            )
        return self._jobs[name, seed, until]

    def _references(self, variant: StudyVariant) -> dict[str, StudyVariant]:
        return self.study.references(variant, self.scale)

    def _needed(self, variant: StudyVariant, seed: int) -> Job:
        """Return the job of a variant whose model is needed: of the same seed, or of the last one that it has."""
        last = self.first_seed + variant.seeds - 1 if variant.seeds else seed
        return self.job((variant.name, min(seed, last)))

    def _sharing(self, variant: StudyVariant) -> list[StudyVariant]:
        """Return the variants that share their runs with one, in the order of the study."""
        key = self.study.run_key(variant, self.scale)
        return [other for other in self.study.variants if self.study.run_key(other, self.scale) == key]

    def _test_size(self, variant: StudyVariant) -> int | None:
        return size_to_test(recipe_of(self.study, variant, self.scale), variant)

    def read(self) -> None:
        """Read the results of all finished runs in the directory, also of variants and seeds of earlier calls."""
        names = [folder.name for folder in (self.folder / "runs").glob("*-seed*")]
        seeds = sorted({int(found[1]) for name in names if (found := re.search(r"-seed(\d+)$", name))})
        for job in [self.job((name, seed)) for seed in seeds for name in self.variants]:
            if (result := read_result(job)) is not None:
                self.results[job.folder] = result

    def run(
        self,
        keys: Sequence[Key],
        engine: Engine,
        *,
        until: int | None = None,
        on_done: Callable[[Job, Result], None] = lambda job, result: None,
    ) -> None:
        """Run jobs that are not finished, with progress; runs.csv is written after each.

        Args:
            keys: variants and seeds.
            engine: where jobs run.
            until: epoch at which they stop; None for their end.
            on_done: called after each job that was run.
        """
        jobs = list({(job := self.job(key, until)).folder: job for key in keys}.values())

        def end(job: Job, result: Result) -> None:
            self.results[job.folder] = result
            self.write_runs()
            on_done(job, result)

        with watching(jobs) as on_wait:
            self.results |= engine.run(jobs, on_done=end, on_wait=on_wait)
        self.write_runs()

    def progress(self, keys: Sequence[Key]) -> str:
        """Return how many of the runs are finished."""
        folders = {self.job(key).folder for key in keys}
        return f"{len(folders & self.results.keys())} of {len(folders)} runs finished."

    def runs(self, name: str) -> dict[int, Result]:
        """Return the results of a variant by seed, failed ones included."""
        seeds = sorted({seed for _, seed, _ in self._jobs})
        folders = {seed: self.job((name, seed)).folder for seed in seeds}
        return {seed: self.results[folder] for seed, folder in folders.items() if folder in self.results}

    def write_runs(self) -> None:
        """Write runs.csv: one line per variant and seed, in the order of the study."""
        lines = []
        for name, variant in self.variants.items():
            size = self._test_size(variant)
            for seed, run in self.runs(name).items():
                curve = " ".join(f"{epoch}:{top1}" for epoch, top1 in run.curve)
                values = ("", "", "", "") if run.error else (run.top1(size), run.params, run.macs, f"{run.seconds:.0f}")
                lines.append((name, seed, size or "", *values, run.error or "", curve))
        write_table(self.folder / "runs.csv", COLUMNS, lines)

    def rows(self, wanted: Sequence[str], best: str | None = None) -> list[Row]:
        """Compare variants: those in `wanted`, and all others with a finished run.

        Args:
            wanted: names of variants.
            best: variant that all others are compared with; None for the baseline of each.
        """
        rows, drawn = [], set[Path]()
        for variant in self.study.variants:
            runs = self.runs(variant.name)
            if variant.name not in wanted and not _finished(runs):
                continue
            against = self.variants.get(best or "") or self.study.baseline(variant)
            row = self._row(variant, runs, None if against is variant else against)
            folder = self.job((variant.name, self.first_seed)).folder
            rows.append(dataclasses.replace(row, curve=()) if folder in drawn else row)
            drawn.add(folder)
        return rows

    def _row(self, variant: StudyVariant, runs: Mapping[int, Result], base: StudyVariant | None) -> Row:
        size, finished = self._test_size(variant), _finished(runs)
        others = {} if base is None else _finished(self.runs(base.name))
        pairs = [
            (run.right(size), others[seed].right(self._test_size(base)))
            for seed, run in finished.items()
            if base is not None and seed in others
        ]
        effect = paired_difference(pairs)
        paper_effect = None
        if base is not None and variant.paper is not None and base.paper is not None:
            paper_effect = round(variant.paper - base.paper, 2)
        top1 = tuple(run.top1(size) for run in finished.values())
        one = next(iter(finished.values()), Result())
        return Row(
            variant.name,
            None if base is None else base.name,
            top1,
            mean_of_runs(top1) if top1 else None,
            effect,
            mcnemar(*pairs[0]) if pairs and pairs[0][0].size == pairs[0][1].size else None,
            params=one.params,
            macs=one.macs,
            seconds=sum(run.seconds for run in finished.values()),
            curve=_mean_curve([run.curve for run in finished.values()]),
            errors=tuple((seed, run.error) for seed, run in runs.items() if run.error is not None),
            paper=variant.paper,
            paper_effect=paper_effect,
            verdict=verdict(effect, paper_effect) if top1 else "failed",
        )

    @property
    def seconds(self) -> float:
        """Time of all finished runs together."""
        return sum(result.seconds for result in self.results.values())


def _finished(runs: Mapping[int, Result]) -> dict[int, Result]:
    return {seed: run for seed, run in runs.items() if run.error is None}


def verdict(effect: Estimate | None, paper_effect: float | None) -> str:
    """Return the significance and sign of an effect, as text.

    Args:
        effect: in percentage points; None for a variant that is compared with no other.
        paper_effect: effect in the paper.
    """
    if effect is None:
        return ""
    if effect.low <= 0 <= effect.high:
        return "no difference shown"
    sign = "higher" if effect.value > 0 else "lower"
    if paper_effect is None:
        return sign
    if paper_effect == 0:
        return f"{sign}, no effect in the paper"
    return f"{sign}, {'as in' if (paper_effect > 0) == (effect.value > 0) else 'against'} the paper"


def _mean_curve(curves: Sequence[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
    """Average the curves over the epochs that all of them have."""
    values = [dict(curve) for curve in curves if curve]
    epochs = set.intersection(*(set(value) for value in values)) if values else set[int]()
    return tuple((epoch, float(np.mean([value[epoch] for value in values]))) for epoch in sorted(epochs))
