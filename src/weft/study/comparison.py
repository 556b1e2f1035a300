"""`compare`: compare models by accuracy and speed on the user's images and machine.

All candidates are trained under one protocol: the same recipe, images, split, epochs and seeds. For large images they
start from public weights if these can be downloaded; a candidate without any is trained from scratch, with a recipe for
that, and marked. Within a time budget they run in stages, and after each stage the worse half stops (successive
halving, arXiv 1502.07943). All runs follow the schedule of a complete run, so nothing is trained twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoints.hub import create_model
from weft.data import Splits, image_size_hint, open_data
from weft.errors import DataError, UsageError, WeftError
from weft.files import write_whole
from weft.models.families import SMALL_SIDE, candidates
from weft.models.family import Candidate
from weft.processor import busy_note
from weft.progress import clock, rate, reading, say, working
from weft.recipes import Recipe, load_recipe
from weft.study.budget import Price, Stopwatch, epochs_within, seconds, stages_of, staying
from weft.study.outcome import Comparison, Entry, Limits, advise, pareto
from weft.study.plan import Scale, Study, StudyVariant, check_one_fold, check_variant, slug
from weft.study.probe import Probe, macs_of, probe
from weft.study.runner import Job, Result, call, check_engine, kept_in, open_directory, run_jobs, threads_of
from weft.study.speeds import form_seconds, measure_forms
from weft.study.statistics import Estimate, accuracy, mcnemar, mean_of_runs, paired_difference
from weft.study.watch import watching
from weft.train.plan import fill_in

CONTENTS = ("compare.json", "runs", "probes", "exports", "forms.json", "results.json", "report.md", "report.html")
FIGURES = ("frontier.png", "curves.png")
FROM_WEIGHTS = "small_folder"  # recipe of candidates that start from public weights
MIN_PER_CLASS = 5  # validation images per class; with fewer, an accuracy is a guess
EVALUATION = 0.35  # time to evaluate an image, relative to a training step
MEASURING = 0.25  # largest share of a budget that is kept for measuring speed in all forms


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
    if budget is not None and "epochs" in more:
        raise UsageError("A budget decides the number of epochs; pass --budget or --epochs, not both.")
    source = load_recipe(recipe, list(more.items())).data
    check_one_fold(source)
    with reading(quiet=quiet) as progress:
        splits = open_data(
            data,
            limit=source.limit,
            max_bad=source.max_bad,
            follow_links=source.follow_links,
            val_fraction=source.val_fraction,
            train_fraction=source.train_fraction,
            folds=source.folds,
            fold=source.fold or 1,
            group=source.group,
            progress=progress,
        )
    _check_val_size(splits)
    side = max(image_size_hint(splits.train))
    chosen = _chosen(models, side)
    base = recipe or _recipe_for(data, side)
    for candidate in chosen:
        _check(candidate, base, more)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    record = {"data": data, "models": [c.model for c in chosen], "recipe": base, "settings": more, "budget": budget}
    record["epochs"] = None  # until they are decided
    known = open_directory(folder, "compare.json", record, (*CONTENTS, *FIGURES), force=force, same=_same_comparison)
    known["budget"] = budget
    threads = threads or threads_of(jobs)
    watch = Stopwatch(known.get("seconds", 0.0) + began.spent())
    plan = _Plan(folder, data, base, more, splits, chosen, engine, jobs, threads, known, watch, quiet)
    plan.tell(
        f"Comparing {', '.join(candidate.name for candidate in chosen)} on {len(splits.train):,} training images and"
        f" {len(splits.val):,} held-out images of {data}, in {folder}."
    )
    if note := busy_note(jobs * threads):
        plan.tell(note)
    if "weights" not in known:
        known["weights"] = plan.find_weights()
        plan.save()
    plan.start_from(known["weights"])
    if known.get("epochs") is None:
        known |= plan.decide(budget, seeds)
        plan.save()
    try:
        with kept_in(folder):
            results = plan.train(known["epochs"], known["stages"], seeds)
            comparison = _summary(plan, results, known, seeds, Limits(max_latency_ms, max_megabytes))
    finally:
        plan.save()
    from weft.study.frontier import write_comparison  # matplotlib

    write_whole(folder / "results.json", (json.dumps(comparison.as_dict(), indent=2, default=_plain) + "\n").encode())
    write_comparison(comparison)
    return comparison


def _same_comparison(before: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return whether a directory holds this comparison; a budget may change until the number of epochs is decided."""
    is_open = before["epochs"] is None
    return before | {"epochs": None, "budget": record["budget"] if is_open else before["budget"]} == record


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _check_val_size(splits: Splits) -> None:
    counts = np.bincount(splits.val.labels, minlength=len(splits.classes))
    few = np.flatnonzero(counts < MIN_PER_CLASS)
    if not len(few):
        return
    shown = ", ".join(f"{splits.classes[number]}: {counts[number]}" for number in few[:5])
    shown += f" and {len(few) - 5} more" if len(few) > 5 else ""
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
    default = candidates("small" if side <= SMALL_SIDE else "large")
    if not models:
        return default
    if len(models) < 2 or len(set(models)) < len(models):
        raise UsageError(f"A comparison needs at least two models, each once; got {', '.join(models)}.")
    known = {candidate.model: candidate for candidate in default}
    return tuple(Candidate(name, name, known[name].settings if name in known else {}) for name in models)


