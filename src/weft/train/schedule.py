"""Learning rate schedules as pure functions of the step.

The setting `schedule.update` selects one of three forms. With peak rate p, initial rate w, final rate m, T epochs in
all and W epochs of warm-up:

step        w + (p - w) x/W for x < W, then m + (p - m) (1 + cos(pi (x - W)/(T - W)))/2, x in epochs, at every step
epoch       w + (p - w) e/W for e < W, then m + (p - m) (1 + cos(pi e/T))/2, e the index of the epoch, from 0
epoch_late  as `epoch`, with max(e - 1, 0) instead of e

Source: timm's CosineLRScheduler as the released training code calls it: DeiT, CeiT and LeViT pass the index of the
epoch that has just ended, CvT that of the next one. The papers only state cosine, warm-up and peak.
"""

from __future__ import annotations

import math

from weft.recipes import Recipe

DEFAULT_LR = 1e-3
REFERENCE_BATCH = 512


def peak_lr(recipe: Recipe) -> float:
    """Return the peak learning rate of a recipe whose batch size is decided."""
    if recipe.optim.lr_per_512 is not None:
        assert isinstance(recipe.batch_size, int), "an automatic batch size is decided first"
        return recipe.optim.lr_per_512 * recipe.batch_size / REFERENCE_BATCH
    return DEFAULT_LR if recipe.optim.lr is None else recipe.optim.lr


def lr_at(recipe: Recipe, step: int, steps_per_epoch: int, steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        recipe: schedule, peak rate and batch size.
        step: index of the step, from 0.
        steps_per_epoch: number of steps of a full epoch.
        steps: number of steps of the whole run.
    """
    schedule, peak = recipe.schedule, peak_lr(recipe)
    start, end = min(schedule.warmup_lr, peak), min(schedule.min_lr, peak)
    warmup = min(round(schedule.warmup_epochs * steps_per_epoch), steps // 5)
    if schedule.update == "step":
        position, length = step - warmup, max(steps - 1 - warmup, 1)
    else:
        is_late = schedule.update == "epoch_late"
        step = max(step // steps_per_epoch - is_late, 0) * steps_per_epoch
        position, length = step, steps
    if step < warmup:
        return start + (peak - start) * step / warmup
    if schedule.kind == "constant":
        return peak
    return end + (peak - end) * (1 + math.cos(math.pi * min(position / length, 1))) / 2
