"""Find a batch size that fits the machine, by timing training steps."""

from __future__ import annotations

import dataclasses
import math
import time

import torch

from weft.memory import is_out_of_memory
from weft.models.contract import preprocessing
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.train.distillation import is_cached, untrained_teacher
from weft.train.loop import Learner
from weft.train.network import build_model

BATCH_SIZES = tuple(2**power for power in range(3, 13))
NEAR_BEST = 0.95  # of the highest throughput
MAX_STEP_S = 10.0  # after a step that takes longer, no other and no larger batch is tried


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
        seconds = seconds_of_step(recipe, size, num_classes, runtime, with_teacher=with_teacher)
        seconds = max(runtime.gather(seconds))
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


def seconds_of_step(
    recipe: Recipe, size: int, num_classes: int, runtime: Runtime, *, with_teacher: bool = False
) -> float:
    """Measure a step of this process on random images, in seconds; infinite if memory does not suffice.

    Processes do not wait for each other in the step: memory may suffice in some of them only.

    Args:
        recipe: what to train; its weights are not loaded.
        size: images per device and micro-batch.
        num_classes: number of classes.
        runtime: device, precision and processes.
        with_teacher: include the forward pass of the teacher of the recipe, if it has one.
    """
    try:
        trial = dataclasses.replace(recipe, batch_size=size * runtime.world * recipe.accumulate, pretrained=False)
        model = build_model(trial, num_classes).to(runtime.device)
        # memory for the copies of the gradients that DDP exchanges
        buckets = [torch.empty_like(weight) for weight in model.parameters()] if runtime.world > 1 else []
        runtime = runtime.alone()
        teacher = untrained_teacher(recipe, model, num_classes, runtime) if with_teacher else None
        trial = dataclasses.replace(trial, compile=False)
        learner = Learner(model, trial, runtime, 10, 10, num_classes, teacher=teacher)
        learner.set_train_mode()
        shape = preprocessing(model)["input_size"]
        batch = (
            torch.randn(size, *shape, device=runtime.device),
            torch.zeros(size, dtype=torch.int64).to(runtime.device),
        )
        times = []
        for _ in range(3):
            start = time.perf_counter()
            learner.train_step([batch] * recipe.accumulate)
            times.append((time.perf_counter() - start) / recipe.accumulate)
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
