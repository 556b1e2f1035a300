"""`run_study`: train every variant with every seed, and compare the effects with the paper."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.capabilities import bf16_note
from weft.data import SplitPlan, open_data
from weft.data.folder import check_outside
from weft.errors import UsageError, unknown
from weft.files import write_whole
from weft.processor import busy_note
from weft.progress import obeys_quiet, reading, say
from weft.recipes import load_recipe
from weft.runtime import Runtime
from weft.study.directory import opened
from weft.study.engine import Engine
from weft.study.experiment import Experiment
from weft.study.jobs import Job, Result, is_reference
from weft.study.plan import Study, StudyVariant, check_references, check_variant, load_study, recipe_of, slug
from weft.study.protocol import shared_settings
from weft.study.result import ExperimentResult
from weft.train.network import check_sync_bn

MAX_SEEDS = 1000
MANY = 1 << 30  # training images, where a batch size is chosen before they are counted


@obeys_quiet
def run_study(
    study: str | Path,
    data: str | Path | Mapping[str, str | Path] | None = None,
    *,
    scale: str = "small",
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    jobs: int = 1,
    threads: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> ExperimentResult:
    """Run a study, or the unfinished part of it, and write its report.

    Args:
        study: name of a study in weft, or a YAML file.
        data: dataset; None for that of the study. For a study of several datasets: place by name, such as
            `{"cifar10": "images/cifar10"}`.
        scale: `small` or `paper`.
        seeds: runs per variant; None for the number in the study.
        only: names of variants to run; their baselines and those whose models they need are added. Empty for all. The
            report has these and all variants with finished runs in `out`.
        settings: recipe settings for all variants, such as `{"epochs": 2}`; settings of a variant override them.
        out: directory; None for runs/study-NAME-SCALE. An interrupted study resumes there. Finished runs are kept.
        engine: `local`, or `ray` (a cluster by RAY_ADDRESS, or this machine), with a GPU for each run if the cluster
            has GPUs.
        jobs: number of concurrent runs.
        threads: CPU threads of each run; None to share the cores among concurrent runs. A run that is resumed keeps
            the number that it began with.
        force: replace another study in `out`.
        quiet: print no progress and no notes.

    Raises:
        UsageError: an unknown study, variant, setting, dataset or scale, or a directory that is taken.
        DataError: a dataset cannot be used.
    """
    where = Engine(engine, jobs, threads)
    plan, chosen, count = _prepared(load_study(study), scale, seeds, only, settings or {})
    recipes = [recipe_of(plan, variant, scale) for variant in chosen]
    if engine == "local":  # the machines of a cluster may have GPUs that this one does not have
        for recipe in recipes:
            check_sync_bn(recipe, Runtime.of(recipe.device))
    sources = _sources(plan, scale, data)
    num_classes = _num_classes(plan, scale, sources, chosen)  # an unusable dataset is refused before the first run
    folder = Path(out) if out is not None else Path("runs") / f"study-{slug(plan.name)}-{scale}"
    check_outside(folder, *sources.values())
    command = {"study": plan.name, "scale": scale, "data": sources, "settings": dict(settings or {})}
    with opened(folder, command, force=force) as directory:
        shared = directory.decide("shared", lambda: _shared(plan, scale, num_classes, where))
        experiment = Experiment(plan, scale, folder, sources, shared)
        experiment.read()
        keys = experiment.keys(chosen, count)
        say(f"{plan.title}: {len(chosen)} variants, {count} seeds in {folder}. {experiment.progress(keys)}")
        emulated = {bf16_note(Runtime.of(recipe.device).device.type, recipe.precision) for recipe in recipes}
        for note in filter(None, (busy_note(jobs * where.cores), *emulated)):
            say(note)

        def on_done(job: Job, result: Result) -> None:
            top1 = [f"{result.top1(size):.2f} %" + (f" at {size}" if size else "") for size, _ in result.correct]
            text = f"failed: {result.error}" if result.error else ", ".join(top1)
            say(f"{job.folder.name}: {text.removesuffix('.')}. {experiment.progress(keys)}")

        experiment.run(keys, where, on_done=on_done)
        rows = tuple(experiment.rows([variant.name for variant in chosen]))
        shown = ", ".join(Path(place).name for place in sources.values())
        result = ExperimentResult(folder, plan, scale, shown, count, rows, experiment.seconds)
        write(result)
    return result


def write(result: ExperimentResult) -> None:
    """Write results.json and the report."""
    from weft.study.report import write_report  # matplotlib

    content = {key: value for key, value in result.as_dict().items() if key != "out"}  # a path of this machine
    write_whole(result.out / "results.json", (json.dumps(content, indent=2) + "\n").encode())
    write_report(result)


class PlannedRuns(NamedTuple):
    """Planned runs of one variant; `set` has its settings as text."""

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
    data: str | Path | Mapping[str, str | Path] | None = None,
) -> list[PlannedRuns]:
    """Return the runs that `run_study` would do.

    Raises:
        UsageError: as `run_study`.
    """
    plan, chosen, count = _prepared(study, scale, seeds, only, settings or {})
    _sources(plan, scale, data)  # refuses unknown names
    rows = []
    for variant in chosen:
        recipe, runs = recipe_of(plan, variant, scale), min(count, variant.seeds or count)
        settings_text = ", ".join(f"{key}={value}" for key, value in plan.settings(variant, scale).items())
        rows.append(PlannedRuns(variant.name, variant.paper, recipe.model, recipe.epochs, runs, settings_text))
    return rows


def _prepared(
    study: Study, scale: str, seeds: int | None, only: Sequence[str], settings: Mapping[str, Any]
) -> tuple[Study, list[StudyVariant], int]:
    """Return the study with the settings of the caller, the selected variants and the number of seeds, all checked."""
    if scale not in study.scales:
        raise UsageError(f"scale must be one of {', '.join(study.scales)} for {study.name}; got '{scale}'.")
    study, size = study.at_scale(scale), study.scales[scale]
    count = seeds if seeds is not None else size.seeds
    if not 1 <= count <= MAX_SEEDS:
        raise UsageError(f"seeds must be from 1 to {MAX_SEEDS}; got {count}.")
    size = dataclasses.replace(size, set={**size.set, **settings})
    plan = dataclasses.replace(study, scales={**study.scales, scale: size})
    check_references(plan, scale)
    chosen = _chosen(plan, scale, only)
    for variant in chosen:
        check_variant(plan, variant, scale)
    return plan, chosen, count


def _chosen(plan: Study, scale: str, only: Sequence[str]) -> list[StudyVariant]:
    """Select variants, with their baselines and those whose models they need, in the order of the study."""
    names = [variant.name for variant in plan.variants]
    for name in only:
        if name not in names:
            raise unknown(f"variant of {plan.name}", name, names, f"weft study {plan.name} --plan")
    wanted, waiting = set[str](), list(only or names)
    while waiting:
        variant = plan.variants[names.index(waiting.pop())]
        wanted.add(variant.name)
        needed = (plan.baseline(variant), *plan.references(variant, scale).values())
        waiting += [other.name for other in needed if other is not None and other.name not in wanted]
    return [variant for variant in plan.variants if variant.name in wanted]


def _num_classes(plan: Study, scale: str, sources: Mapping[str, str], variants: Sequence[StudyVariant]) -> int:
    """Open the datasets of variants; return the largest number of classes."""
    settings = {plan.data(variant, scale): recipe_of(plan, variant, scale).data for variant in variants}
    with reading() as progress:
        return max(
            len(
                open_data(
                    sources[name],
                    SplitPlan(limit=64),
                    max_bad=data.max_bad,
                    image=data.image,
                    label=data.label,
                    max_pixels=data.max_pixels,
                    follow_links=data.follow_links,
                    progress=progress,
                ).classes
            )
            for name, data in sorted(settings.items())
        )


def _shared(plan: Study, scale: str, num_classes: int, engine: Engine) -> dict[str, Any]:
    """Choose the settings that recipes leave to the machine; models of other variants do not exist yet."""
    recipes = [
        load_recipe(
            plan.recipe(variant, scale),
            [item for item in plan.settings(variant, scale).items() if not is_reference(item[1])],
        )
        for variant in plan.variants
    ]
    return engine.call(shared_settings, recipes, num_classes, MANY)


def _sources(plan: Study, scale: str, data: str | Path | Mapping[str, str | Path] | None) -> dict[str, str]:
    """Return the place of every dataset of a study, by the name that the study calls it."""
    names = list(dict.fromkeys(plan.data(variant, scale) for variant in plan.variants))
    if data is None:
        return {name: name for name in names}
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                raise unknown(f"dataset of {plan.name}", name, names, ", ".join(names))
        return {name: str(data.get(name, name)) for name in names}
    if len(names) > 1:
        examples = " ".join(f"{name}=FOLDER" for name in names)
        raise UsageError(f"Study {plan.name} has several datasets, so DATA must name them: {examples}; got '{data}'.")
    return {names[0]: str(data)}
