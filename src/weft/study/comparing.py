"""`compare`: compare models by accuracy and speed on the user's images and machine.

All candidates are trained under one protocol: the same recipe, images, split, epochs and seeds. Photos are compared
from public weights where they can be had; a candidate without any is trained from scratch, by the recipe for that, and
marked. Within a budget of time they run in stages, and after each the worse half stops (successive halving, arXiv
1502.07943): a run that is stopped is at the same point of the same schedule as those that go on, so nothing is trained
twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import Splits, image_size_hint, open_data
from weft.durable import write_whole
from weft.errors import DataError, UsageError
from weft.hub import create_model
from weft.models.families import SMALL_SIDE, candidates
from weft.models.family import Candidate
from weft.reading import read_json
from weft.recipes import load_recipe
from weft.study.budget import Price, epochs_within, stages_of, staying
from weft.study.jobs import Job, Result, carry_out, check_engine
from weft.study.outcome import Comparison, Entry, Limits, advise, pareto
from weft.study.plan import Scale, Study, Variant, check_variant, slug
from weft.study.speeds import measure_forms
from weft.study.statistics import Estimate, accuracy, difference, mcnemar, mean_of_runs
from weft.train.defaults import fill_in
from weft.train.progress import clock, say
from weft.train.rundir import make_dir, refuse_taken

CONTENTS = ("compare.json", "runs", "probes", "exports", "forms.json", "results.json", "report.md", "report.html")
PICTURES = ("frontier.png", "curves.png")
FROM_WEIGHTS = "small_folder"  # recipe of candidates that start from public weights
PROBE_STEPS = 12
PER_CLASS = 5  # held-out images of a class below which an accuracy is a guess
EVALUATION = 0.35  # time of an image when evaluated, over that when trained


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
    force: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Trains several models alike, and says which to take.

    Args:
        data: as in `train`.
        models: names; none for one of each family of weft, a DeiT and a ResNet of like cost.
        budget: seconds that all trainings together may take, on this machine; None for what the recipe says.
        seeds: trainings of each that goes to the end.
        recipe: the base of all trainings; None to choose by the images.
        settings: dotted keys of the recipe, for all.
        max_latency_ms, max_megabytes: what a model may cost where it is used: one image, on this machine; its file.
        out: the directory; None for runs/compare-DATA. One of the same comparison goes on.
        engine, jobs: as in `run_study`.
        force: take the place of another comparison that is there.
        quiet: no progress and no notes.

    Raises:
        UsageError: a model or setting that is not there, a budget that is too small, a directory that is taken.
        DataError: data that cannot be used, or with too few held-out images to compare on.
    """
    check_engine(engine, jobs)
    if seeds < 1:
        raise UsageError(f"seeds must be at least 1; got {seeds}.")
    data, more = str(data), dict(settings or {})
    if budget is not None and "epochs" in more:
        raise UsageError("A budget decides the epochs; give one of them, --budget or --epochs.")
    source = load_recipe(recipe, list(more.items())).data
    splits = open_data(data, limit=source.limit, val_fraction=source.val_fraction, train_fraction=source.train_fraction)
    _check_held_out(splits)
    side = max(image_size_hint(splits.train))
    chosen = _chosen(models, side)
    base = recipe or _recipe_for(data, side)
    for candidate in chosen:
        _check(candidate, base, more)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(Path(data).name)}"
    facts = {"data": data, "models": [c.model for c in chosen], "recipe": base, "settings": more, "budget": budget}
    known = _begin(folder, facts, force=force)
    tell = (lambda text: None) if quiet else say
    plan = _Plan(folder, data, base, more, splits, chosen, engine, jobs, tell)
    if "weights" not in known:
        known["weights"] = plan.find_weights()
        write_whole(folder / "compare.json", json.dumps(known, indent=2).encode())
    plan.start_from(known["weights"])
    if "epochs" not in known:
        known |= plan.decide(budget, seeds)
        write_whole(folder / "compare.json", json.dumps(known, indent=2).encode())
    results = plan.train(known["epochs"], known["stages"], seeds)
    limits = Limits(max_latency_ms, max_megabytes)
    found = _summed_up(plan, results, known, seeds, limits)
    from weft.study.frontier import write_comparison  # matplotlib

    write_whole(folder / "results.json", (json.dumps(found.as_dict(), indent=2, default=_plain) + "\n").encode())
    write_comparison(found)
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _check_held_out(splits: Splits) -> None:
    counts = np.bincount(splits.val.labels, minlength=len(splits.classes))
    few = [f"{name}: {count}" for name, count in zip(splits.classes, counts, strict=True) if count < PER_CLASS]
    if few:
        shown = ", ".join(few[:5]) + (f" and {len(few) - 5} more" if len(few) > 5 else "")
        raise DataError(
            f"A comparison needs at least {PER_CLASS} held-out images of every class; got {shown}. Add images, or hold"
            " out more: --set data.val_fraction=0.5."
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
    """Recipe of candidates that are trained from scratch; None for the defaults of `weft train`."""
    return "digits" if data == "digits" else "small_images" if side <= SMALL_SIDE else None


def public_weights(model: str) -> tuple[str, str]:
    """Fetch the public weights of a model, or take them from the cache.

    Returns:
        Their name on the hub ('' where they cannot be had), and the reason why they cannot.
    """
    try:
        network = create_model(model, pretrained=True)
    except Exception as error:  # there are none, or no network: timm and the hub raise a dozen kinds
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return getattr(network, "pretrained_cfg", {}).get("hf_hub_id") or model, ""


def _check(candidate: Candidate, base: str | None, settings: Mapping[str, Any]) -> None:
    """Builds a candidate without memory."""
    scale = Scale(base, "", 1, {**settings})
    variant = Variant(candidate.name, set={"model": candidate.model, **candidate.settings})
    check_variant(Study("compare", "", "", "", {"small": scale}, (variant,)), variant, "small")


def _begin(folder: Path, facts: dict[str, Any], *, force: bool) -> dict[str, Any]:
    """A directory for this comparison, new or its own; what it has decided before."""
    known = folder / "compare.json"
    if known.exists():
        before = read_json(known, dict[str, Any], UsageError)
        if {key: before.get(key) for key in facts} == facts:
            return before
    refuse_taken(folder, (*CONTENTS, *PICTURES), force=force)
    make_dir(folder, (*CONTENTS, *PICTURES), force=force)
    write_whole(known, json.dumps(facts, indent=2).encode())
    return facts


class _Plan:
    """What is trained, how long, and in which stages."""

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
        tell: Any,
    ) -> None:
        self.folder, self.data, self.base, self.settings, self.splits = folder, data, base, settings, splits
        self.candidates, self.engine, self.at_once, self.tell = candidates, engine, at_once, tell

    def find_weights(self) -> dict[str, str]:
        """Public weights of each candidate, by name; '' where it is trained from scratch.

        Candidates for small images, and those of a recipe or setting that does not ask for public weights, are trained
        from scratch.
        """
        wants_them = load_recipe(self.base, list(self.settings.items())).pretrained
        is_free = self.base is None and "pretrained" not in self.settings
        found: dict[str, str] = {}
        for candidate in self.candidates if wants_them or is_free else ():
            found[candidate.name], reason = public_weights(candidate.model)
            if reason:
                self.tell(f"{candidate.name} is trained from scratch: {reason}")
        return found

    def start_from(self, weights: Mapping[str, str]) -> None:
        """Give each candidate the public weights that were found for it."""
        self.candidates = [replace(candidate, weights=weights.get(candidate.name, "")) for candidate in self.candidates]

    @property
    def recipe(self) -> str | None:
        """Recipe whose epochs and batch size all candidates share."""
        return FROM_WEIGHTS if self.base is None and any(c.weights for c in self.candidates) else self.base

    def _recipe_of(self, candidate: Candidate) -> str | None:
        """Recipe of one candidate: without public weights, one that is made for training from scratch."""
        return self.recipe if candidate.weights else self.base

    def decide(self, budget: float | None, seeds: int) -> dict[str, Any]:
        """Epochs and stages: all of the recipe's without a budget, what fits with one.

        Raises:
            UsageError: not even one epoch of each fits.
        """
        recipe = load_recipe(self.recipe, list(self.settings.items()))
        recipe, _ = fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))
        wanted = recipe.epochs or 1
        if budget is None:
            return {"epochs": wanted, "stages": [wanted]}
        prices = self._prices(recipe.batch_size)
        if not prices:
            raise UsageError(f"None of the candidates could be trained; see {self.folder / 'probes'}/*/log.txt.")
        once = {name: sum(price) for name, price in prices.items()}
        cheapest = min(once, key=once.__getitem__)
        if sum(once.values()) > budget:
            raise UsageError(
                f"The budget must hold one epoch of every candidate, {_time(sum(once.values()))} here ({cheapest} alone"
                f" {_time(once[cheapest])}); got {_time(budget)}. Give more time, fewer --models, or --limit images."
            )
        epochs = epochs_within(prices.values(), budget, seeds)
        stages = stages_of(epochs)
        self.tell(
            f"{_time(budget)} hold {epochs} epochs in stages to "
            + ", ".join(map(str, stages))
            + f"; an epoch takes {', '.join(f'{name} {_time(price.epoch)}' for name, price in prices.items())}."
        )
        return {"epochs": epochs, "stages": stages}

    def _prices(self, batch_size: Any) -> dict[str, Price]:
        """Of each candidate, by a few steps."""
        size = batch_size if isinstance(batch_size, int) else 64
        few = min(len(self.splits.train), PROBE_STEPS * size)
        probes = {
            candidate.name: Job(
                self.folder / "probes" / slug(candidate.name),
                self._recipe_of(candidate),
                self.data,
                {**self._settings(candidate, 0), "epochs": 2, "data.limit": few},
            )
            for candidate in self.candidates
        }
        results = carry_out(list(probes.values()), engine=self.engine)
        evaluated = EVALUATION * len(self.splits.val)
        prices = {}
        for name, job in probes.items():
            result = results[job.folder]
            if result.error is None and result.images_per_second > 0:
                pace = 1 / result.images_per_second
                prices[name] = Price((len(self.splits.train) + evaluated) * pace, result.overhead + evaluated * pace)
            else:
                self.tell(f"{name} cannot be trained: {result.error or 'no epoch was timed'}")
        return prices

    def _settings(self, candidate: Candidate, seed: int) -> dict[str, Any]:
        settings = {**self.settings, "model": candidate.model, **candidate.settings, "seed": seed}
        if not candidate.weights and load_recipe(self.base, list(self.settings.items())).pretrained:
            settings["pretrained"] = False
        return settings

    def job(self, candidate: Candidate, seed: int, epochs: int, until: int | None) -> Job:
        """A training, up to an epoch."""
        return Job(
            self.folder / "runs" / f"{slug(candidate.name)}-seed{seed}",
            self._recipe_of(candidate),
            self.data,
            {**self._settings(candidate, seed), "epochs": epochs},
            until=until,
        )

    def train(self, epochs: int, stages: Sequence[int], seeds: int) -> dict[str, tuple[list[Result], int | None]]:
        """By candidate: results by seed, and the epoch at which it was stopped, or None."""
        alive = list(self.candidates)
        found: dict[str, tuple[list[Result], int | None]] = {}
        for stage in stages:
            is_last = stage == stages[-1]
            numbers = range(seeds) if is_last else range(1)
            tasks = {
                (candidate.name, seed): self.job(candidate, seed, epochs, None if is_last else stage)
                for seed in numbers
                for candidate in alive
            }
            results = carry_out(
                list(tasks.values()), engine=self.engine, at_once=self.at_once, on_done=self._told(stage, epochs)
            )
            for candidate in alive:
                mine = [results[tasks[candidate.name, seed].folder] for seed in numbers]
                found[candidate.name] = (mine, None if is_last else stage)
            healthy = [candidate for candidate in alive if found[candidate.name][0][0].error is None]
            if not is_last:
                ranked = sorted(healthy, key=lambda candidate: -found[candidate.name][0][0].top1)
                kept = ranked[: staying(len(ranked))]
                if stopped := [candidate.name for candidate in healthy if candidate not in kept]:
                    self.tell(f"Stopped after epoch {stage}: {', '.join(stopped)}.")
                alive = [candidate for candidate in alive if candidate in kept]
        return found

    def _told(self, stage: int, epochs: int) -> Any:
        def on_done(job: Job, result: Result) -> None:
            said = f"failed: {result.error}" if result.error else f"{result.top1:.2f} %"
            self.tell(f"{job.folder.name}, epoch {stage} of {epochs}: {said}")

        return on_done


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)