def _recipe_for(data: str, side: int) -> str | None:
    """Return the recipe for training from scratch; None for the defaults of `weft train`."""
    return "digits" if data == "digits" else "small_images" if side <= SMALL_SIDE else None


def public_weights(model: str) -> tuple[str, str]:
    """Download the public weights of a model, or take them from the cache.

    Returns:
        Their name on the hub ('' if they cannot be downloaded), and the reason of a failure.
    """
    try:
        network = create_model(model, pretrained=True)
    except Exception as error:  # no weights or no connection: timm and the hub raise many types
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return getattr(network, "pretrained_cfg", {}).get("hf_hub_id") or model, ""


def _check(candidate: Candidate, base: str | None, settings: Mapping[str, Any]) -> None:
    """Build a candidate on the meta device."""
    scale = Scale(base, "", 1, {**settings})
    variant = StudyVariant(candidate.name, set={"model": candidate.model, **candidate.settings})
    check_variant(Study("compare", "", "", "", {"small": scale}, (variant,)), variant, "small")


class _Plan:
    """Training runs of a comparison: which candidates, how long, in which stages, and the time used so far."""

    def __init__(
        self,
        folder: Path,
        data: str,
        base: str | None,
        settings: Mapping[str, Any],
        splits: Splits,
        candidates: Sequence[Candidate],
        engine: str,
        at_once: int,
        threads: int,
        known: dict[str, Any],
        watch: Stopwatch,
        quiet: bool,
    ) -> None:
        self.folder, self.data, self.base, self.settings, self.splits = folder, data, base, settings, splits
        self.candidates, self.engine, self.at_once, self.threads = candidates, engine, at_once, threads
        self.known, self.watch, self.quiet = known, watch, quiet

    def tell(self, text: str) -> None:
        """Print a note."""
        if not self.quiet:
            say(text)

    def save(self) -> None:
        """Write compare.json: the decisions, and the time used so far."""
        self.known["seconds"] = self.watch.spent()
        write_whole(self.folder / "compare.json", json.dumps(self.known, indent=2).encode())

    def left(self) -> float:
        """Return the seconds that are left of the budget."""
        budget = self.known["budget"]
        return math.inf if budget is None else budget - self.watch.spent()

    def find_weights(self) -> dict[str, str]:
        """Return the public weights of each candidate; '' if it is trained from scratch.

        Candidates for small images, and those of a recipe or setting without public weights, are trained from scratch.
        """
        wants_them = load_recipe(self.base, list(self.settings.items())).pretrained
        is_free = self.base is None and "pretrained" not in self.settings
        sources: dict[str, str] = {}
        for candidate in self.candidates if wants_them or is_free else ():
            sources[candidate.name], reason = public_weights(candidate.model)
            if reason:
                self.tell(f"{candidate.name} is trained from scratch: {reason}")
        return sources

    def start_from(self, weights: Mapping[str, str]) -> None:
        """Set the public weights of each candidate."""
        self.candidates = [replace(candidate, weights=weights.get(candidate.name, "")) for candidate in self.candidates]

    @property
    def recipe(self) -> str | None:
        """Recipe with the epochs and the batch size of all candidates."""
        return FROM_WEIGHTS if self.base is None and any(c.weights for c in self.candidates) else self.base

    def _recipe_of(self, candidate: Candidate) -> str | None:
        """Return the recipe of a candidate: without public weights, one for training from scratch."""
        return self.recipe if candidate.weights else self.base

    def recipe_of(self, candidate: Candidate) -> Recipe:
        """Return the complete recipe of a candidate."""
        recipe = load_recipe(self._recipe_of(candidate), list(self._settings(candidate, 0).items()))
        return fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))[0]

    def decide(self, budget: float | None, seeds: int) -> dict[str, Any]:
        """Decide epochs and stages: those of the recipe, or the most that the budget allows.

        Raises:
            UsageError: the budget does not suffice for one epoch of each candidate.
        """
        recipe = load_recipe(self.recipe, list(self.settings.items()))
        recipe, _ = fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))
        wanted = recipe.epochs or 1
        if budget is None:
            return {"epochs": wanted, "stages": [wanted]}
        probes = self._probes(budget, seeds)
        if not probes:
            raise UsageError("None of the candidates could be trained.")
        prices = self._prices(probes)
        reserve = self._reserve({name: probe.image for name, probe in probes.items()}, budget)
        if (needed := seconds(prices.values(), 1, seeds)) > self.left() - reserve:
            costs = {name: seeds * sum(price) for name, price in prices.items()}
            raise self._too_small(budget, self.watch.spent() + needed + reserve, costs)
        epochs = epochs_within(prices.values(), self.left() - reserve, seeds)
        stages = stages_of(epochs)
        self.tell(
            f"Budget {_time(budget)}: {epochs} epochs"
            + (f", with halving after epochs {', '.join(map(str, stages[:-1]))}" if len(stages) > 1 else "")
            + f". {_time(self.watch.spent())} are used, {_time(reserve)} are kept for measuring speed."
        )
        return {"epochs": epochs, "stages": stages}

    def _too_small(self, budget: float, needed: float, costs: Mapping[str, float], bound: str = "about") -> UsageError:
        costliest = max(costs, key=costs.__getitem__)
        return UsageError(
            f"The budget must suffice for one epoch of every candidate, {bound} {_time(needed)} here ({costliest} alone"
            f" {_time(costs[costliest])}); got {_time(budget)}. Raise --budget, or use fewer --models or --limit N."
        )

    def _probes(self, budget: float, seeds: int) -> dict[str, Probe]:
        """Estimate the cost of each candidate by a few steps, the smallest network first.

        Raises:
            UsageError: the budget does not suffice. The costs of candidates that are not probed yet are estimated from
                their multiply-adds, so that a budget that is much too small is refused after the first probe.
        """
        recipes = {candidate.name: self.recipe_of(candidate) for candidate in self.candidates}
        macs = {name: macs_of(recipe, len(self.splits.classes)) for name, recipe in recipes.items()}
        images = seeds * (len(self.splits.train) + EVALUATION * len(self.splits.val))
        splits = None if self.engine == "ray" else self.splits
        probes: dict[str, Probe] = {}
        with working("estimating the cost", len(macs), unit="models", quiet=self.quiet) as progress:
            for name in sorted(macs, key=macs.__getitem__):
                progress.update(progress.done, name=f"estimating the cost of {name}")
                arguments = (recipes[name], macs[name], splits, self.threads)
                try:
                    probes[name] = cost = call(probe, *arguments, engine=self.engine, threads=self.threads)
                except (WeftError, RuntimeError) as error:
                    self.tell(f"{name} cannot be trained: {str(error).splitlines()[0]}")
                    macs[name] = 0.0
                    continue
                finally:
                    progress.advance()
                epoch, speed = _time(cost.image * images / seeds), rate(1 / cost.image, "images")
                self.tell(
                    f"{name}: about {epoch} per epoch ({speed}),"
                    f" {cost.memory / 1e9:.1f} GB of memory at batch size {cost.batch_size}."
                )
                pace = min(known.image / macs[other] for other, known in probes.items())
                costs = {
                    other: images * (probes[other].image if other in probes else pace * count)
                    for other, count in macs.items()
                }
                if sum(costs.values()) > self.left():
                    raise self._too_small(budget, self.watch.spent() + sum(costs.values()), costs, "at least")
        return probes

    def _prices(self, probes: Mapping[str, Probe]) -> dict[str, Price]:
        """Return the time of an epoch and of a start of each candidate.

        What a start takes besides training is measured by one short run of the smallest candidate.
        """
        evaluated = EVALUATION * len(self.splits.val)
        overhead = 0.0
        for name, cost in probes.items():
            candidate = next(candidate for candidate in self.candidates if candidate.name == name)
            few = max(2 * cost.batch_size, len(self.splits.classes))
            settings = {**self._settings(candidate, 0), "epochs": 1, "data.limit": few}
            job = Job(self.folder / "probes" / slug(name), self._recipe_of(candidate), self.data, settings)
            with working("estimating the time to start a run", unit="", quiet=self.quiet):
                (result,) = run_jobs([job], engine=self.engine, threads=self.threads).values()
            if result.error is None:
                overhead = max(result.overhead - EVALUATION * min(few, len(self.splits.val)) * cost.image, 0.0)
                self.tell(f"Starting and finishing a run takes about {_time(overhead)}.")
                break
            self.tell(f"{name} cannot be trained: {result.error}")
        return {
            name: Price((len(self.splits.train) + evaluated) * cost.image, overhead + evaluated * cost.image)
            for name, cost in probes.items()
        }

    def _reserve(self, paces: Mapping[str, float], budget: float) -> float:
        """Return the time to keep for measuring speed: in all forms, if that is a small share of the budget."""
        num_val = len(self.splits.val)
        quick = sum(form_seconds(pace, num_val, is_full=False) for pace in paces.values())
        full = sum(form_seconds(pace, num_val, is_full=True) for pace in paces.values())
        return max(quick, min(full, MEASURING * budget))

    def _settings(self, candidate: Candidate, seed: int) -> dict[str, Any]:
        settings = {**self.settings, "model": candidate.model, **candidate.settings, "seed": seed}
        if not candidate.weights and load_recipe(self.base, list(self.settings.items())).pretrained:
            settings["pretrained"] = False
        return settings

    def job(self, candidate: Candidate, seed: int, epochs: int, until: int | None) -> Job:
        """Return the job of a candidate and seed, up to an epoch."""
        return Job(
            self.folder / "runs" / f"{slug(candidate.name)}-seed{seed}",
            self._recipe_of(candidate),
            self.data,
            {**self._settings(candidate, seed), "epochs": epochs},
            until=until,
        )

    def train(self, epochs: int, stages: Sequence[int], seeds: int) -> dict[str, tuple[list[Result], int | None]]:
        """Train in stages; return the results by seed of each candidate, and the epoch of its stop, or None."""
        alive = list(self.candidates)
        macs = {candidate.name: macs_of(self.recipe_of(candidate), len(self.splits.classes)) for candidate in alive}
        results_of: dict[str, tuple[list[Result], int | None]] = {}
        for stage in stages:
            is_last = stage == stages[-1]
            numbers = range(seeds) if is_last else range(1)
            tasks = {
                (candidate.name, seed): self.job(candidate, seed, epochs, None if is_last else stage)
                for seed in numbers
                for candidate in alive
            }
            weights = {job.folder: macs[name] for (name, _), job in tasks.items()}
            with watching(list(tasks.values()), weights, quiet=self.quiet) as on_wait:
                results = run_jobs(
                    list(tasks.values()),
                    engine=self.engine,
                    at_once=self.at_once,
                    threads=self.threads,
                    on_done=self._announce(stage, epochs),
                    on_wait=on_wait,
                )
            for candidate in alive:
                mine = [results[tasks[candidate.name, seed].folder] for seed in numbers]
                results_of[candidate.name] = (mine, None if is_last else stage)
            self.save()
            healthy = [candidate for candidate in alive if results_of[candidate.name][0][0].error is None]
            if not is_last:
                firsts = {candidate.name: results_of[candidate.name][0][0] for candidate in healthy}
                ranked = sorted(healthy, key=lambda candidate: -firsts[candidate.name].top1)
                kept = ranked[: self._number_to_keep([firsts[c.name] for c in ranked], stage, epochs, seeds)]
                if stopped := [candidate.name for candidate in healthy if candidate not in kept]:
                    self.tell(f"Stopped after epoch {stage}: {', '.join(stopped)}.")
                alive = [candidate for candidate in alive if candidate in kept]
        return results_of

    def _number_to_keep(self, ranked: Sequence[Result], stage: int, epochs: int, seeds: int) -> int:
        """Return how many candidates continue after a stage: half, or fewer if the budget does not suffice."""
        count = min(staying(len(ranked)), len(ranked))
        if self.known["budget"] is None:
            return count
        paces = {str(number): 1 / max(result.images_per_second, 1e-9) for number, result in enumerate(ranked)}
        left = self.left() - self._reserve(paces, self.known["budget"])
        prices = [Price(result.seconds / stage, result.overhead) for result in ranked]
        most = count
        while count > 1 and seconds(prices[:count], epochs, seeds, done=stage) > left:
            count -= 1
        if count < most:
            self.tell(f"Training takes longer than estimated: the budget suffices for {count} of {most} models.")
        return count

    def _announce(self, stage: int, epochs: int) -> Any:
        def on_done(job: Job, result: Result) -> None:
            text = f"failed: {result.error}" if result.error else f"{result.top1:.2f} %"
            self.tell(f"{job.folder.name}, epoch {stage} of {epochs}: {text}")

        return on_done


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)


