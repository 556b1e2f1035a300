"""`run_study`: train every variant with every seed, and compare the effects with the paper."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.capabilities import bf16_note
from weft.data import SplitPlan, open_data
from weft.data.folder import check_outside
from weft.errors import UsageError, unknown
from weft.files import write_whole
from weft.processor import busy_note
from weft.progress import reading, say
from weft.recipes import Recipe, load_recipe
from weft.runtime import Runtime
from weft.study.plan import Study, StudyVariant, check_teacher, check_variant, load_study, recipe_of, size_to_test, slug
from weft.study.protocol import open_keys, shared_settings
from weft.study.result import Row, StudyResult
from weft.study.run_table import FinishedRun, Key, fingerprint, read_runs, write_runs
from weft.study.runner import (
    Job,
    Result,
    call,
    check_engine,
    kept_in,
    open_directory,
    read_result,
    run_jobs,
    threads_of,
)
from weft.study.statistics import MAX_SEEDS, Estimate, mean_of_runs, paired_difference, seeds_to_show
from weft.study.watch import watching
from weft.train.network import check_sync_bn

CONTENTS = ("study.json", "runs", "runs.csv", "results.json", "report.md", "report.html")
FIGURES = ("effects.png", "curves.png", "lines.png")
DIGITS = 6  # of accuracies in percent, so that a run is the same from its folder and from the table
MANY = 1 << 30  # training images, where a batch size is chosen before they are counted
TEACHER = "teacher"  # folder of the run that is the teacher of the others


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
) -> StudyResult:
    """Run a study, or the unfinished part of it, and write its report.

    Args:
        study: name of a study in weft, or a YAML file.
        data: dataset; None for that of the study. For a study of several datasets: place by name, such as
            `{"cifar10": "images/cifar10"}`.
        scale: `small` or `paper`.
        seeds: runs per variant; None for the number in the study.
        only: names of variants to run; their baselines are added. Empty for all. The report has these and all variants
            with finished runs in `out`.
        settings: recipe settings for all variants, such as `{"epochs": 2}`; settings of a variant override them.
        out: directory; None for runs/study-NAME-SCALE. An interrupted study resumes there. Finished runs are kept;
            study.json and runs.csv suffice for that.
        engine: `local`, or `ray` (a cluster by RAY_ADDRESS, or this machine).
        jobs: number of concurrent runs.
        threads: CPU threads of each run; None to share the cores among concurrent runs. A run that is resumed keeps
            the number that it began with.
        force: replace another study in `out`.
        quiet: print no progress and no notes.

    Raises:
        UsageError: an unknown study, variant, setting, dataset or scale, or a directory that is taken.
        DataError: a dataset cannot be used.
    """
    check_engine(engine, jobs)
    plan, chosen, count = _prepared(load_study(study), scale, seeds, only, settings or {})
    if engine == "local":  # the machines of a cluster may have GPUs that this one does not have
        for recipe in [recipe_of(plan, variant, scale) for variant in chosen]:
            check_sync_bn(recipe, Runtime.of(recipe.device))
    sources = _sources(plan, scale, data)
    # an unusable dataset is refused once, before the first run
    classes = _classes(plan, scale, sources, chosen, quiet=quiet)
    folder = Path(out) if out is not None else Path("runs") / f"study-{slug(plan.name)}-{scale}"
    check_outside(folder, *sources.values())
    shown = ", ".join(Path(sources[name]).name for name in sources)
    record = {"study": plan.name, "scale": scale, "data": shown, "settings": dict(settings or {})}
    known = open_directory(folder, "study.json", record, (*CONTENTS, *FIGURES), force=force, same=_same_study)
    finished = {run.variant for run in read_runs(folder / "runs.csv")}
    names = [variant.name for variant in plan.variants if variant in chosen or variant.name in finished]
    classes |= _classes(plan, scale, sources, _chosen(plan, names), known=classes, quiet=quiet)

    if not known.get("shared"):
        recipes = [recipe_of(plan, variant, scale) for variant in plan.variants]
        arguments = (recipes, max(map(len, classes.values())), MANY, threads or threads_of(jobs))
        known["shared"] = call(shared_settings, *arguments, engine=engine, threads=threads or threads_of(jobs))
        if known["shared"]:
            write_whole(folder / "study.json", json.dumps(known, indent=2).encode())
    state = _State(plan, scale, folder, sources, classes, known["shared"])
    first = state.base.seed
    wanted = [(variant.name, seed) for seed in range(first, first + count) for variant in chosen]
    state.take_up(wanted)
    if not quiet:
        say(f"{plan.title}: {len(chosen)} variants, {count} seeds in {folder}. {state.progress(wanted)}")
        recipes = [recipe_of(plan, variant, scale) for variant in chosen]
        emulated = {bf16_note(Runtime.of(recipe.device).device.type, recipe.precision) for recipe in recipes}
        for note in (busy_note(jobs * (threads or threads_of(jobs))), *emulated):
            if note is not None:
                say(note)

    def on_done(job: Job, result: Result) -> None:
        state.add(job, result, wanted)
        if not quiet:
            text = f"failed: {result.error}" if result.measured is None else _top1(result)
            say(f"{job.folder.name}: {text.removesuffix('.')}. {state.progress(wanted)}")

    for wave in state.waves(wanted):
        ready, stranded = state.with_start(wave)
        for job, reason in stranded:
            on_done(job, Result(error=reason))
        with watching(ready, quiet=quiet) as on_wait, kept_in(folder):
            results = run_jobs(ready, engine=engine, at_once=jobs, threads=threads, on_done=on_done, on_wait=on_wait)
        if teacher := results.get(folder / "runs" / TEACHER):
            if teacher.error:
                reason = teacher.error.removesuffix(".")
                raise UsageError(f"The teacher of study {plan.name} could not be trained: {reason}.")
            known["teacher"] = round(teacher.top1, DIGITS)
            write_whole(folder / "study.json", json.dumps(known, indent=2).encode())
    result = _summary(plan, [variant.name for variant in chosen], scale, shown, count, folder, state.runs)
    result = dataclasses.replace(result, teacher=known.get("teacher"))
    _write(result)
    return result


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
        recipe = recipe_of(plan, variant, scale)
        settings_text = ", ".join(f"{key}={value}" for key, value in plan.settings(variant, scale).items())
        rows.append(PlannedRuns(variant.name, variant.paper, recipe.model, recipe.epochs, count, settings_text))
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
    chosen = _chosen(plan, only)
    check_teacher(plan, scale)
    for variant in chosen:
        check_variant(plan, variant, scale)
    return plan, chosen, count


def _chosen(plan: Study, only: Sequence[str]) -> list[StudyVariant]:
    """Select variants, with their baselines and those that they start from, in the order of the study."""
    names = [variant.name for variant in plan.variants]
    for name in only:
        if name not in names:
            raise unknown(f"variant of {plan.name}", name, names, f"weft study {plan.name} --plan")
    wanted, waiting = set[str](), list(only or names)
    while waiting:
        variant = plan.variants[names.index(waiting.pop())]
        wanted.add(variant.name)
        needed = (plan.baseline(variant), plan.start(variant))
        waiting += [other.name for other in needed if other is not None and other.name not in wanted]
    return [variant for variant in plan.variants if variant.name in wanted]


def _classes(
    plan: Study,
    scale: str,
    sources: Mapping[str, str],
    variants: Sequence[StudyVariant],
    *,
    known: Collection[str] = (),
    quiet: bool,
) -> dict[str, Sequence[str]]:
    """Return the classes of the datasets of variants, by the name of the dataset; those in `known` are not read."""
    settings = {plan.data(variant, scale): recipe_of(plan, variant, scale).data for variant in variants}
    with reading(quiet=quiet) as progress:
        return {
            name: open_data(
                sources[name],
                SplitPlan(limit=64),
                max_bad=data.max_bad,
                image=data.image,
                label=data.label,
                max_pixels=data.max_pixels,
                follow_links=data.follow_links,
                progress=progress,
            ).classes
            for name, data in sorted(settings.items())
            if name not in known
        }


class _State:
    """Jobs of a study and the runs that are finished."""

    def __init__(
        self,
        plan: Study,
        scale: str,
        folder: Path,
        sources: Mapping[str, str],
        classes: Mapping[str, Sequence[str]],
        shared: Mapping[str, Any],
    ) -> None:
        self.plan, self.scale, self.folder, self.sources, self.classes = plan, scale, folder, sources, classes
        self.shared, size = shared, plan.scales[scale]
        self.base = load_recipe(size.recipe, list(size.set.items()))  # has the first seed, and that of the split
        self.variants = {variant.name: variant for variant in plan.variants}
        self.table = folder / "runs.csv"
        self.runs: dict[Key, FinishedRun] = {}  # finished and failed
        self.others: list[FinishedRun] = []  # of the file, but of other settings or of no variant: kept, not used
        self.jobs: dict[Key, Job] = {}

    def take_up(self, wanted: Sequence[Key]) -> None:
        """Find the runs that are finished, in the folders of the runs or in runs.csv."""
        known = {(run.variant, run.seed, run.settings): run for run in read_runs(self.table)}
        for seed in sorted({seed for _, seed in wanted} | {run.seed for run in known.values()}):
            for variant in self.plan.variants:
                if not self._datasets(variant) <= set(self.classes):
                    continue  # data of no wanted and no finished variant
                key = (variant.name, seed)
                line = known.pop((*key, self.fingerprint(variant, seed)), None)
                if line is not None and line.top1 is not None:
                    self.runs[key] = line
                if (result := read_result(self.job(key))) is not None:
                    self.runs[key] = self._run(key, result)
                    known.pop((*key, ""), None)  # the same run, of a version that wrote no fingerprint
        self.others = list(known.values())
        self._write()

    def add(self, job: Job, result: Result, wanted: Sequence[Key]) -> None:
        """Add the result of a job to the table, for all variants that share it."""
        for key in wanted:
            if self.job(key).folder == job.folder:
                self.runs[key] = self._run(key, result)
        self._write()

    def progress(self, wanted: Sequence[Key]) -> str:
        """Return how many of the wanted runs are finished."""
        folders = {self.job(key).folder for key in wanted}
        done = {self.job(key).folder for key in wanted if key in self.runs}
        return f"{len(done)} of {len(folders)} runs finished."

    def waves(self, wanted: Sequence[Key]) -> list[list[Job]]:
        """Return the jobs to run, in groups; a group needs models of earlier groups only."""
        waves: dict[int, dict[Path, Job]] = {}

        def plan(key: Key) -> int:
            """Plan a run after the one that it starts from, unless the model of that one is there; return its group."""
            variant = self.variants[key[0]]
            start, group = self.plan.start(variant), 1 if self.plan.scales[self.scale].teacher else 0
            if start is not None and not self.model((start.name, key[1])).is_dir():
                group = plan((start.name, key[1])) + 1
            job = self.job(key)
            waves.setdefault(group, {})[job.folder] = job
            return group

        for key in wanted:
            if key not in self.runs or self.runs[key].top1 is None:
                plan(key)
        if waves and (teacher := self._teacher()) is not None:
            waves[0] = {teacher.folder: teacher}
        return [list(waves[group].values()) for group in sorted(waves)]

    def with_start(self, wave: Sequence[Job]) -> tuple[list[Job], list[tuple[Job, str]]]:
        """Divide jobs into those whose teacher and initial weights exist, and the others, with the reason."""
        ready, stranded = [], []
        for job in wave:
            models = (job.settings.get(key) for key in ("start_from", "distill.teacher"))
            own = (Path(model) for model in models if isinstance(model, str) and Path(model).is_absolute())
            missing = [model for model in own if not model.is_dir()]
            if missing:
                stranded.append((job, f"it needs the model of {missing[0].parents[1].name}, whose run failed"))
            else:
                ready.append(job)
        return ready, stranded

    def model(self, key: Key) -> Path:
        """Return the directory of the best model of a run."""
        return (self.job(key).folder / "run" / "best").resolve()

    def job(self, key: Key) -> Job:
        """Return the job of a variant and seed. Variants with the same settings share a job, named by the first."""
        if key not in self.jobs:
            for variants in self._groups():
                first, seed = variants[0], key[1]
                sizes = [size_to_test(recipe_of(self.plan, v, self.scale), v) for v in variants]
                job = Job(
                    self.folder / "runs" / f"{slug(first.name)}-seed{seed}",
                    self.plan.recipe(first, self.scale),
                    self.sources[self.plan.data(first, self.scale)],
                    {**self._settings(first, seed), "seed": seed, "data.seed": self.base.split_seed},
                    tuple(dict.fromkeys(sizes)),
                )
                self.jobs.update({(variant.name, seed): job for variant in variants})
        return self.jobs[key]

    def fingerprint(self, variant: StudyVariant, seed: int) -> str:
        """Return a hash of all that determines a run, without names of folders on this machine."""
        start, data = self.plan.start(variant), self.plan.data(variant, self.scale)
        return fingerprint(
            {
                "recipe": self.plan.recipe(variant, self.scale),
                "settings": _values(recipe_of(self.plan, variant, self.scale), self.plan.settings(variant, self.scale)),
                "shared": open_keys(recipe_of(self.plan, variant, self.scale), self.shared),
                "teacher": self.plan.scales[self.scale].teacher,
                "start": None if start is None else self.fingerprint(start, seed),
                "data": [Path(self.sources[data]).name, list(self.classes[data])],
                "seed": [seed, self.base.split_seed],
            }
        )

    def _groups(self) -> list[list[StudyVariant]]:
        """Return the variants in groups that share their runs; of all, so that no job depends on the selection."""
        groups: dict[str, list[StudyVariant]] = {}
        for variant in self.plan.variants:
            groups.setdefault(self.plan.run_key(variant, self.scale), []).append(variant)
        return list(groups.values())

    def _settings(self, variant: StudyVariant, seed: int) -> dict[str, Any]:
        settings = self.plan.settings(variant, self.scale)
        settings |= open_keys(recipe_of(self.plan, variant, self.scale), self.shared)
        if self.plan.scales[self.scale].teacher:
            settings.setdefault("distill.teacher", str((self.folder / "runs" / TEACHER / "run" / "best").resolve()))
        if (start := self.plan.start(variant)) is not None:
            settings.setdefault("start_from", str(self.model((start.name, seed))))
        return settings

    def _teacher(self) -> Job | None:
        size = self.plan.scales[self.scale]
        if not size.teacher:
            return None
        settings = {**size.set, **size.teacher, "seed": self.base.seed, "data.seed": self.base.split_seed}
        settings |= open_keys(load_recipe(size.recipe, list(settings.items())), self.shared)
        return Job(self.folder / "runs" / TEACHER, size.recipe, self.sources[size.data], settings)

    def _run(self, key: Key, result: Result) -> FinishedRun:
        """Return the line of a variant, from the result of its job."""
        name, seed = key
        variant = self.variants[name]
        size = size_to_test(recipe_of(self.plan, variant, self.scale), variant)
        settings = self.fingerprint(variant, seed)
        if result.measured is None:
            return FinishedRun(name, seed, size, None, error=result.error, settings=settings)
        measured = result.measured[size]
        top1, curve = round(measured.top1, DIGITS), tuple((epoch, round(top1, DIGITS)) for epoch, top1 in result.curve)
        numbers = (result.params, result.macs, result.seconds, None, curve)
        return FinishedRun(name, seed, size, top1, *numbers, settings, measured.right)

    def _datasets(self, variant: StudyVariant) -> set[str]:
        """Return the names of the datasets that a variant and the one that it starts from are trained on."""
        start = self.plan.start(variant)
        return {self.plan.data(variant, self.scale)} | (set() if start is None else self._datasets(start))

    def _write(self) -> None:
        """Write runs.csv, in the order of the study; lines of other settings follow."""
        names = list(self.variants)
        ordered = sorted(self.runs, key=lambda key: (names.index(key[0]), key[1]))
        write_runs(self.table, [*(self.runs[key] for key in ordered), *self.others])


def _values(recipe: Recipe, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted settings as the recipe has them: 0.1 for the text '0.1' of a command line."""
    values: dict[str, Any] = {}
    for key in keys:
        value: Any = recipe
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        values[key] = value
    return values