def _summed_up(plan: _Plan, results: Any, known: Mapping[str, Any], seeds: int, limits: Limits) -> Comparison:
    alive = {name: pair for name, pair in results.items() if pair[0][0].error is None}
    if not alive:
        reasons = "; ".join(f"{name}: {pair[0][0].error}" for name, pair in results.items())
        raise UsageError(f"None of the candidates could be trained. {reasons}")
    finished = {name: runs for name, (runs, stopped) in alive.items() if stopped is None}
    finished = finished or {name: runs for name, (runs, _) in alive.items()}  # all that went on died
    best = max(finished, key=lambda name: float(np.mean([run.top1 for run in finished[name] if run.error is None])))
    trained = {
        candidate.name: plan.job(candidate, 0, known["epochs"], alive[candidate.name][1])
        for candidate in plan.candidates
        if candidate.name in alive
    }
    forms = measure_forms(plan.folder, trained, plan.tell)
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
                to_best=_to_best(runs, finished[best]) if is_other else None,
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
    counts = f"{len(plan.splits.train):,} images to learn from and {len(plan.splits.val):,} held out"
    stages = known["stages"]
    recipe = "the defaults of weft train" if plan.recipe is None else f"recipe {plan.recipe}"
    scratch = [candidate.name for candidate in plan.candidates if not candidate.weights]
    if len(scratch) == len(plan.candidates):
        start = ", from scratch"
    else:
        start = ", from public weights"
        if scratch:
            by = "the defaults of weft train" if plan.base is None else f"recipe {plan.base}"
            start += f"; without public weights, and so from scratch by {by}: {', '.join(scratch)}"
    protocol = (
        f"{recipe}, {known['epochs']} epochs, {counts}, the same for all"
        + (f"; after epochs {', '.join(map(str, stages[:-1]))} the worse half stopped" if len(stages) > 1 else "")
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
        advise(entries, limits, frontier),
    )


def _to_best(mine: Sequence[Result], best: Sequence[Result]) -> Estimate:
    """Seed by seed; a run that was stopped has the first only."""
    pairs = [
        (ours, theirs) for ours, theirs in zip(mine, best, strict=False) if ours.error is None and theirs.error is None
    ]
    if len(pairs) > 1:
        return mean_of_runs([ours.top1 - theirs.top1 for ours, theirs in pairs])
    return difference(pairs[0][0].right, pairs[0][1].right)
