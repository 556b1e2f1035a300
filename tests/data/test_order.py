"""Which images a step sees: the same in any number of parts, each once an epoch, in pairs that stay pairs."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from weft.data.order import Order, Share, epochs_of
from weft.data.seeding import epoch_order
from weft.errors import UsageError

LABELS = [0] * 70 + [1] * 25 + [2] * 5
LAYOUTS = [(world, accumulate) for world in (1, 2, 4) for accumulate in (1, 2, 3)]


def order(num_images: int = 100, batch_size: int = 24, **more) -> Order:
    return Order(num_images, batch_size, **{"shuffle": True, "seed": 7, "drop_last": True, **more})


def all_parts(epoch: int, step: int, world: int, accumulate: int, **more) -> list[list]:
    shares = [Share(rank, world, accumulate) for rank in range(world)]
    return [part for share in shares for part in order(share=share, **more).parts(epoch, step)]


@pytest.mark.parametrize(("world", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"repeats": 3}, {"labels": LABELS}], ids=["plain", "repeated", "balanced"])
def test_the_parts_of_a_step_are_the_step(world: int, accumulate: int, options: dict) -> None:
    for step in range(4):
        parts = all_parts(2, step, world, accumulate, **options)
        assert sorted(itertools.chain(*parts)) == sorted(order(**options).keys(2, step))
        assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize(("world", "accumulate"), LAYOUTS)
def test_the_same_images_are_mixed_however_many_parts(world: int, accumulate: int) -> None:
    """Mixup joins a batch with itself turned round."""

    def pairs(parts: list[list]) -> set[frozenset]:
        return {frozenset((part[i], part[-1 - i])) for part in parts for i in range(len(part))}

    assert pairs(all_parts(0, 1, world, accumulate, batch_size=48)) == pairs([order(batch_size=48).keys(0, 1)])


def test_every_image_once_an_epoch_in_the_order_of_the_seed() -> None:
    seen = [index for step in range(4) for _, index, _ in order().keys(3, step)]
    assert seen == epoch_order(100, 7, 3).tolist()[:96]
    assert [key for step in range(4) for key in order(seed=8).keys(3, step)] != seen


def test_repetitions_stand_in_a_row_and_an_epoch_is_no_longer() -> None:
    one = order(repeats=3)
    keys = [key for step in range(one.steps_per_epoch) for key in one.keys(0, step)]
    assert len(keys) == 96
    assert [repetition for _, _, repetition in keys] == [0, 1, 2] * 32
    assert [index for _, index, _ in keys[::3]] == epoch_order(100, 7, 0).tolist()[:32]


def test_repetitions_go_to_different_processes() -> None:
    for part in all_parts(0, 0, 3, 1, repeats=3):
        assert len({index for _, index, _ in part}) == len(part)


def test_an_evaluation_sees_all_in_order_and_the_rest() -> None:
    one = Order(10, 4, shuffle=False)
    assert [[index for _, index, _ in one.keys(5, step)] for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    parts = [
        index
        for rank in range(3)
        for step in range(3)
        for part in Order(10, 4, shuffle=False, share=Share(rank, 3)).parts(0, step)
        for _, index, _ in part
    ]
    assert sorted(parts) == list(range(10))


def test_steps_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match=r"24 is not by 5 processes x accumulate 1"):
        order(share=Share(0, 5, 1))
    with pytest.raises(UsageError, match=r"24 is not by 1 process x accumulate 7"):
        order(share=Share(0, 1, 7))
    with pytest.raises(UsageError, match="20 images do not fill one of 24"):
        order(20)


def test_epochs_of() -> None:
    assert [epochs_of(steps, 10) for steps in (1, 10, 11, 20)] == [1, 1, 2, 2]


@pytest.mark.parametrize("repeats", [1, 2])
def test_balanced_order_draws_every_class_equally_often(repeats: int) -> None:
    balanced = order(batch_size=20, labels=LABELS, repeats=repeats)
    epochs = [[key for step in range(5) for key in balanced.keys(epoch, step)] for epoch in range(3)]
    for keys in epochs:
        assert len(set(keys)) == 100, "the same image has another augmentation each time"
        counts = Counter(LABELS[index] for _, index, _ in keys)
        assert max(counts.values()) - min(counts.values()) <= repeats
        if repeats == 1:
            assert {index for _, index, _ in keys if LABELS[index] > 0} == set(range(70, 100))
    assert len({frozenset(index for _, index, _ in keys) for keys in epochs}) == 3, "other parts of the large class"


def test_balanced_order_of_equal_classes_uses_every_image() -> None:
    equal = order(batch_size=10, labels=[0, 1] * 50)
    assert sorted(key for step in range(10) for key in equal.keys(0, step)) == [(0, index, 0) for index in range(100)]
