"""Samples and their order are functions of (seed, epoch, index): workers, processes and the past do not matter."""

from __future__ import annotations

import gc
import multiprocessing
import random
import re
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

from tests.data.pictures import bomb, jpeg
from tests.data.zoo import GOOD, class_folders
from weft.data import (
    ImageDataset,
    Sample,
    eval_transform,
    make_loader,
    mix_seed,
    open_data,
    open_image,
    train_transform,
)
from weft.data.bit_depth import common_range
from weft.data.decode import image_info
from weft.data.seeding import epoch_order, seeded_rng
from weft.errors import DataError, UsageError

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


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.2, 0.3)
VARIED = train_transform(
    64, MEAN, STD, "random", color_jitter=0.3, rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.5, scale=(0.3, 1.0)
)
SOURCE = Memory([jpeg(seed) for seed in range(22)])


def epoch_of(loader, epoch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    loader.dataset.set_epoch(epoch)
    images, labels = zip(*loader, strict=True)
    return list(images), list(labels)


def lost_message(loader) -> str:
    """What a loop over a loader with a lost picture says. (`pytest.raises` would keep its worker processes.)"""
    try:
        list(loader)
    except DataError as err:
        return str(err)
    pytest.fail("nothing was lost")


def assert_same(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(scope="module")
def expected():
    """Three epochs without workers."""
    loader = make_loader(ImageDataset(SOURCE, VARIED, 7), 5, shuffle=True, seed=3, workers=0)
    return [epoch_of(loader, epoch) for epoch in range(3)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bits_do_not_depend_on_workers(expected, workers):
    loader = make_loader(ImageDataset(SOURCE, VARIED, 7), 5, shuffle=True, seed=3, workers=workers)
    for epoch in (0, 1, 2, 1):  # the workers live on; going back is allowed
        assert_same(epoch_of(loader, epoch), expected[epoch])


def test_an_epoch_does_not_depend_on_those_before(expected):
    loader = make_loader(ImageDataset(SOURCE, VARIED, 7), 5, shuffle=True, seed=3)
    assert_same(epoch_of(loader, 2), expected[2])


def test_a_loop_left_early_changes_nothing(expected):
    loader = make_loader(ImageDataset(SOURCE, VARIED, 7), 5, shuffle=True, seed=3, workers=2)
    loader.dataset.set_epoch(0)
    next(iter(loader))
    assert_same(epoch_of(loader, 1), expected[1])


def test_epochs_seeds_and_indices_differ():
    dataset, other = ImageDataset(SOURCE, VARIED, 7), ImageDataset(SOURCE, VARIED, 8)
    variants = [dataset[0, 0][0], dataset[1, 0][0], dataset[0, 1][0], other[0, 0][0]]
    for i, one in enumerate(variants):
        for another in variants[:i]:
            assert not torch.equal(one, another)


def test_the_same_picture_at_another_index_varies_otherwise():
    dataset = ImageDataset(Memory([jpeg(), jpeg()]), VARIED, 0)
    assert not torch.equal(dataset[0][0], dataset[1][0])


def test_an_index_means_the_current_epoch():
    dataset = ImageDataset(SOURCE, VARIED, 7)
    dataset.set_epoch(4)
    assert_same(dataset[2][0], dataset[4, 2][0])


def test_the_models_randomness_is_left_alone():
    dataset = ImageDataset(SOURCE, VARIED, 7)

    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = drawn(), drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = drawn()
    for _ in make_loader(dataset, 5, shuffle=True, workers=2):
        pass
    for _ in make_loader(dataset, 5, shuffle=True, workers=0):
        pass
    assert (first, drawn()) == undisturbed


def test_randomness_is_given_back_after_an_error():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError), seeded_rng(1):
        torch.rand(9).sum().item() / 0
    assert_same(torch.rand(3), expected)


def test_streams_are_what_they_have_always_been():
    """A change here changes every run: it must be meant."""
    assert mix_seed(0, 1, 2) == 9095025346080962411
    assert epoch_order(8, 0, 0) == [0, 1, 4, 2, 7, 3, 6, 5]
    with seeded_rng(0, 1, 2):
        drawn = random.random(), np.random.random(), torch.rand(()).item()
    assert drawn == pytest.approx((0.15191521726172474, 0.051474827310740046, 0.3178858160972595), abs=1e-12)


@pytest.mark.parametrize("num_samples", [1, 2, 100, 1001])
def test_every_epoch_is_a_permutation(num_samples):
    orders = [epoch_order(num_samples, 0, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(num_samples)) for order in orders)
    if num_samples > 2:
        assert orders[0] != orders[1]
        assert epoch_order(num_samples, 1, 0) != orders[0]


def test_orders_are_even():
    """Over many epochs every sample comes first about equally often (chi-squared, 9 degrees of freedom, p of 1e-6)."""
    first = np.bincount([epoch_order(10, 0, epoch)[0] for epoch in range(5000)], minlength=10)
    assert ((first - 500) ** 2 / 500).sum() < 45.1


def test_batches_in_order_without_shuffling():
    plain = ImageDataset(SOURCE, eval_transform({"input_size": (3, 24, 24), "crop_pct": 1.0}))
    loader = make_loader(plain, 5, shuffle=False)
    assert len(loader) == 5
    images, labels = epoch_of(loader, 0)
    assert [len(batch) for batch in images] == [5, 5, 5, 5, 2]
    assert torch.cat(labels).tolist() == SOURCE.labels
    assert_same(torch.cat(images)[13], plain[13][0])


def test_a_last_batch_that_is_not_full_may_be_dropped():
    loader = make_loader(ImageDataset(SOURCE, VARIED), 5, shuffle=True, drop_last=True)
    assert len(loader) == len(list(loader)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1 and workers at least 0; got 0 and 0"),
        ({"batch_size": 2, "workers": -1}, r"got 2 and -1"),
        (
            {"batch_size": 23, "drop_last": True},
            r"at least one batch; 22 images do not fill one of 23\. Lower batch_size",
        ),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(UsageError, match=message):
        make_loader(ImageDataset(SOURCE, VARIED), shuffle=True, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "the file does not exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "the file is truncated"),
        (lambda path: path.write_bytes(b""), r"it is empty \(0 bytes\)"),
        (lambda path: path.write_bytes(b"<html>"), "its content is none of JPEG"),
        (lambda path: (path.unlink(), path.mkdir()), "it must be a regular file"),
    ],
    ids=["vanished", "truncated", "emptied", "replaced", "folder"],
)
def test_a_picture_that_goes_bad_stops_training_in_one_line(tmp_path, workers, spoil, reason, monkeypatch):
    splits = open_data(class_folders(tmp_path, 10))
    loader = make_loader(ImageDataset(splits.train, VARIED), 4, shuffle=True, workers=workers)
    epoch_of(loader, 0)
    key = splits.train.read(9).key
    spoil(tmp_path / key)
    expected = (
        rf"{key} cannot be used: {reason}[^\n]* It could be read when the data was opened: "
        r"restore it, or start again[^\n]*"
    )
    terminated = []  # torch waits five seconds for a worker, then terminates it
    monkeypatch.setattr(BaseProcess, "terminate", lambda process: terminated.append(process.pid))
    assert re.fullmatch(expected, lost_message(loader))
    del loader
    gc.collect()
    assert not terminated
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("animal", [a for a in GOOD if isinstance(a.content, bytes)], ids=lambda a: ascii(a.name[:20]))
def test_every_path_sees_the_pixels_of_open_image(animal):
    values = image_info(animal.content).values
    value_range = None if values is None else common_range([values])
    image = open_image(animal.content, value_range=value_range)
    seen = []
    source = Memory([animal.content])
    ImageDataset(source, lambda picture: seen.append(picture) or torch.zeros(1), value_range=value_range)[0]
    np.testing.assert_array_equal(np.asarray(seen[0]), np.asarray(image))


def test_the_limit_on_pixels_holds_in_training():
    with pytest.raises(DataError, match=r"memory/0 cannot be used: it has too many pixels .*the limit is 100000000"):
        ImageDataset(Memory([bomb(14_000)]), VARIED)[0]
