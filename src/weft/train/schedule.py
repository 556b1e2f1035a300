"""Learning rate schedules as pure functions of the step.

Three ways to move it (`schedule.update`), for a peak p, a start w, an end m, and a run of T epochs of which W warm up:

step        w + (p - w) x/W for x < W, then m + (p - m) (1 + cos(pi (x - W)/(T - W)))/2, x in epochs, at every step
epoch       w + (p - w) e/W for e < W, then m + (p - m) (1 + cos(pi e/T))/2, e the number of the epoch, from 0
epoch_late  as `epoch`, with e - 1 in place of e and 0 in place of -1

Source: timm's CosineLRScheduler as the released trainings call it (DeiT, CeiT and LeViT step it with the number of the
epoch that has just ended, CvT with that of the next one); the papers name only cosine, warm-up and peak.
"""

from __future__ import annotations

import math

from weft.recipes import Recipe

DEFAULT_LR = 1e-3
REFERENCE_BATCH = 512


def peak_lr(recipe: Recipe) -> float:
    """The highest learning rate of a recipe whose batch size is decided."""
    if recipe.optim.lr_per_512 is not None:
        assert isinstance(recipe.batch_size, int), "an automatic batch size is decided first"
        return recipe.optim.lr_per_512 * recipe.batch_size / REFERENCE_BATCH
    return DEFAULT_LR if recipe.optim.lr is None else recipe.optim.lr


def lr_at(recipe: Recipe, step: int, steps_per_epoch: int, steps: int) -> float:
    """Learning rate of a step.

    Args:
        recipe: schedule, peak and batch size.
        step: from 0.
        steps_per_epoch: steps of a whole epoch.
        steps: of the whole run.
    """
    schedule, peak = recipe.schedule, peak_lr(recipe)
    start, end = min(schedule.warmup_lr, peak), min(schedule.min_lr, peak)
    warmup = min(round(schedule.warmup_epochs * steps_per_epoch), steps // 5)
    if schedule.update == "step":
        place, length = step - warmup, max(steps - 1 - warmup, 1)
    else:
        late = schedule.update == "epoch_late"
        step = max(step // steps_per_epoch - late, 0) * steps_per_epoch
        place, length = step, steps
    if step < warmup:
        return start + (peak - start) * step / warmup
    if schedule.kind == "constant":
        return peak
    return end + (peak - end) * (1 + math.cos(math.pi * min(place / length, 1))) / 2