def _same_study(before: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether two records of study.json mean the same study; earlier versions recorded the path of the data."""
    names = Path(str(before.get("data"))).name
    return {**before, "data": names} == dict(record) or dict(before) == dict(record)


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


def _summary(
    plan: Study, chosen: Sequence[str], scale: str, data: str, seeds: int, folder: Path, runs: Mapping[Key, FinishedRun]
) -> StudyResult:
    """Compare the variants that were run, and those with results of earlier calls."""
    papers = {variant.name: variant.paper for variant in plan.variants}
    rows, curves, drawn = [], {}, set()
    for variant in plan.variants:
        mine = {seed: run for (name, seed), run in sorted(runs.items()) if name == variant.name}
        good = {seed: run for seed, run in mine.items() if run.top1 is not None}
        if variant.name not in chosen and not good:
            continue
        base = plan.baseline(variant)
        effect = paper_effect = None
        pairs = []
        if base is not None:
            pairs = [(run, runs[base.name, seed]) for seed, run in good.items() if _is_good(runs, base, seed)]
            effect = paired_difference(pairs)
            if variant.paper is not None and papers[base.name] is not None:
                paper_effect = round(variant.paper - float(papers[base.name] or 0), 2)
        top1 = tuple(run.top1 for run in good.values() if run.top1 is not None)
        rows.append(
            Row(
                variant.name,
                None if base is None else base.name,
                top1,
                mean_of_runs(top1) if top1 else None,
                effect,
                variant.paper,
                paper_effect,
                verdict(effect, paper_effect, len(pairs)) if top1 else "failed",
                next((run.params for run in good.values()), 0),
                next((run.macs for run in good.values()), 0),
                sum(run.seconds for run in good.values()),
                tuple((seed, run.error) for seed, run in mine.items() if run.error is not None),
            )
        )
        shared = frozenset(run.settings for run in good.values())
        if shared not in drawn:
            curves[variant.name] = _mean_curve([run.curve for run in good.values()])
        drawn.add(shared)
    seconds = sum({run.settings: run.seconds for run in runs.values()}.values())
    return StudyResult(folder, plan, scale, data, seeds, tuple(rows), curves, seconds)


def _is_good(runs: Mapping[Key, FinishedRun], variant: StudyVariant, seed: int) -> bool:
    run = runs.get((variant.name, seed))
    return run is not None and run.top1 is not None


def verdict(effect: Estimate | None, paper_effect: float | None, pairs: int = 1) -> str:
    """Return the significance and sign of an effect, as text.

    Args:
        effect: in percentage points; None for a variant that is compared with no other.
        paper_effect: effect in the paper.
        pairs: number of paired runs. With more than one, the text states how many seeds would show the paper's effect.
    """
    if effect is None:
        return ""
    if effect.low <= 0 <= effect.high:
        needed = seeds_to_show(effect, pairs, abs(paper_effect)) if paper_effect and pairs > 1 else None
        return "no difference shown" + (
            f" (for {paper_effect:+g}: {needed} seeds)" if needed and needed > pairs else ""
        )
    sign = "higher" if effect.value > 0 else "lower"
    if paper_effect is None:
        return sign
    if paper_effect == 0:
        return f"{sign}, no effect in the paper"
    return f"{sign}, {'as in' if (paper_effect > 0) == (effect.value > 0) else 'against'} the paper"


def _mean_curve(curves: Sequence[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
    """Average the curves over the epochs that all of them have."""
    curves = [curve for curve in curves if curve]
    epochs = set.intersection(*({epoch for epoch, _ in curve} for curve in curves)) if curves else set()
    values = [dict(curve) for curve in curves]
    return tuple((epoch, float(np.mean([value[epoch] for value in values]))) for epoch in sorted(epochs))


def _top1(result: Result) -> str:
    assert result.measured is not None
    return ", ".join(
        f"{measured.top1:.2f} %" + ("" if size is None else f" at {size}") for size, measured in result.measured.items()
    )


def _write(result: StudyResult) -> None:
    from weft.study.report import write_study_report  # matplotlib

    content = {key: value for key, value in result.as_dict().items() if key != "out"}  # a path of this machine
    write_whole(result.out / "results.json", (json.dumps(content, indent=2) + "\n").encode())
    write_study_report(result)
