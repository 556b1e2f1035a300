"""`run_study`: train every variant with every seed, and compare the effects with the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from weft.data import SplitPlan, open_data
from weft.data.folder import check_outside
from weft.data.open import check_exists
from weft.errors import UsageError, unknown
from weft.machine.processor import bf16_note
from weft.progress import Work, loading, obeys_quiet, say
from weft.recipes import load_recipe
from weft.recipes.checks import check_argument
from weft.recipes.fields import Within
from weft.study.directory import Directory, check_request, opened
from weft.study.engine import Engine
from weft.study.plan import ResolvedVariant, Study, read_study, slug
from weft.study.report import write_report
from weft.study.result import ExperimentResult

MAX_SEEDS = 1000
MANY = 1 << 30  # training images, where a batch size is chosen before they are counted
Data = str | Path | Mapping[str, str | Path] | None  # a dataset, or several by the names that a study calls them
READING = (
    "image",
    "label",
    "check",
    "max_bad",
    "max_pixels",
    "follow_links",
)  # settings of `data` that reading a dataset needs


@obeys_quiet
def run_study(
    study: str | Path,
    data: Data = None,
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
    load_recipe(None, (settings or {}).items())  # checks the settings
    plan = read_study(study)
    folder = Path(out) if out is not None else Path("runs") / f"study-{slug(plan.name)}-{scale}"
    check_request(_given(data), folder, force=force)
    with loading():
        from weft.machine.runtime import Runtime
        from weft.study.experiment import Experiment

    plan, variants, chosen, datasets = _prepared(plan, scale, seeds, only, settings or {}, data)
    count = plan.scales[scale].seeds
    wanted = [variant for variant in variants if variant.name in chosen]
    recipes = [variant.recipe for variant in wanted]
    where.check(recipes)
    num_classes = _num_classes(wanted)  # an unusable dataset is refused before the first run
    check_outside(folder, *datasets.values())
    command = {"study": plan.name, "scale": scale, "data": datasets, "settings": dict(settings or {})}
    with opened(folder, command, force=force) as directory:
        variants = [_grouped(variant, directory, variants) for variant in variants]
        shared = directory.decide("shared", lambda: _shared(variants, num_classes, where))
        experiment = Experiment(variants, plan.scales[scale].common, folder, shared)
        experiment.read()
        keys = experiment.keys(chosen, count)
        say(f"{plan.title}: {len(chosen)} variants, {count} seeds in {folder}. {experiment.progress(keys)}")
        emulated = {bf16_note(Runtime.of(recipe.device).device.type, recipe.precision) for recipe in recipes}
        for note in filter(None, emulated):
            say(note)
        experiment.run(keys, where)
        rows = tuple(experiment.rows(chosen))
        shown = ", ".join(Path(place).name for place in datasets.values())
        result = ExperimentResult(folder, plan, scale, shown, count, rows, experiment.seconds)
        write_report(result)
    return result


def _grouped(variant: ResolvedVariant, directory: Directory, variants: Sequence[ResolvedVariant]) -> ResolvedVariant:
    """Return a variant whose runs hold out the same images as those of the other variants on its dataset."""
    first = next(other for other in variants if other.data == variant.data)
    group = directory.group_of(variant.data, first.base, first.settings)
    return variant if not group else dataclasses.replace(variant, settings={"data.group": group, **variant.settings})


def planned_runs(
    study: Study,
    scale: str = "small",
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    data: Data = None,
) -> list[dict[str, Any]]:
    """Return the runs that `run_study` would do, by variant; `set` has its settings as text.

    Raises:
        UsageError, DataError: as `run_study`.
    """
    for place in _given(data):
        check_exists(place)
    plan, variants, chosen, _ = _prepared(study, scale, seeds, only, settings or {}, data)
    count = plan.scales[scale].seeds
    return [
        {
            "variant": variant.name,
            "paper": variant.paper,
            "model": variant.recipe.model,
            "epochs": variant.recipe.epochs,
            "runs": min(count, variant.seeds or count),
            "set": ", ".join(f"{key}={value}" for key, value in variant.settings.items()),
        }
        for variant in variants
        if variant.name in chosen
    ]


def _prepared(
    study: Study, scale: str, seeds: int | None, only: Sequence[str], settings: Mapping[str, Any], data: Data
) -> tuple[Study, list[ResolvedVariant], list[str], dict[str, str]]:
    """Return the study with the settings of the caller, its variants, the names of those to run, and the datasets."""
    if scale not in study.scales:
        raise UsageError(f"scale must be one of {', '.join(study.scales)} for {study.name}; got '{scale}'.")
    size = study.scales[scale]
    size = dataclasses.replace(size, set={**size.set, **settings}, seeds=size.seeds if seeds is None else seeds)
    check_argument("seeds", size.seeds, Annotated[int, Within(1, MAX_SEEDS)])
    study = dataclasses.replace(study, scales={**study.scales, scale: size})
    places = _places(study.name, dict.fromkeys(variant.data for variant in study.at_scale(scale)), data)
    variants = {variant.name: variant for variant in study.at_scale(scale, places)}
    for name in only:
        if name not in variants:
            raise unknown(f"variant of {study.name}", name, list(variants), f"weft study {study.name} --plan")
    chosen, waiting = set[str](), list(only or variants)
    while waiting:
        variant = variants[waiting.pop()]
        chosen.add(variant.name)
        needed = (variant.against or variant.name, *variant.references.values())
        waiting += [name for name in needed if name not in chosen]
    for variant in variants.values():
        if variant.name in chosen:
            variant.check()
    return study, list(variants.values()), [name for name in variants if name in chosen], places


def _given(data: Data) -> list[str]:
    """Return the places of the datasets that a caller names."""
    return [] if data is None else [str(place) for place in (data.values() if isinstance(data, Mapping) else [data])]


def _places(study: str, names: Collection[str], data: Data) -> dict[str, str]:
    """Return the place of every dataset of a study, by the name that the study calls it."""
    if data is None or isinstance(data, Mapping):
        for name in data or ():
            if name not in names:
                raise unknown(f"dataset of {study}", name, list(names), ", ".join(names))
        return {name: str((data or {}).get(name, name)) for name in names}
    if len(names) > 1:
        examples = " ".join(f"{name}=FOLDER" for name in names)
        raise UsageError(f"Study {study} has several datasets, so DATA must name them: {examples}; got '{data}'.")
    return dict.fromkeys(names, str(data))


def _num_classes(variants: Sequence[ResolvedVariant]) -> int:
    """Open the datasets of variants, each way of reading once; return the largest number of classes."""
    ways: list[tuple[str, dict[str, Any]]] = []
    for variant in variants:
        way = variant.data, {key: getattr(variant.recipe.data, key) for key in READING}
        ways += [way] if way not in ways else []
    with Work("reading") as work:
        opened = [open_data(place, SplitPlan(limit=64), progress=work.update, **own) for place, own in ways]
    return max(len(splits.classes) for splits in opened)


def _shared(variants: Sequence[ResolvedVariant], num_classes: int, engine: Engine) -> dict[str, Any]:
    """Choose the settings that recipes leave to the machine; models of other variants do not exist yet."""
    from weft.study.protocol import shared_settings

    recipes = [
        load_recipe(variant.base, [item for item in variant.settings.items() if item[0] not in variant.references])
        for variant in variants
    ]
    return engine.call(shared_settings, recipes, num_classes, MANY)
