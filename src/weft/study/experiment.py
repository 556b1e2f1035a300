"""Experiment: variants and seeds as training runs in a directory, and the rows that compare them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.files import write_table
from weft.progress import say
from weft.recipes import Recipe
from weft.study.engine import Engine
from weft.study.jobs import REFERENCE, Job, Result, read_result
from weft.study.plan import ResolvedVariant, slug
from weft.study.protocol import open_keys
from weft.study.result import Row
from weft.study.statistics import Estimate, mcnemar, mean_of_runs, paired_difference

COLUMNS = ("variant", "seed", "img_size", "top1", "params", "macs", "seconds", "error", "curve")
Key = tuple[str, int]
"""Name of a variant, and seed."""


class Experiment:
    """Runs of the variants of a study. Variants with the same settings share their runs, named after the first.

    Args:
        variants: of one scale, with the place of the dataset of each.
        common: recipe of the scale; the seeds of the runs and that of their split come from it.
        folder: directory of the runs and of runs.csv.
        shared: settings for recipes that leave them to the machine, by `shared_settings`.

    Attributes:
        first_seed, split_seed: first seed of the runs, and seed of the split of all of them.
        results: of finished and failed runs.
    """

    def __init__(
        self, variants: Sequence[ResolvedVariant], common: Recipe, folder: Path, shared: Mapping[str, Any]
    ) -> None:
        self.variants = {variant.name: variant for variant in variants}
        self.folder, self.shared = folder, shared
        self.first_seed, self.split_seed = common.seed, common.split_seed
        self.results: dict[Key, Result] = {}
        first: dict[str, str] = {}
        self._owner = {variant.name: first.setdefault(variant.run_key, variant.name) for variant in variants}

    def keys(self, names: Sequence[str], seeds: int) -> list[Key]:
        """Return the runs of variants with a number of seeds each, seed by seed."""
        return [
            (name, self.first_seed + number)
            for number in range(seeds)
            for name in names
            if number < (self.variants[name].seeds or seeds)
        ]

    def job(self, key: Key, until: int | None = None) -> Job:
        """Return the job of a variant and seed, up to an epoch or to its end."""
        variant, seed = self.variants[self._owner[key[0]]], key[1]
        needed = {setting: self._needed(name, seed) for setting, name in variant.references.items()}
        settings = {
            **variant.settings,
            **open_keys(variant.recipe, self.shared),
            **{setting: f"{REFERENCE}{job.folder.name}" for setting, job in needed.items()},
            "seed": seed,
            "data.seed": self.split_seed,
        }
        sharing = [other for other in self.variants.values() if self._owner[other.name] == variant.name]
        return Job(
            self.folder / "runs" / f"{slug(variant.name)}-seed{seed}",
            variant.base,
            variant.data,
            settings,
            tuple(dict.fromkeys(other.test_size for other in sharing)),
            until,
            tuple({job.folder: job for job in needed.values()}.values()),
        )

    def _needed(self, name: str, seed: int) -> Job:
        """Return the job of a variant whose model is needed: of the same seed, or of the last one that it has."""
        seeds = self.variants[name].seeds
        return self.job((name, min(seed, self.first_seed + seeds - 1) if seeds else seed))

    def _run(self, key: Key) -> Key:
        """Return the run that a variant shares with others."""
        return self._owner[key[0]], key[1]

    def read(self) -> None:
        """Read the results of all finished runs in the directory, also of variants and seeds of earlier calls."""
        names = [folder.name for folder in (self.folder / "runs").glob("*-seed*")]
        seeds = sorted({int(found[1]) for name in names if (found := re.search(r"-seed(\d+)$", name))})
        for key in [(name, seed) for seed in seeds for name in dict.fromkeys(self._owner.values())]:
            if (result := read_result(self.job(key))) is not None:
                self.results[key] = result

    def run(self, keys: Sequence[Key], engine: Engine, until: int | None = None) -> None:
        """Run jobs that are not finished, with progress. After each, runs.csv is written and its result is printed.

        Args:
            keys: variants and seeds.
            engine: where jobs run.
            until: epoch at which they stop; None for their end.
        """
        jobs = {run: self.job(run, until) for run in dict.fromkeys(map(self._run, keys))}
        runs = {job.folder: run for run, job in jobs.items()}

        def end(job: Job, result: Result) -> None:
            self.results[runs[job.folder]] = result
            self.write_runs()
            top1 = [f"{result.top1(size):.2f} %" + (f" at {size}" if size else "") for size, _ in result.correct]
            text = f"failed: {result.error}" if result.error else ", ".join(top1)
            stage = f", epoch {until}" if until else ""
            say(f"{job.folder.name}{stage}: {text.removesuffix('.')}. {self.progress(keys, until)}")

        results = engine.run(list(jobs.values()), on_done=end)
        self.results |= {runs[folder]: result for folder, result in results.items()}
        self.write_runs()

    def progress(self, keys: Sequence[Key], until: int | None = None) -> str:
        """Return how many of the runs are finished, or have reached an epoch."""
        runs = set(map(self._run, keys))
        finished = [run for run in runs & self.results.keys() if self.results[run].job.get("until", until) == until]
        return f"{len(finished)} of {len(runs)} runs {'finished' if until is None else 'have reached it'}."

    def runs(self, name: str) -> dict[int, Result]:
        """Return the results of a variant by seed, failed ones included."""
        return {seed: run for (owner, seed), run in sorted(self.results.items()) if owner == self._owner[name]}

    def write_runs(self) -> None:
        """Write runs.csv: one line per variant and seed, in the order of the study."""
        lines = []
        for name, variant in self.variants.items():
            for seed, run in self.runs(name).items():
                curve = " ".join(f"{epoch}:{top1}" for epoch, top1 in run.curve)
                size = variant.test_size
                values = ("", "", "", "") if run.error else (run.top1(size), run.params, run.macs, f"{run.seconds:.0f}")
                lines.append((name, seed, size or "", *values, run.error or "", curve))
        write_table(self.folder / "runs.csv", COLUMNS, lines)

    def rows(self, wanted: Sequence[str], best: str | None = None) -> list[Row]:
        """Compare variants: those in `wanted`, and all others with a finished run.

        Args:
            wanted: names of variants.
            best: variant that all others are compared with; None for the baseline of each.
        """
        rows, drawn = list[Row](), set[str]()
        for name, variant in self.variants.items():
            against = variant.against if best is None else best
            row = self._row(variant, None if against is None or against == name else self.variants[against])
            if name in wanted or row.top1:
                rows.append(dataclasses.replace(row, curve=()) if self._owner[name] in drawn else row)
                drawn.add(self._owner[name])
        return rows

    def _row(self, variant: ResolvedVariant, base: ResolvedVariant | None) -> Row:
        runs = self.runs(variant.name)
        finished = {seed: run for seed, run in runs.items() if run.error is None}
        others = {} if base is None else self.runs(base.name)
        pairs = [
            (run.right(variant.test_size), others[seed].right(base.test_size))
            for seed, run in finished.items()
            if base is not None and seed in others and others[seed].error is None
        ]
        effect, paper_effect = paired_difference(pairs), None
        if base is not None and variant.paper is not None and base.paper is not None:
            paper_effect = round(variant.paper - base.paper, 2)
        top1 = tuple(run.top1(variant.test_size) for run in finished.values())
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
            peak_mib=one.peak_mib,
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
