"""`run_study`: train every variant with every seed, and compare with the paper."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.data import open_data
from weft.durable import write_whole
from weft.errors import UsageError, unknown
from weft.reading import read_json
from weft.study.jobs import Job, Measured, Result, carry_out, check_engine
from weft.study.plan import Study, Variant, check_variant, load_study, recipe_of, size_to_test, slug
from weft.study.result import Row, StudyResult
from weft.study.statistics import Estimate, difference, mean_of_runs
from weft.text import csv_cell
from weft.train.progress import say
from weft.train.rundir import make_dir, refuse_taken

CONTENTS = ("study.json", "runs", "runs.csv", "results.json", "report.md", "report.html")
PICTURES = ("effects.png", "curves.png", "lines.png")


def run_study(
    study: str | Path,
    data: str | Path | None = None,
    *,
    scale: str = "small",
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    jobs: int = 1,
    force: bool = False,
    quiet: bool = False,
) -> StudyResult:
    """Runs a study, or what is missing of it, and writes its report.

    Args:
        study: name of one that comes with weft, or a YAML file.
        data: what to learn from; None for what the study names.
        scale: `small` or `paper`.
        seeds: runs of each variant; None for what the study says.
        only: names of variants; what they are compared with comes along. None for all.
        settings: dotted keys of the recipe for all variants, such as `{"epochs": 2}`; what a variant sets wins.
        out: the directory; None for runs/study-NAME-SCALE. One of the same study goes on: what is done is not repeated.
        engine: `local`, or `ray` (a cluster by RAY_ADDRESS, or this machine).
        jobs: runs side by side.
        force: take the place of another study that is there.
        quiet: no progress and no notes.

    Raises:
        UsageError: a study, variant, setting or scale that is not there, or a directory that is taken.
        DataError: data that cannot be used.
    """
    check_engine(engine, jobs)
    plan, chosen, count = _prepared(load_study(study), scale, seeds, only, settings or {})
    size, source = plan.scales[scale], str(data or plan.scales[scale].data)
    open_data(source, limit=64)  # what nobody can learn from is refused before the first run, not in each
    folder = Path(out) if out is not None else Path("runs") / f"study-{plan.name}-{scale}"
    _begin(folder, plan, scale, source, settings or {}, force=force)

    planned = _planned(plan, chosen, scale, source, count, folder)
    if not quiet:
        runs = len({job.folder for job in planned.values()})
        say(f"{plan.title}: {len(chosen)} variants, {count} seeds, {runs} runs in {folder}.")

    def on_done(job: Job, result: Result) -> None:
        if not quiet:
            said = f"failed: {result.error}" if result.measured is None else _top1(result)
            say(f"{job.folder.name}: {said}")

    if size.teacher:
        taught = carry_out([_teacher(plan, scale, source, folder)], engine=engine, on_done=on_done)
        failures = [result.error for result in taught.values() if result.error]
        if failures:
            raise UsageError(f"The teacher of study {plan.name} could not be trained: {failures[0]}.")
    tasks = {job.folder: job for job in planned.values()}
    results = carry_out(list(tasks.values()), engine=engine, at_once=jobs, on_done=on_done)
    found = _summed_up(plan, chosen, scale, source, count, folder, planned, results)
    _write(found, planned, results)
    return found


class PlannedRuns(NamedTuple):
    """What would be run of one variant. `set` is what it sets beside the base recipe, as text."""

    variant: str
    paper: float | None
    model: str | None
    epochs: int | None
    runs: int
    set: str


def planned_runs(
    study: Study,
    scale: str = "small",
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> list[PlannedRuns]:
    """What `run_study` would run.

    Raises:
        UsageError: as `run_study`.
    """
    plan, chosen, count = _prepared(study, scale, seeds, only, settings or {})
    rows = []
    for variant in chosen:
        recipe = recipe_of(plan, variant, scale)
        words = ", ".join(f"{key}={value}" for key, value in plan.settings(variant, scale).items())
        rows.append(PlannedRuns(variant.name, variant.paper, recipe.model, recipe.epochs, count, words))
    return rows


def _prepared(
    study: Study, scale: str, seeds: int | None, only: Sequence[str], settings: Mapping[str, Any]
) -> tuple[Study, list[Variant], int]:
    """The study with the caller's settings, its chosen variants, and how many seeds; all of it checked."""
    if scale not in study.scales:
        raise UsageError(f"scale must be one of {', '.join(study.scales)} for {study.name}; got '{scale}'.")
    study, size = study.at_scale(scale), study.scales[scale]
    count = seeds if seeds is not None else size.seeds
    if count < 1:
        raise UsageError(f"seeds must be at least 1; got {count}.")
    size = dataclasses.replace(size, set={**size.set, **settings})
    plan = dataclasses.replace(study, scales={**study.scales, scale: size})
    chosen = _chosen(plan, only)
    for variant in chosen:
        check_variant(plan, variant, scale)
    return plan, chosen, count


