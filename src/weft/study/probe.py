"""Estimate how long the training of a model takes, and how much memory, from a few small steps in this process."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.bench.cost import cost
from weft.data import Splits
from weft.memory import release_memory
from weft.models.contract import preprocessing
from weft.progress import quietly
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.loop import Learner
from weft.train.network import build_model
from weft.train.plan import Plan, open_splits
from weft.train.timing import find_precision

STEP_MACS = 16e9  # multiply-adds of a forward pass, which limit the batch size of a probe
BATCH_SIZES = (4, 64)  # smallest and largest, both even, as mixup requires
STEPS, SECONDS = 3, 3.0  # steps that are timed, and the time after which no further one begins
PROCESS_BYTES = 5e8  # memory of a training process without network and activations


class Probe(NamedTuple):
    """Estimated cost of training a model.

    Attributes:
        image: seconds per training image, with its reading and augmentation.
        memory: bytes of memory at the batch size of the recipe.
        batch_size: that batch size.
    """

    image: float
    memory: float
    batch_size: int


def probe(recipe: Recipe, macs: float, splits: Splits | None = None, threads: int | None = None) -> Probe:
    """Train a network of random weights for a few steps on small batches, and estimate its cost.

    Args:
        recipe: complete, as `weft.train.plan.fill_in` returns it.
        macs: multiply-adds of the network, by `macs_of`.
        splits: the dataset; None to read a part of it.
        threads: CPU threads of a training run; None for torch's number.

    Raises:
        WeftError: the network cannot be trained with this recipe.
    """
    wanted = recipe.batch_size if isinstance(recipe.batch_size, int) else BATCH_SIZES[1]
    size = min(wanted, max(BATCH_SIZES[0], min(BATCH_SIZES[1], int(STEP_MACS / macs) // 2 * 2)))
    small = dataclasses.replace(
        recipe, batch_size=size, accumulate=1, workers=0, pretrained=False, start_from=None, compile=False
    )
    if splits is None:
        limited = dataclasses.replace(small.data, limit=min(small.data.limit or 2 * size, 2 * size))
        with quietly():
            splits = open_splits(dataclasses.replace(small, data=limited))
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        runtime = Runtime.of(recipe.device, recipe.precision)
        if recipe.precision == "auto":
            runtime, _ = find_precision(small, len(splits.classes), runtime)
        plan = Plan(dataclasses.replace(small, precision=runtime.precision), splits, runtime)
        learner = plan.learner()
        waited, computed, saved = _timed(plan, learner)
    finally:
        torch.set_num_threads(before)
        release_memory()
    state = 4 + (learner.ema is not None)  # weights, gradients, two averages of the optimizer, average of the weights
    params = sum(weight.numel() * weight.element_size() for weight in plan.network.parameters())
    image = max(computed, waited / recipe.workers) if recipe.workers else computed + waited
    parts = 1 if recipe.accumulate is None else recipe.accumulate
    return Probe(image, PROCESS_BYTES + state * params + saved * wanted / parts, wanted)


def macs_of(recipe: Recipe, num_classes: int) -> float:
    """Return the multiply-adds of the network of a recipe; one billion where they cannot be counted."""
    try:
        with torch.device("meta"):
            model = build_model(dataclasses.replace(recipe, pretrained=False), num_classes)
        channels, *size = preprocessing(model)["input_size"]
        return max(float(cost(model, (size[0], size[1]), channels).macs), 1.0)
    except Exception:  # networks of others may not run on the meta device; the probe shows whether they can be trained
        return 1e9


def _timed(plan: Plan, learner: Learner) -> tuple[float, float, float]:
    """Return, per image, the seconds of waiting for data, the seconds of a step, and the bytes kept for backward."""
    learner.set_train_mode()
    size, saved = plan.batches.order.batch_size, 0.0
    waits, times = list[float](), list[float]()
    began = start = time.perf_counter()
    for parts, keys in _steps(plan):
        ready = time.perf_counter()
        if saved:
            learner.train_step(parts, keys)
            waits.append(ready - start)
            times.append(time.perf_counter() - ready)
        else:  # the first step, which warms up
            with _saved_bytes(plan.network.parameters()) as saved_bytes:
                learner.train_step(parts, keys)
            saved = float(max(saved_bytes(), 1))
        if len(times) >= STEPS or (times and time.perf_counter() - began > SECONDS):
            break
        start = time.perf_counter()
    return sum(waits) / len(waits) / size, sum(times) / len(times) / size, saved / size


def _steps(plan: Plan) -> Iterator[Any]:
    """Yield steps without end, over as many epochs as needed."""
    for epoch in itertools.count():
        yield from plan.training_steps(epoch)


@contextmanager
def _saved_bytes(weights: Iterator[Tensor]) -> Iterator[Callable[[], int]]:
    """Count the bytes of the tensors that a forward pass saves for the backward pass, except the weights."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(saved.values())
