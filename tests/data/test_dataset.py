"""Samples and their order are functions of (seed, epoch, index): workers, processes and the past do not matter."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tracemalloc
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

from tests.data.pictures import bomb, jpeg
from tests.data.zoo import class_folders
from weft.data import (
    ImageDataset,
    Sample,
    eval_transform,
    image_size_hint,
    loader,
    make_loader,
    mix_seed,
    open_data,
    train_transform,
)
from weft.data.seeding import epoch_order, seeded_rng
from weft.data.source import KeyedSource
from weft.errors import DataError, UsageError
from weft.inference.inputs import SourcePart

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose


class Memory:
    """A source in memory."""

    def __init__(self, files: list[bytes]):
        self.files, self.classes, self.labels = files, ["a", "b"], [i % 2 for i in range(len(files))]
        self.keys = [f"memory/{i}" for i in range(len(files))]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> Sample:
        return Sample(self.files[i], self.labels[i], self.keys[i])


VARIED = train_transform(
    64, (0.5,) * 3, (0.2,) * 3, "random",
    color_jitter=0.3, rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.5, scale=(0.3, 1.0),
)  # fmt: skip
SOURCE = Memory([jpeg(seed) for seed in range(22)])


def varied_loader(workers: int = 0) -> loader.ImageLoader:
    return make_loader(ImageDataset(SOURCE, VARIED, 7), 5, shuffle=True, seed=3, workers=workers)


def epoch_of(loader, epoch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    loader.start_at(epoch)
    images, labels = zip(*loader, strict=True)
    return list(images), list(labels)


def assert_same(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(scope="module")
def expected():
    """Three epochs without workers."""
    loader = varied_loader()
    return [epoch_of(loader, epoch) for epoch in range(3)]


@pytest.mark.parametrize("workers", [1, 3])
def test_bits_do_not_depend_on_workers(expected, workers):
    loader = varied_loader(workers)
    for epoch in (0, 1, 2, 1):  # the workers live on; going back is allowed
        assert_same(epoch_of(loader, epoch), expected[epoch])


@pytest.mark.slow_except("fork")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_any_start_method_give_the_same_and_leave_the_process_group(method, expected):
    """Methods of Linux, of macOS and Windows, and of Python 3.14. Ctrl-C and `timeout` signal a process group."""
    loader = varied_loader(1)
    loader.multiprocessing_context = method
    loader.timeout = 600  # on a busy machine a new process imports torch for minutes
    assert_same(epoch_of(loader, 2), expected[2])
    (worker,) = loader._iterator._workers
    assert os.getpgid(worker.pid) == worker.pid
    worker.terminate()
    worker.join(60)
    assert worker.exitcode in (0, -signal.SIGTERM)


def test_a_worker_without_process_groups_ignores_an_interrupt(monkeypatch):
    monkeypatch.delattr(os, "setsid")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        loader._leave_process_group(0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])


TO_SEND: list[int] = []  # signals to this process, each within a fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), TO_SEND.pop()) if TO_SEND else None)


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="workers are not forked")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_workers_start_is_not_lost(name):
    """Python ignores what a handler raises within a fork: the program would go on."""
    number = getattr(signal, name)

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(number, leave)
    try:
        TO_SEND.append(number)
        with pytest.raises(SystemExit, match=str(128 + number)):
            epoch_of(varied_loader(2), 0)
    finally:
        TO_SEND.clear()
        signal.signal(number, before)


def test_an_epoch_that_was_left_early_changes_no_other(expected):
    loader = varied_loader(2)
    loader.start_at(0)
    next(iter(loader))
    assert_same(epoch_of(loader, 1), expected[1])


def test_epochs_seeds_and_indices_differ_also_for_the_same_image():
    dataset, other = (ImageDataset(Memory([jpeg(), jpeg()]), VARIED, seed) for seed in (7, 8))
    variants = [dataset[0, 0][0], dataset[1, 0][0], dataset[0, 1][0], other[0, 0][0]]
    assert len({image.numpy().tobytes() for image in variants}) == 4
    dataset.set_epoch(4)
    assert_same(dataset[1][0], dataset[4, 1][0])


def test_the_models_randomness_is_left_alone():
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = drawn(), drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = drawn()
    for workers in (0, 2):
        epoch_of(varied_loader(workers), 0)
    with pytest.raises(ZeroDivisionError), seeded_rng(1):
        torch.rand(9).sum().item() / 0
    assert (first, drawn()) == undisturbed


def test_streams_are_what_they_have_always_been():
    """A change here changes every run: it must be meant."""
    assert mix_seed(0, 1, 2) == 9095025346080962411
    assert epoch_order(8, 0, 0).tolist() == [0, 1, 4, 2, 7, 3, 6, 5]
    with seeded_rng(0, 1, 2):
        drawn = random.random(), np.random.random(), torch.rand(()).item()
    assert drawn == pytest.approx((0.15191521726172474, 0.051474827310740046, 0.3178858160972595), abs=1e-12)


def test_the_order_of_an_epoch_is_a_permutation_of_its_seed():
    orders = {(seed, epoch): epoch_order(10, seed, epoch).tolist() for seed in range(2) for epoch in range(100)}
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    assert len(set(map(tuple, orders.values()))) == 200
    assert {order[0] for order in orders.values()} == set(range(10))


def test_without_shuffling_the_batches_are_those_of_the_dataset():
    plain = ImageDataset(SOURCE, eval_transform({"input_size": (3, 24, 24), "crop_pct": 1.0}))
    images, labels = epoch_of(make_loader(plain, 5, shuffle=False), 0)
    assert torch.cat(labels).tolist() == SOURCE.labels
    assert_same(torch.cat(images)[13], plain[13][0])


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 2, "workers": -1}])
def test_numbers_out_of_range(options):
    with pytest.raises(UsageError, match=r"batch_size must be at least 1 and workers at least 0; got \d and (0|-1)"):
        make_loader(ImageDataset(SOURCE, VARIED), shuffle=True, **options)


SPOILT = {
    "vanished": (lambda path: path.unlink(), "the file does not exist"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:500]), "the file is truncated"),
}


def lost_message(loader) -> str:
    """What a loop over a loader with a lost image says. (`pytest.raises` would keep its worker processes.)"""
    try:
        list(loader)
    except DataError as err:
        return str(err)
    pytest.fail("nothing was lost")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", SPOILT)
def test_an_image_that_goes_bad_stops_training_in_one_line(tmp_path, how, workers, monkeypatch):
    spoil, reason = SPOILT[how]
    splits = open_data(class_folders(tmp_path, 10))
    loader = make_loader(ImageDataset(splits.train, VARIED), 4, shuffle=True, workers=workers)
    epoch_of(loader, 0)
    key = splits.train.keys[9]
    spoil(tmp_path / key)
    terminated = []  # torch waits five seconds for a worker, then terminates it
    monkeypatch.setattr(BaseProcess, "terminate", lambda process: terminated.append(process.pid))
    again = r"It passed the check when the data was opened: restore it, or start again"
    assert re.fullmatch(rf"{key} cannot be used: {reason}[^\n]* {again}[^\n]*", lost_message(loader))
    del loader
    gc.collect()
    assert not terminated
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_image_of_the_class_replaces_a_damaged_one(tmp_path, workers):
    """With the same order, labels and random numbers; nothing else changes, for any number of workers and any step."""
    splits = open_data(class_folders(tmp_path, 10), takes_next=True)
    train = splits.train
    before = epoch_of(make_loader(ImageDataset(train, VARIED), 4, shuffle=False), 0)
    of_a = [key for key in train.keys if key.startswith("a/")]
    for key in (of_a[1], of_a[2], of_a[-1]):
        (tmp_path / key).write_bytes(b"<html>")
    loader = make_loader(ImageDataset(train, VARIED), 4, shuffle=False, workers=workers)
    after = epoch_of(loader, 0)
    places = [train.keys.index(key) for key in (of_a[1], of_a[2], of_a[-1])]
    assert loader.damaged == set(places)
    (images, labels), (old_images, old_labels) = (map(torch.cat, parts) for parts in (after, before))
    assert torch.equal(labels, old_labels)
    changed = (images != old_images).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == places
    loader.start_at(0, step=1)
    assert torch.equal(next(iter(loader))[0], after[0][1])
    part = SourcePart(train, splits.val, places=[places[1]])  # the next image of the class is not in the part
    assert ImageDataset(part, VARIED)[0][0].shape == images[0].shape
    for key in of_a:
        (tmp_path / key).unlink(missing_ok=True)
    with pytest.raises(DataError, match=rf"{of_a[0]} cannot be used: the file does not exist"):
        ImageDataset(train, VARIED)[0]


def test_an_image_that_is_not_damaged_needs_no_other_one():
    """Not even a list of them, which has a million numbers for ImageNet."""
    source = KeyedSource(lambda key: jpeg(3), ["a"], ["x.jpg"] * 1_000_000, [0] * 1_000_000, takes_next=True)
    dataset = ImageDataset(source, VARIED)
    assert dataset[1][1] == 0  # imports
    tracemalloc.start()
    try:
        assert dataset[2][1] == 0
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_damaged_image_does_not_hide_the_size_of_the_others(tmp_path):
    data = class_folders(tmp_path, 5)
    for path in sorted(data.glob("a/*"))[:2]:
        path.write_bytes(b"")
    sizes = image_size_hint(open_data(data, check="none", takes_next=True).train)
    assert sizes == image_size_hint(open_data(data, max_bad=1).train)
    with pytest.raises(DataError, match=r"it is empty \(0 bytes\).*data\.damaged=next"):
        image_size_hint(open_data(data, check="none", takes_next=False).train)
    with pytest.raises(DataError, match=r"without it\.$"):  # of images that are not for training
        image_size_hint(open_data(data, check="none").train)


def test_the_limit_on_pixels_holds_in_training():
    with pytest.raises(DataError, match=r"memory/0 cannot be used: it has too many pixels .*the limit is 100000000"):
        ImageDataset(Memory([bomb(14_000)]), VARIED)[0]