def _chosen(plan: Study, only: Sequence[str]) -> list[Variant]:
    """In the study's order, with what they are compared with."""
    names = [variant.name for variant in plan.variants]
    for name in only:
        if name not in names:
            raise unknown(f"variant of {plan.name}", name, names, f"weft study {plan.name} --plan")
    wanted = set(only or names)
    for variant in plan.variants:
        base = plan.baseline(variant)
        if variant.name in wanted and base is not None:
            wanted.add(base.name)
    return [variant for variant in plan.variants if variant.name in wanted]


def _begin(folder: Path, plan: Study, scale: str, source: str, settings: Mapping[str, Any], *, force: bool) -> None:
    """A directory for this study, new or its own."""
    facts = {"study": plan.name, "scale": scale, "data": source, "settings": dict(settings)}
    known = folder / "study.json"
    if known.exists() and read_json(known, dict[str, Any], UsageError) == facts:
        return
    refuse_taken(folder, (*CONTENTS, *PICTURES), force=force)
    make_dir(folder, (*CONTENTS, *PICTURES), force=force)
    write_whole(known, json.dumps(facts, indent=2).encode())


Planned = dict[tuple[str, int], Job]  # by variant and seed; variants that differ in the test size alone share a job


def _planned(plan: Study, chosen: Sequence[Variant], scale: str, source: str, seeds: int, folder: Path) -> Planned:
    groups: dict[str, list[Variant]] = {}  # of the whole study: a job is the same, whatever is chosen
    for variant in plan.variants:
        key = json.dumps(_settings(plan, variant, scale, folder), sort_keys=True)
        groups.setdefault(key, []).append(variant)
    planned: Planned = {}
    for seed in range(seeds):  # all variants with one seed before the next: a study that is stopped can be read
        for key, variants in groups.items():
            sizes = [size_to_test(recipe_of(plan, variant, scale), variant) for variant in variants]
            job = Job(
                folder / "runs" / f"{slug(variants[0].name)}-seed{seed}",
                plan.scales[scale].recipe,
                source,
                {**json.loads(key), "seed": seed},
                tuple(dict.fromkeys(sizes)),
            )
            planned.update({(variant.name, seed): job for variant in variants if variant in chosen})
    return planned


def _settings(plan: Study, variant: Variant, scale: str, folder: Path) -> dict[str, Any]:
    settings = plan.settings(variant, scale)
    if plan.scales[scale].teacher:
        settings.setdefault("distill.teacher", str((folder / "runs" / "teacher" / "run" / "best").resolve()))
    return settings


def _teacher(plan: Study, scale: str, source: str, folder: Path) -> Job:
    size = plan.scales[scale]
    return Job(folder / "runs" / "teacher", size.recipe, source, {**size.set, **size.teacher, "seed": 0})


