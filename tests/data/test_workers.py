"""Without a number of workers, the first batches decide how many read; the bits stay the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable

import pytest
import torch

from tests.data.test_dataset import SOURCE, VARIED
from weft.data import ImageDataset, make_loader, workers
from weft.data.loader import ImageLoader
from weft.data.order import Share
from weft.data.workers import Pace


def measured(loading: float, working: float) -> Pace:
    pace = Pace()
    for _ in range(1 + workers.MEASURED):
        pace.add(loading, working)
    return pace


@pytest.mark.parametrize(
    ("cores", "ranks", "loading", "working", "on_cpu", "expected"),
    [
        (16, 1, 4.0, 1.0, False, 5),  # a quarter more than four times as many
        (16, 1, 90.0, 1.0, False, 15),  # one core gives the GPU its work
        (16, 8, 90.0, 1.0, False, 1),
        (16, 1, 1.0, 9.0, False, 0),  # no gain
        (1, 1, 9.0, 1.0, True, 0),
        (2, 1, 9.0, 1.0, True, 2),
        (8, 1, 1.0, 1.0, True, 3),  # the steps take longer by what the processes take from them
        (8, 1, 1.0, 9.0, True, 0),
    ],
)
def test_the_number_that_loads_in_time(cores, ranks, loading, working, on_cpu, expected, monkeypatch):
    monkeypatch.setattr(workers, "available_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert measured(loading, working).workers(on_cpu=on_cpu) == expected


def test_the_first_batch_and_short_times_do_not_count():
    pace = Pace()
    pace.add(100.0, 0.0)
    assert not pace.is_known
    for _ in range(workers.MEASURED):
        assert not pace.is_known
        pace.add(workers.START_S / workers.MEASURED, 1.0)
    assert pace.is_known
    assert pace.loading == pytest.approx(workers.START_S)
    assert not measured(workers.START_S / 100, 0.0).is_known


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the first batches choose a number of processes."""

    def choose(number: int) -> None:
        monkeypatch.setattr(workers, "START_S", 0.0)
        monkeypatch.setattr(Pace, "workers", lambda self, on_cpu: number)

    return choose


def auto_loader(batch_size: int) -> ImageLoader:
    return make_loader(ImageDataset(SOURCE, VARIED), batch_size, shuffle=False, workers="auto")


def labels_of(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_bits_do_not_depend_on_the_choice(accumulate, choice):
    choice(2)

    def batches(number):
        said = []
        share = Share(accumulate=accumulate)
        loader = make_loader(
            ImageDataset(SOURCE, VARIED, 7), 2, shuffle=True, workers=number, share=share, on_choice=said.append
        )
        found = []
        for epoch, first in ((0, 0), (1, 3), (2, 0)):
            loader.start_at(epoch, first)
            found += [(images.clone(), labels) for images, labels in loader]
        return loader, said, found

    chosen, said, found = batches("auto")
    _, silent, expected = batches(0)
    assert (chosen.num_workers, len(said), silent) == (2, 1, [])
    assert said[0].startswith("Workers: 2 processes read images, since a batch takes ")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_no_process_is_chosen_where_it_would_run_a_script_again(choice, monkeypatch):
    choice(2)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    loader = auto_loader(2)
    assert labels_of(loader) == SOURCE.labels
    assert loader.num_workers == 0


def test_iterations_next_to_each_other_are_whole(choice):
    choice(0)
    loader = auto_loader(2)
    one, other = iter(loader), iter(loader)
    next(one), next(other)
    one.close()
    assert labels_of(other) == labels_of(loader)[2:] == SOURCE.labels[2:]


def test_no_process_starts_for_the_rest_of_a_pass(choice):
    choice(2)
    loader = auto_loader(4)
    assert labels_of(loader) == SOURCE.labels  # 6 batches: most of them are read when it is known
    assert (loader.num_workers, loader.pace is None) == (0, False)


def test_an_evaluation_is_whole_in_every_round(choice):
    """Which starts at no step by itself."""
    choice(0)
    loader = auto_loader(3)
    assert [labels_of(loader) for _ in range(3)] == [SOURCE.labels] * 3
    assert loader.pace is None
