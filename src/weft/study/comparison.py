"""`compare`: compare models by accuracy and speed on the user's images and machine.

All candidates are trained under one protocol: the same recipe, images, split, length, seeds, batch size and precision.
All seeds hold out the same images. For large images they
start from public weights if these can be downloaded; a candidate without any is trained from scratch, with a recipe for
that, and marked. Within a time budget they run in stages, and after each stage the worse half stops (successive
halving, arXiv 1502.07943). All runs follow the schedule of a complete run, so nothing is trained twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import Splits, image_size_hint, open_data
from weft.data.folder import check_outside
from weft.data.preprocessing import eval_transform
from weft.errors import DataError, UsageError
from weft.files import write_whole
from weft.grid import Grid
from weft.inference.inputs import split_plan
from weft.models.families import SMALL_SIDE, candidates
from weft.processor import busy_note
from weft.progress import reading
from weft.recipes import load_recipe
from weft.recipes.load import default_recipe
from weft.runtime import Runtime
from weft.study.budget import Stopwatch
from weft.study.comparison_plan import Candidate, ComparisonPlan, Trained
from weft.study.outcome import Comparison, Entry, Form, Limits, advise, pareto
from weft.study.plan import Scale, Study, StudyVariant, check_one_fold, check_variant, slug
from weft.study.runner import Result, check_engine, kept_in, open_directory, threads_of
from weft.study.speeds import measure_forms
from weft.study.statistics import Estimate, accuracy, mcnemar, mean_of_runs, paired_difference
from weft.text import first_few
from weft.train.network import check_sync_bn

CONTENTS = ("compare.json", "runs", "probes", "exports", "forms.json", "results.json", "report.md", "report.html")
FIGURES = ("frontier.png", "curves.png")
MIN_PER_CLASS = 5  # validation images per class; with fewer, an accuracy is a guess


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
) -> Comparison:
    """Train several models under one protocol, measure their speed, and recommend one.

    Args:
        data: as in `train`.
        models: model names; empty for one of each family of weft, a DeiT and a ResNet of similar cost.
        budget: time limit for everything, in seconds: estimating the cost of each model, training, and measuring
            speed. None for the epochs of the recipe. It is met approximately: the time of a run is an estimate, and
            a machine may become slower.
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
    began = Stopwatch()
    check_engine(engine, jobs)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1; got {seeds}.")
    data, more = str(data), dict(settings or {})
    given = load_recipe(recipe, list(more.items()))
    if budget is not None and "epochs" in more:
        raise UsageError("A budget decides the number of epochs; pass --budget or --epochs, not both.")
    if budget is not None and ("steps" in more or given.epochs == 0):
        length = f"steps={given.steps}" if "steps" in more else f"recipe {recipe} with epochs 0"
        raise UsageError(f"A budget decides the number of epochs; got {length}. Omit it, or omit --budget.")
    source = given.data
    check_one_fold(source)
    with reading(quiet=quiet) as progress:
        splits = open_data(
            data,
            split_plan(given),
            max_bad=source.max_bad,
            max_pixels=source.max_pixels,
            follow_links=source.follow_links,
            image=source.image,
            label=source.label,
            progress=progress,
        )
    _check_val_size(splits)
    side = min(image_size_hint(splits.train))
    chosen = _chosen(models, side)
    base = recipe or _recipe_for(data, side)
    for candidate in chosen:
        _check(candidate, base, more)
    if engine == "local":  # the machines of a cluster may have GPUs that this one does not have
        check_sync_bn(load_recipe(base, list(more.items())), Runtime.of(given.device))
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    check_outside(folder, data)
    record = {"data": data, "models": [c.model for c in chosen], "recipe": base, "settings": more, "budget": budget}
    record["stages"] = None  # until they are decided
    known = open_directory(folder, "compare.json", record, (*CONTENTS, *FIGURES), force=force, same=_same_comparison)
    known["budget"] = budget
    threads = threads or threads_of(jobs)
    watch = Stopwatch(known.get("seconds", 0.0) + began.spent())
    plan = ComparisonPlan(folder, data, base, more, splits, chosen, engine, jobs, threads, known, watch, quiet)
    plan.tell(
        f"Comparing {', '.join(candidate.name for candidate in chosen)} on {len(splits.train):,} training images and"
        f" {len(splits.val):,} held-out images of {data}, in {folder}."
    )
    crop = eval_transform({"input_size": (3, *Grid.of(given.img_size or side))})
    for note in filter(None, (crop.note(splits.sizes), busy_note(jobs * threads))):
        plan.tell(note)
    if "weights" not in known:
        known["weights"] = plan.find_weights()
        plan.save()
    plan.start_from(known["weights"])
    if "shared" not in known:
        known["shared"] = plan.decide_shared()
        plan.save()
    if known["stages"] is None:
        known |= plan.decide(budget, seeds)
        plan.save()
    try:
        with kept_in(folder):
            results = plan.train(known["epochs"], known["stages"], seeds)
            comparison = _summary(plan, results, seeds, Limits(max_latency_ms, max_megabytes))
    finally:
        plan.save()
    from weft.study.frontier import write_comparison  # matplotlib

    write_whole(folder / "results.json", (json.dumps(comparison.as_dict(), indent=2, default=_plain) + "\n").encode())
    write_comparison(comparison)
    return comparison