def _summed_up(
    plan: Study,
    chosen: Sequence[Variant],
    scale: str,
    source: str,
    seeds: int,
    folder: Path,
    planned: Planned,
    results: Mapping[Path, Result],
) -> StudyResult:
    papers = {variant.name: variant.paper for variant in plan.variants}
    sizes = {variant.name: size_to_test(recipe_of(plan, variant, scale), variant) for variant in chosen}
    rows, curves, drawn = [], {}, set()
    for variant in chosen:
        mine = {seed: results[planned[variant.name, seed].folder] for seed in range(seeds)}
        good = {seed: result for seed, result in mine.items() if result.measured is not None}
        top1 = {seed: _measured(result, sizes[variant.name]).top1 for seed, result in good.items()}
        base = plan.baseline(variant)
        effect = paper_effect = None
        if base is not None:
            theirs = {seed: results[planned[base.name, seed].folder] for seed in range(seeds)}
            pairs = [
                (_measured(result, sizes[variant.name]), _measured(theirs[seed], sizes[base.name]))
                for seed, result in good.items()
                if theirs[seed].measured is not None
            ]
            if len(pairs) > 1:
                effect = mean_of_runs([ours.top1 - other.top1 for ours, other in pairs])
            elif pairs:
                effect = difference(pairs[0][0].right, pairs[0][1].right)
            if variant.paper is not None and papers[base.name] is not None:
                paper_effect = round(variant.paper - float(papers[base.name] or 0), 2)
        rows.append(
            Row(
                variant.name,
                None if base is None else base.name,
                tuple(top1.values()),
                mean_of_runs(list(top1.values())) if top1 else None,
                effect,
                variant.paper,
                paper_effect,
                verdict(effect, paper_effect) if top1 else "failed",
                next((result.params for result in good.values()), 0),
                next((result.macs for result in good.values()), 0),
                sum(result.seconds for result in good.values()),
                tuple((seed, result.error) for seed, result in mine.items() if result.error is not None),
            )
        )
        runs = tuple(planned[variant.name, seed].folder for seed in range(seeds))
        if runs not in drawn:
            curves[variant.name] = _mean_curve([result.curve for result in good.values()])
        drawn.add(runs)
    seconds = sum(results[folder].seconds for folder in {job.folder for job in planned.values()})
    return StudyResult(folder, plan, scale, source, seeds, tuple(rows), curves, seconds)


def verdict(effect: Estimate | None, paper_effect: float | None) -> str:
    """What the interval of an effect allows to say; nothing is called equal."""
    if effect is None:
        return ""
    if effect.low <= 0 <= effect.high:
        return "no difference shown"
    sign = "higher" if effect.value > 0 else "lower"
    if not paper_effect:
        return sign
    return f"{sign}, {'as in' if (paper_effect > 0) == (effect.value > 0) else 'against'} the paper"


def _measured(result: Result, size: int | None) -> Measured:
    assert result.measured is not None
    return result.measured[size]


def _mean_curve(curves: Sequence[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
    """Of the epochs that all have."""
    epochs = set.intersection(*({epoch for epoch, _ in curve} for curve in curves)) if curves else set()
    values = [dict(curve) for curve in curves]
    return tuple((epoch, float(np.mean([value[epoch] for value in values]))) for epoch in sorted(epochs))


def _top1(result: Result) -> str:
    assert result.measured is not None
    return ", ".join(
        f"{measured.top1:.2f} %" + ("" if size is None else f" at {size}") for size, measured in result.measured.items()
    )


def _write(found: StudyResult, planned: Planned, results: Mapping[Path, Result]) -> None:
    from weft.study.report import write_study_report  # imports matplotlib, which a study that fails does not need

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("variant", "seed", "img_size", "top1", "params", "macs", "seconds", "error"))
    for variant in found.study.variants:
        for seed in range(found.seeds):
            if (variant.name, seed) not in planned:
                continue
            result = results[planned[variant.name, seed].folder]
            size = size_to_test(recipe_of(found.study, variant, found.scale), variant)
            top1 = "" if result.measured is None else f"{_measured(result, size).top1:.2f}"
            facts = (result.params, result.macs, f"{result.seconds:.0f}") if top1 else ("", "", "")
            cells = (variant.name, seed, size or "", top1, *facts, result.error or "")
            writer.writerow([csv_cell(cell) for cell in cells])
    write_whole(found.out / "runs.csv", buffer.getvalue().encode())
    write_whole(found.out / "results.json", (json.dumps(found.as_dict(), indent=2) + "\n").encode())
    write_study_report(found)
