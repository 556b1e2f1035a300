"""Training runs of a comparison: which candidates, how long, and in which stages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.checkpoints.hub import create_model
from weft.data import Splits, image_size_hint
from weft.errors import UsageError, WeftError
from weft.files import write_whole
from weft.progress import clock, rate, say, working
from weft.recipes import Recipe, load_recipe
from weft.study.budget import Price, Stopwatch, epochs_within, seconds, stages_of, staying
from weft.study.plan import slug
from weft.study.probe import Probe, macs_of, probe
from weft.study.protocol import AUTO, open_keys, shared_settings
from weft.study.runner import Job, Result, call, run_jobs
from weft.study.speeds import form_seconds
from weft.study.watch import watching
from weft.train.plan import fill_in

FROM_WEIGHTS = "small_folder"  # recipe of candidates that start from public weights
EVALUATION = 0.35  # time to evaluate an image, relative to a training step
MEASURING = 0.25  # largest share of a budget that is kept for measuring speed in all forms

Trained = dict[str, tuple[list[Result], int | None]]  # by candidate: results by seed, and the epoch of its stop or None


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


@dataclass(frozen=True)
class Candidate:
    """A model of a comparison, and the settings that make it fit the images.

    Attributes:
        name: label in reports.
        model: model name.
        settings: recipe keys.
        weights: public weights that it starts from, as OWNER/NAME on the hub; '' for training from scratch.
    """

    name: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""


@dataclass
class ComparisonPlan:
    """Training runs of a comparison: which candidates, how long, in which stages, and the time used so far.

    Attributes:
        folder: directory of the comparison.
        data: the user's name of the dataset.
        base: recipe for training from scratch; None for the defaults of `weft train`.
        settings: recipe settings of all runs, by dotted key.
        splits: training and held-out images.
        candidates: the candidates, with the public weights that they start from (see `start_from`).
        engine, at_once, threads: as `engine`, `jobs` and `threads` of `run_study`.
        known: content of compare.json.
        watch: the time used so far.
        quiet: print no progress and no notes.
    """

    folder: Path
    data: str
    base: str | None
    settings: Mapping[str, Any]
    splits: Splits
    candidates: Sequence[Candidate]
    engine: str
    at_once: int
    threads: int
    known: dict[str, Any]
    watch: Stopwatch
    quiet: bool

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
        """Set the public weights of each candidate. A linear probe leaves out candidates that have none.

        Raises:
            UsageError: fewer than two candidates are left.
        """
        self.candidates = [replace(candidate, weights=weights.get(candidate.name, "")) for candidate in self.candidates]
        if load_recipe(self.base, list(self.settings.items())).epochs != 0:
            return
        if missing := [candidate.name for candidate in self.candidates if not candidate.weights]:
            self.tell(f"Left out, since a linear probe needs public weights: {', '.join(missing)}.")
        self.candidates = [candidate for candidate in self.candidates if candidate.weights]
        if len(self.candidates) < 2:
            named = ", ".join(candidate.model for candidate in self.candidates) or "none"
            raise UsageError(
                f"A comparison of linear probes (epochs 0) needs at least two models with public weights; got {named}."
                " Name other --models, or pass --epochs N."
            )

    @property
    def recipe(self) -> str | None:
        """Recipe with the epochs and the batch size of all candidates."""
        return FROM_WEIGHTS if self.base is None and any(c.weights for c in self.candidates) else self.base

    def _recipe_of(self, candidate: Candidate) -> str | None:
        """Return the recipe of a candidate: without public weights, one for training from scratch."""
        return self.recipe if candidate.weights else self.base

    def recipe_of(self, candidate: Candidate) -> Recipe:
        """Return the complete recipe of a candidate."""
        recipe = load_recipe(self._recipe_of(candidate), list(self._settings(candidate).items()))
        return fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))[0]

    def decide_shared(self) -> dict[str, Any]:
        """Decide the settings that the recipes leave to the machine, once for all candidates."""
        recipes = [self.recipe_of(candidate) for candidate in self.candidates]
        if all(AUTO not in (recipe.batch_size, recipe.precision) for recipe in recipes):
            return {}
        with working("choosing batch size and precision", unit="", quiet=self.quiet):
            arguments = (recipes, len(self.splits.classes), len(self.splits.train), self.threads)
            return call(shared_settings, *arguments, engine=self.engine, threads=self.threads)

    @property
    def length(self) -> str:
        """Length of a run, as text."""
        epochs = self.known["epochs"]
        if epochs is not None:
            return f"{epochs} epochs"
        return f"{load_recipe(self.recipe, list(self.settings.items())).steps} steps"

    def decide(self, budget: float | None, seeds: int) -> dict[str, Any]:
        """Decide epochs and stages: those of the recipe, or the most that the budget allows.

        Epochs are None for a recipe that counts steps; a stage is None if it is the whole run.

        Raises:
            UsageError: the budget does not suffice for one epoch of each candidate.
        """
        recipe = load_recipe(self.recipe, list(self.settings.items()))
        recipe, _ = fill_in(recipe, image_size_hint(self.splits.train), len(self.splits.train))
        if budget is None:
            return {"epochs": recipe.epochs, "stages": [recipe.epochs]}
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
            settings = {**self._settings(candidate), "epochs": 1, "data.limit": few}
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

    def _settings(self, candidate: Candidate, number: int = 0) -> dict[str, Any]:
        """Return the settings of a candidate in a run, the first of which has number 0 and the seed of the recipe."""
        base = load_recipe(self.base, list(self.settings.items()))
        settings = {**self.settings, "model": candidate.model, **candidate.settings}
        settings |= {"seed": base.seed + number, "data.seed": base.split_seed}
        if not candidate.weights and base.pretrained:
            settings["pretrained"] = False
        recipe = load_recipe(self._recipe_of(candidate), list(settings.items()))
        return settings | open_keys(recipe, self.known.get("shared", {}))

    def job(self, candidate: Candidate, number: int, epochs: int | None, until: int | None) -> Job:
        """Return the job of a candidate up to an epoch; epochs None for the steps of the recipe."""
        settings = self._settings(candidate, number)
        return Job(
            self.folder / "runs" / f"{slug(candidate.name)}-seed{settings['seed']}",
            self._recipe_of(candidate),
            self.data,
            settings if epochs is None else {**settings, "epochs": epochs},
            until=until,
        )

    def train(self, epochs: int | None, stages: Sequence[int | None], seeds: int) -> Trained:
        """Train in stages; the worse half of the candidates stops after each."""
        alive = list(self.candidates)
        macs = {candidate.name: macs_of(self.recipe_of(candidate), len(self.splits.classes)) for candidate in alive}
        results_of: Trained = {}
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
                    on_done=self._announce(None if is_last else stage, epochs),
                    on_wait=on_wait,
                )
            for candidate in alive:
                mine = [results[tasks[candidate.name, seed].folder] for seed in numbers]
                results_of[candidate.name] = (mine, None if is_last else stage)
            self.save()
            healthy = [candidate for candidate in alive if results_of[candidate.name][0][0].error is None]
            if not is_last and stage is not None and epochs is not None:
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

    def _announce(self, stage: int | None, epochs: int | None) -> Any:
        at = self.length if stage is None else f"epoch {stage} of {epochs}"

        def on_done(job: Job, result: Result) -> None:
            text = f"failed: {result.error}" if result.error else f"{result.top1:.2f} %"
            self.tell(f"{job.folder.name}, {at}: {text}")

        return on_done


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)
