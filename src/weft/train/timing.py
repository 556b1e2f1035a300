"""Time training steps, and choose by them what is left to the machine: batch size and precision."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from weft.data.order import Key
from weft.machine.memory import is_out_of_memory
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.recipes import Recipe
from weft.train.distillation import is_cached, untrained_teacher
from weft.train.loop import Batch, Learner
from weft.train.network import build_model

BATCH_SIZES = tuple(2**power for power in range(3, 13))
NEAR_BEST = 0.95  # of the highest throughput
MAX_STEP_S = 10.0  # after a step that takes longer, no other and no larger batch is tried
LARGEST = 64  # images of a step that is timed for the precision
GAIN = 1.05  # of bf16 over fp32 in the time of a step, from which it is chosen


Item = TypeVar("Item")
Step = tuple[Sequence[Batch], Sequence[Sequence[Key]]]
"""Micro-batches of a training step, and the keys of their images."""


def step_times(learner: Learner, steps: Iterable[Step]) -> Iterator[tuple[float, float]]:
    """Run training steps; yield for each the seconds of waiting for its data, and those of the step."""
    learner.set_train_mode()
    yield from timed(lambda step: learner.train_step(*step), steps)


def timed(work: Callable[[Item], object], items: Iterable[Item]) -> Iterator[tuple[float, float]]:
    """Call a function with every item; yield the seconds of waiting for the item, and those of the function."""
    start = time.perf_counter()
    for item in items:
        ready = time.perf_counter()
        work(item)
        now = time.perf_counter()
        yield ready - start, now - ready
        start = time.perf_counter()


def time_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime, *, with_teacher: bool = False) -> float:
    """Return the seconds of a training step on random images, of the slowest process; infinite without enough memory.

    Args:
        recipe: what to train; its weights are not loaded.
        size: images per device and micro-batch.
        num_classes: number of classes.
        runtime: device, precision and processes.
        with_teacher: include the forward pass of the teacher of the recipe, if it has one.
    """
    return max(runtime.gather(_seconds(recipe, size, num_classes, runtime, with_teacher=with_teacher)))


def _seconds(recipe: Recipe, size: int, num_classes: int, runtime: Runtime, *, with_teacher: bool) -> float:
    """Time a step of this process, without the others: memory may suffice in some of them only."""
    try:
        trial = dataclasses.replace(recipe, batch_size=size * runtime.world * recipe.accumulate, pretrained=False)
        model = build_model(trial, num_classes).to(runtime.device)
        # memory for the copies of the gradients that DDP exchanges
        buckets = [torch.empty_like(weight) for weight in model.parameters()] if runtime.world > 1 else []
        runtime = runtime.alone()
        teacher = untrained_teacher(recipe, model, num_classes, runtime) if with_teacher else None
        trial = dataclasses.replace(trial, compile=False)
        learner = Learner(model, trial, runtime, 10, 10, num_classes, teacher=teacher)
        shape = preprocessing(model)["input_size"]
        batch = (
            torch.randn(size, *shape, device=runtime.device),
            torch.zeros(size, dtype=torch.int64).to(runtime.device),
        )
        times = []
        for _, seconds in step_times(learner, itertools.repeat(([batch] * recipe.accumulate, ()), 3)):
            times.append(seconds / recipe.accumulate)
            if times[-1] > MAX_STEP_S:
                break
        del buckets
        return min(times)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):  # an illegal memory access is not
            raise
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return math.inf


def find_batch_size(recipe: Recipe, num_classes: int, num_images: int, runtime: Runtime) -> tuple[int, str]:
    """Find a number of images per step, for all devices together.

    On a GPU it is the largest power of two that fits and is fast; on a CPU the smallest of nearly the highest
    throughput, since larger batches gain nothing there.

    Returns:
        The batch size, and a sentence that gives the reason.
    """
    parts = runtime.world * recipe.accumulate
    pairs = 2 if recipe.augment.mixup or recipe.augment.cutmix else 1
    smallest = max(num_images // parts // pairs, 1) * pairs
    sizes = [size for size in BATCH_SIZES if size * parts <= num_images] or [smallest]
    speeds: dict[int, float] = {}
    with_teacher = recipe.distill.teacher is not None and not is_cached(recipe)
    for size in sizes:
        seconds = time_step(recipe, size, num_classes, runtime, with_teacher=with_teacher)
        if math.isinf(seconds):
            break
        speeds[size] = size / seconds
        is_slower = size >= 4 * max(speeds, key=lambda known: speeds[known])
        if seconds > MAX_STEP_S or (runtime.device.type == "cpu" and is_slower):
            break
    best = max(speeds.values(), default=0.0)
    fast = [size for size in speeds if speeds[size] >= NEAR_BEST * best] or sizes[:1]
    on_gpu = runtime.device.type == "cuda"
    each = max(fast) if on_gpu else min(fast)
    reason = "the largest that fits and is fast" if on_gpu else "the smallest of nearly the highest throughput"
    reason += ", with the teacher" if with_teacher else ""
    return each * parts, f"Batch size {each * parts}: {each} per device, {reason}; another: --batch-size N."


def find_precision(recipe: Recipe, num_classes: int, runtime: Runtime) -> tuple[Runtime, str]:
    """Choose between fp32 and bf16 on a machine with instructions for bf16, by the time of a training step.

    A network may have operations that are slow in bf16: the gradient of strided depthwise convolutions, for example,
    takes ten times as long as in fp32.

    Args:
        recipe: what to train, with its batch size; its weights are not loaded.
        num_classes: number of classes.
        runtime: with the precision that `weft.machine.runtime.fastest_precision` found.

    Returns:
        The runtime with the chosen precision, and a sentence that gives the reason.
    """
    text = "chosen for this machine"
    if runtime.precision == "fp32" or recipe.epochs == 0:
        return runtime, f"Precision: {runtime.precision}, {text}."
    assert isinstance(recipe.batch_size, int)
    size = min(max(recipe.batch_size // (runtime.world * recipe.accumulate), 1), LARGEST)
    seconds: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        own = dataclasses.replace(runtime, precision=precision)
        seconds[precision] = time_step(recipe, size, num_classes, own)
    chosen = "bf16" if seconds["bf16"] * GAIN <= seconds["fp32"] else "fp32"
    reason = f"a step takes {1e3 * seconds['bf16']:.0f} ms in bf16 and {1e3 * seconds['fp32']:.0f} ms in fp32"
    return dataclasses.replace(runtime, precision=chosen), f"Precision: {chosen}, {text}: {reason}."