def _summary(plan: _Plan, results: Any, known: Mapping[str, Any], seeds: int, limits: Limits) -> Comparison:
    alive = {name: pair for name, pair in results.items() if pair[0][0].error is None}
    if not alive:
        reasons = "; ".join(f"{name}: {pair[0][0].error}" for name, pair in results.items())
        raise UsageError(f"None of the candidates could be trained. {reasons}")
    finished = {name: runs for name, (runs, stopped) in alive.items() if stopped is None}
    finished = finished or {name: runs for name, (runs, _) in alive.items()}  # all remaining candidates failed
    best = max(finished, key=lambda name: float(np.mean([run.top1 for run in finished[name] if run.error is None])))
    trained = {
        candidate.name: plan.job(candidate, 0, known["epochs"], alive[candidate.name][1])
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
    entries = []
    for candidate in plan.candidates:
        runs, stopped = results[candidate.name]
        first = runs[0]
        if first.error is not None:
            entries.append(Entry(candidate.name, candidate.model, error=first.error, weights=candidate.weights))
            continue
        good = [run for run in runs if run.error is None]
        top1 = tuple(run.top1 for run in good)
        is_other = candidate.name != best
        entries.append(
            Entry(
                candidate.name,
                candidate.model,
                accuracy=mean_of_runs(top1) if len(good) > 1 else accuracy(first.right),
                top1=top1,
                stopped_after=stopped,
                to_best=_difference_to_best(runs, finished[best]) if is_other else None,
                p_value=mcnemar(first.right, finished[best][0].right) if is_other else None,
                params=first.params,
                macs=first.macs,
                megabytes=first.megabytes,
                seconds=first.seconds,
                peak_mib=first.peak_mib,
                forms=tuple(forms.get(candidate.name, ())),
                curve=first.curve,
                weights=candidate.weights,
            )
        )
    entries.sort(key=lambda entry: -math.inf if entry.accuracy is None else entry.accuracy.value, reverse=True)
    entries.sort(key=lambda entry: (entry.error is not None, entry.stopped_after is not None))
    frontier = pareto(entries, limits)
    counts = f"{len(plan.splits.train):,} training images and {len(plan.splits.val):,} held-out images"
    stages = known["stages"]
    recipe = "the defaults of weft train" if plan.recipe is None else f"recipe {plan.recipe}"
    scratch = [candidate.name for candidate in plan.candidates if not candidate.weights]
    if len(scratch) == len(plan.candidates):
        start = ", from scratch"
    else:
        start = ", from public weights"
        if scratch:
            by = "the defaults of weft train" if plan.base is None else f"recipe {plan.base}"
            start += f"; from scratch with {by}, since there are no public weights: {', '.join(scratch)}"
    protocol = (
        f"{recipe}, {known['epochs']} epochs, {counts}, the same for all models"
        + (f"; halving after epochs {', '.join(map(str, stages[:-1]))}" if len(stages) > 1 else "")
        + start
        + f"; {seeds} seed{'s' if seeds > 1 else ''}."
    )
    return Comparison(
        plan.folder,
        plan.data,
        known["epochs"],
        seeds,
        limits,
        protocol,
        tuple(plan.splits.notes),
        tuple(entries),
        frontier,
        advise(entries, limits),
    )


def _difference_to_best(runs: Sequence[Result], best: Sequence[Result]) -> Estimate | None:
    """Estimate the difference to the best candidate, seed by seed; a stopped candidate has the first seed only."""
    pairs = zip(runs, best, strict=False)
    return paired_difference([(ours, other) for ours, other in pairs if ours.error is None and other.error is None])
