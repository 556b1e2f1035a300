"""The check of a dataset: what passes it can be trained on, and it takes few bytes per image."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

from tests.data import fuzz
from tests.data.pictures import encoded, photo
from weft.data import ImageDataset, Inventory, eval_transform, make_loader, open_data, train_transform
from weft.data.inventory import check_images


def test_damaged_files_that_pass_the_check_are_trained_and_evaluated_on(tmp_path):
    for index in range(300):
        folder = tmp_path / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index:03}.jpg").write_bytes(fuzz.mutant(index))
    splits = open_data(tmp_path, max_bad=1.0)
    assert len(splits.train) > 50
    assert len(splits.bad) > 50
    cfg = dict(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
    varied = train_transform(16, (0.5,) * 3, (0.5,) * 3, rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.25)
    for source in (splits.train, splits.val):
        for transform, at_least in ((varied, 32), (eval_transform(cfg), None)):
            dataset = ImageDataset(source, transform, at_least=at_least, value_range=splits.value_range)
            count = sum(len(labels) for _, labels in make_loader(dataset, 16, shuffle=True))
            assert count == len(source)


def peak(call: Callable[[], object]) -> int:
    """Bytes at most that a call takes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_image_takes_few_bytes(monkeypatch):
    """1.3 million images of ImageNet must fit next to the training."""
    data = encoded(photo(8, 8), "PNG")

    def opened(number: int) -> int:
        listed = Inventory("many", lambda key: data + key.encode(), {"": ["0", "1"]})
        for i in range(number):
            listed.add(f"n{i % 2:08}/n{i % 2:08}_{i:07}.JPEG", str(i % 2))
        monkeypatch.setattr("weft.data.open.open_digits", lambda: listed)
        return len(open_data("digits").train)

    assert opened(100) == 80  # also imports
    assert peak(lambda: opened(16_000)) - peak(lambda: opened(8_000)) < 400 * 8_000


def test_bad_images_take_no_memory():
    """An error keeps what it was raised with: the bytes of the file, and half of its pixels."""
    whole = encoded(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8), "PNG")
    inventory = Inventory("many", lambda key: whole[: len(whole) // 2] + key.encode(), {"": ["0"]})
    for i in range(200):
        inventory.add(f"{i}.png", "0")
    check_images(inventory, [0])  # imports
    assert peak(lambda: check_images(inventory, range(200))) < 40 * len(whole)
    assert len(inventory.bad) == 201