def _same_comparison(before: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return whether a directory holds this comparison; a budget may change until the number of epochs is decided."""
    is_open = before["stages"] is None
    return before | {"stages": None, "budget": record["budget"] if is_open else before["budget"]} == record


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


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


def _chosen(models: Sequence[str], side: int) -> tuple[Candidate, ...]:
    """Return the candidates: the given models, or the default ones for images of this size."""
    default = tuple(
        Candidate(name, settings["model"], {key: value for key, value in settings.items() if key != "model"})
        for name, settings in candidates("small" if side < SMALL_SIDE else "large").items()
    )
    if not models:
        return default
    if len(models) < 2 or len(set(models)) < len(models):
        raise UsageError(f"A comparison needs at least two models, each once; got {', '.join(models)}.")
    known = {candidate.model: candidate for candidate in default}
    return tuple(Candidate(name, name, known[name].settings if name in known else {}) for name in models)


def _recipe_for(data: str, side: int) -> str | None:
    """Return the recipe for training from scratch; None for the defaults of `weft train`."""
    return default_recipe(data) or ("small_images" if side < SMALL_SIDE else None)


def _check(candidate: Candidate, base: str | None, settings: Mapping[str, Any]) -> None:
    """Build a candidate on the meta device."""
    scale = Scale(base, "", 1, {**settings})
    variant = StudyVariant(candidate.name, set={"model": candidate.model, **candidate.settings})
    study = Study("compare", "", "", "", {"small": scale}, (variant,))
    check_variant(study, variant, "small", has_weights=True)  # `find_weights` looks for them later


def _summary(plan: ComparisonPlan, results: Trained, seeds: int, limits: Limits) -> Comparison:
    """Measure the speed of the trained candidates, and return the comparison."""
    alive = {name: pair for name, pair in results.items() if pair[0][0].error is None}
    if not alive:
        reasons = "; ".join(f"{name}: {pair[0][0].error}" for name, pair in results.items())
        raise UsageError(f"None of the candidates could be trained. {reasons}")
    finished = {name: runs for name, (runs, stopped) in alive.items() if stopped is None}
    finished = finished or {name: runs for name, (runs, _) in alive.items()}  # all remaining candidates failed
    best = max(finished, key=lambda name: float(np.mean([run.top1 for run in finished[name] if run.error is None])))
    epochs = plan.known["epochs"]
    trained = {
        candidate.name: plan.job(candidate, 0, epochs, alive[candidate.name][1])
        for candidate in plan.candidates
        if candidate.name in alive
    }
    order = sorted(trained, key=lambda name: (alive[name][1] is not None, -alive[name][0][0].top1))
    forms = measure_forms(
        plan.folder,
        {name: trained[name] for name in order},
        plan.tell,
        num_val=len(plan.splits.val),
        left=plan.left,
        quiet=plan.quiet,
    )
    entries = [
        _entry(
            candidate,
            *results[candidate.name],
            best=None if candidate.name == best else finished[best],
            forms=forms.get(candidate.name, ()),
        )
        for candidate in plan.candidates
    ]
    entries.sort(key=lambda entry: -math.inf if entry.accuracy is None else entry.accuracy.value, reverse=True)
    entries.sort(key=lambda entry: (entry.error is not None, entry.stopped_after is not None))
    return Comparison(
        plan.folder,
        plan.data,
        max((epoch for entry in entries for epoch, _ in entry.curve), default=0) if epochs is None else epochs,
        seeds,
        limits,
        _protocol(plan, seeds),
        tuple(plan.splits.notes),
        tuple(entries),
        pareto(entries, limits),
        advise(entries, limits),
    )


def _entry(
    candidate: Candidate,
    runs: Sequence[Result],
    stopped_after: int | None,
    *,
    best: Sequence[Result] | None,
    forms: Sequence[Form],
) -> Entry:
    """Return the row of a candidate; `best` has the runs of the best candidate, or is None if it is this one."""
    first = runs[0]
    if first.error is not None:
        return Entry(candidate.name, candidate.model, error=first.error, weights=candidate.weights)
    top1 = tuple(run.top1 for run in runs if run.error is None)
    return Entry(
        candidate.name,
        candidate.model,
        accuracy=mean_of_runs(top1) if len(top1) > 1 else accuracy(first.right),
        top1=top1,
        stopped_after=stopped_after,
        to_best=None if best is None else _difference_to_best(runs, best),
        p_value=None if best is None else mcnemar(first.right, best[0].right),
        params=first.params,
        macs=first.macs,
        megabytes=first.megabytes,
        seconds=first.seconds,
        peak_mib=first.peak_mib,
        forms=tuple(forms),
        curve=first.curve,
        weights=candidate.weights,
    )


def _protocol(plan: ComparisonPlan, seeds: int) -> str:
    """Describe how the candidates were trained, in one sentence."""

    def name(recipe: str | None) -> str:
        return "the defaults of weft train" if recipe is None else f"recipe {recipe}"

    stages = plan.known["stages"]
    counts = f"{len(plan.splits.train):,} training images and {len(plan.splits.val):,} held-out images"
    text = f"{name(plan.recipe)}, {plan.length}, {counts}, the same for all models"
    if shared := plan.known["shared"]:
        text += f", with {', '.join(f'{key}={value}' for key, value in shared.items())}"
    if len(stages) > 1:
        text += f"; halving after epochs {', '.join(map(str, stages[:-1]))}"
    scratch = [candidate.name for candidate in plan.candidates if not candidate.weights]
    text += ", from scratch" if len(scratch) == len(plan.candidates) else ", from public weights"
    if 0 < len(scratch) < len(plan.candidates):
        text += f"; from scratch with {name(plan.base)}, since there are no public weights: {', '.join(scratch)}"
    return f"{text}; {seeds} seed{'s' if seeds > 1 else ''}."


def _difference_to_best(runs: Sequence[Result], best: Sequence[Result]) -> Estimate | None:
    """Estimate the difference to the best candidate, seed by seed; a stopped candidate has the first seed only."""
    pairs = zip(runs, best, strict=False)
    return paired_difference([(ours, other) for ours, other in pairs if ours.error is None and other.error is None])
