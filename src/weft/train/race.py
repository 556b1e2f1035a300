"""Choice of the network to start from: candidates compete on the images of the run.

The features of each candidate's public weights go into a linear probe, whose cross-validated accuracy ranks them: no
network is the best start for all images (VIBES, arXiv 2410.08592). With few images, differences are mostly chance, so
they are weighed against those that the accuracies on ImageNet let expect. Few images come first, so that clearly worse
candidates cost little. benchmarks/few-images/race.py has the numbers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from weft.checkpoints.hub import licence_of
from weft.data.split import stratified_subset
from weft.deploy.folding import fastest
from weft.errors import CheckpointError, UsageError
from weft.inference.features import has_classifiers, read_features
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.inference.torch_model import infer
from weft.machine.runtime import Runtime
from weft.models import families
from weft.models.contract import preprocessing
from weft.progress import Work, say
from weft.report.intervals import Z, accuracy_in_groups, accuracy_of
from weft.train.candidates import ProbedNetwork
from weft.train.decisions import available
from weft.train.linear_probe import held_out_right
from weft.train.network import build_model
from weft.train.plan import FEATURE_BATCH, Plan

ROUNDS = (500, 1_500)  # images of a round, evenly from the classes
TRANSFER, SPREAD = 0.7, 3.0  # of a difference on ImageNet, expected on other images; deviation from that, in points
TIMINGS = 15  # of a forward pass


def raced(plan: Plan) -> Plan:
    """Return the plan with the best start network for its training images, where the choice is left to weft."""
    if not plan.request.leaves_network(plan.recipe):
        if plan.request.candidates:
            raise UsageError(
                "--candidates needs a network with public weights that is left to weft: no --model, a recipe such as"
                f" finetune or probe, or none, and images of {families.SMALL_SIDE} pixels or more. Omit it, or pass"
                " --recipe finetune."
            )
        return plan
    names = plan.runtime.gather(_names(plan) if plan.runtime.is_main else None)[0]
    if names == [plan.recipe.model]:
        return plan
    say(f"Networks to start from, by a linear probe on training images: {', '.join(names)}.")
    found = plan.runtime.gather(list(_compared(plan, names)) if plan.runtime.is_main else None)[0]
    if not found:
        return plan
    chosen = next(one for one in found if one.is_chosen)
    best = max(found, key=lambda one: (one.images, one.accuracy.value))
    reason = "the most accurate by probe"
    if chosen is not best:
        reason = f"as {best.model} is not clearly more accurate, and less so on ImageNet"
    note = f"Model {chosen.model}, {reason}. Another: --model NAME."
    recipe = dataclasses.replace(plan.recipe, model=chosen.model)
    return dataclasses.replace(plan, recipe=recipe, notes=(*plan.notes, note), candidates=found)


def _names(plan: Plan) -> list[str]:
    """Return the candidates that the user names, or those that are available; the one of the plan without others."""
    networks = families.START_NETWORKS  # without a connection, a GPU has those of the packages
    of_device = networks["cuda" if plan.runtime.device.type == "cuda" else "cpu"]
    asked = list(plan.request.candidates)
    return asked or available([*of_device]) or available([*networks["cpu"]]) or [str(plan.recipe.model)]


def _compared(plan: Plan, names: Sequence[str]) -> Iterator[ProbedNetwork]:
    """Yield the results of all candidates; none if the images do not suffice for cross-validation."""
    train, results, rights = plan.splits.train, dict[str, ProbedNetwork](), dict[str, np.ndarray]()
    counts = np.bincount(train.labels)
    several = [i for i, label in enumerate(train.labels) if counts[label] > 1]  # one image cannot be held out
    if len({train.labels[i] for i in several}) < 2:
        return
    racing, groups = list(names), None
    for most in ROUNDS:
        keys, labels = [train.keys[i] for i in several], [train.labels[i] for i in several]
        places = [several[i] for i in stratified_subset(keys, labels, most, plan.recipe.seed)]
        for name in list(racing):
            try:
                result, rights[name], groups = _probed(plan, name, places)
            except (CheckpointError, UsageError) as error:
                if name in plan.request.candidates:
                    raise
                say(f"{name} is left out: {error}")
                racing.remove(name)
                continue
            if result is None:
                return
            results[name] = result
            say(f"{result}.")
        if not racing:
            return
        racing = [name for name in racing if not _is_behind(name, rights, racing, groups)]
        if len(places) == len(several):
            break
    chosen = best_start(
        {name: rights[name] for name in racing}, groups, {name: one.ms for name, one in results.items()}
    )
    for name, result in results.items():
        yield result._replace(is_chosen=name == chosen)


def _is_behind(name: str, rights: Mapping[str, np.ndarray], names: Sequence[str], groups: Sequence[str] | None) -> bool:
    """Return whether a candidate is shown to be less accurate than the most accurate of some."""
    best = max(names, key=lambda other: rights[other].mean())
    difference, error = _difference(rights[name], rights[best], groups)
    return difference < -Z * error


def best_start(rights: Mapping[str, np.ndarray], groups: Sequence[str] | None, ms: Mapping[str, float]) -> str:
    """Return the candidate with the highest accuracy to expect, by its probe and by its accuracy on ImageNet.

    The difference of two probes is weighed against `TRANSFER` of that on ImageNet by their variances. Of networks
    without a known accuracy on ImageNet, and of any two without a difference, the probe and the speed decide.

    Args:
        rights: whether the prediction of each image is correct, by candidate; of the same images in the same order.
        groups: group of each image; None without groups.
        ms: time of an image, by candidate.
    """
    known = {name: top1 for of_device in families.START_NETWORKS.values() for name, top1 in of_device.items()}
    best = max(rights, key=lambda name: rights[name].mean())

    def expected(name: str) -> float:
        """Return the difference to the most accurate one in percentage points."""
        difference, error = _difference(rights[name], rights[best], groups)
        if not (name in known and best in known):
            return difference
        weight = 1 / (1 + (error / SPREAD) ** 2)
        return weight * difference + (1 - weight) * TRANSFER * (known[name] - known[best])

    racing = [name for name in rights if not _is_behind(name, rights, [*rights], groups)]
    return max(racing, key=lambda name: (expected(name), -ms[name]))


def _probed(plan: Plan, name: str, places: Sequence[int]) -> tuple[ProbedNetwork | None, np.ndarray, list[str] | None]:
    """Return the result of a candidate on some training images, and whether the prediction of each is correct, with
    its group; None for the result if the images do not suffice for cross-validation."""
    recipe, splits = dataclasses.replace(plan.recipe, model=name, pretrained=True), plan.splits
    network = build_model(recipe, len(splits.classes)).to(plan.runtime.device)
    if not has_classifiers(network):
        raise UsageError(f"A candidate must end in a linear classifier; {name} does not.")
    images = SourcePart(splits.train, places=places)
    batches = evaluation_batches(images, network, FEATURE_BATCH, recipe.workers, device=plan.runtime.device)
    with Work(f"features of {name}", len(images)) as work:
        heads, labels = read_features(network, batches, plan.runtime, work.advance, is_mirrored=False)
    groups = None if splits.groups is None else [splits.groups[i] for i in places]
    rows = np.concatenate(heads, axis=-1)[:, 0]
    is_right, groups = held_out_right(rows, labels, recipe.seed, groups)
    right = is_right.astype(float)
    if not right.size:
        return None, right, None
    count = int(right.sum())
    accuracy = accuracy_of(count, right.size) if groups is None else accuracy_in_groups(right, groups)
    ms = 1000 * _seconds(fastest(network, plan.runtime.device), plan.runtime)
    return ProbedNetwork(name, right.size, accuracy, ms, licence_of(name)), right, groups


def _difference(right: np.ndarray, other: np.ndarray, groups: Sequence[str] | None) -> tuple[float, float]:
    """Return the difference of two accuracies in percentage points, and its standard error by groups of images."""
    differences = 100 * (right - other)
    numbers = np.arange(len(differences)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums, sizes = np.bincount(numbers, differences), np.bincount(numbers)
    deviations = np.square(sums - differences.mean() * sizes).sum()
    error = math.sqrt(deviations * len(sizes) / max(len(sizes) - 1, 1)) / len(differences)
    return float(differences.mean()), error


def _seconds(network: torch.nn.Module, runtime: Runtime) -> float:
    """Return the shortest time of a forward pass of one image: others include waiting for other processes."""
    image, times = torch.zeros(1, *preprocessing(network)["input_size"]), list[float]()
    for _ in range(TIMINGS):
        start = time.perf_counter()
        infer(network, image, runtime)
        times.append(time.perf_counter() - start)
    return min(times)
