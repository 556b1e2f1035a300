"""The learning rate: the papers' cosine, and what the released code makes of it."""

from __future__ import annotations

import pytest
from timm.scheduler import CosineLRScheduler
from torch import nn, optim

from tests.train.tiny import recipe_of as recipe
from weft.recipes import Recipe
from weft.train.schedule import lr_at, peak_lr


def rates(recipe: Recipe, steps_per_epoch: int, steps: int) -> list[float]:
    return [lr_at(recipe, step, steps_per_epoch, steps) for step in range(steps)]


def test_warm_up_then_half_a_cosine() -> None:
    lrs = rates(recipe(optim__lr=1.0, schedule__warmup_epochs=1, schedule__min_lr=0.1), 10, 100)
    assert lrs[0] == pytest.approx(1e-6)
    assert lrs[5] == pytest.approx(0.5, abs=1e-5)  # half of the warm-up
    assert lrs[10] == pytest.approx(1.0)  # its end
    assert lrs[55] == pytest.approx(0.55, abs=0.01)  # half of the cosine: the mean of 1 and 0.1
    assert lrs[99] == pytest.approx(0.1)
    assert lrs[10:] == sorted(lrs[10:], reverse=True)


def test_constant_after_the_warm_up() -> None:
    for epochs in (0, 1):
        lrs = rates(recipe(optim__lr=0.2, schedule__kind="constant", schedule__warmup_epochs=epochs), 5, 50)
        assert lrs[: 5 * epochs] == sorted(lrs[: 5 * epochs])
        assert set(lrs[5 * epochs :]) == {0.2}


def test_a_short_run_warms_up_for_a_fifth() -> None:
    lrs = rates(recipe(optim__lr=1.0, schedule__warmup_epochs=50), 10, 10)
    assert lrs.index(max(lrs)) == 2
    assert rates(recipe(optim__lr=1.0), 1, 1) == [1.0]


@pytest.mark.parametrize(("update", "late"), [("epoch", 0), ("epoch_late", 1)])
def test_once_an_epoch_as_the_released_code(update: str, late: int) -> None:
    """Against timm's scheduler, stepped as CvT's and as DeiT's released loops step it."""
    epochs, lrs = 30, []
    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=1e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    for epoch in range(epochs):
        lrs.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1 - late)
    ours = recipe(optim__lr=1e-3, schedule__warmup_epochs=5, schedule__update=update)
    assert rates(ours, 7, 7 * epochs)[::7] == pytest.approx(lrs)
    if late:
        assert lrs[:2] == [1e-6, 1e-6]  # the first two epochs


def test_the_rate_of_512_images() -> None:
    assert peak_lr(recipe(optim__lr_per_512=5e-4, batch_size=1024)) == pytest.approx(1e-3)
    assert peak_lr(recipe(optim__lr=3e-4, batch_size=1024)) == 3e-4
    assert peak_lr(recipe()) == 1e-3
