"""Every kind of file gets its one verdict; the data directory stays as it was, to the nanosecond."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import Whole
from tests.data.test_decode import outcome
from tests.data.zoo import ANIMALS, BAD, ELSE, GOOD, Animal, class_folders, digest, settle
from weft.data import ImageDataset, inspect, open_data, open_image
from weft.data.bit_depth import common_range
from weft.data.decode import image_info
from weft.data.source import KeyedSource

NOBODY = 65534


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything; for a while, be someone who may not."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture(scope="module")
def zoo() -> Iterator[Path]:
    """One of each kind in class `a`, a hundred ordinary images around them; open to everybody."""
    with tempfile.TemporaryDirectory(prefix="zoo") as folder:
        root = Path(folder)
        root.chmod(0o755)
        class_folders(root, 50, first_seed=100)
        settle(root / "a", ANIMALS)
        open_data(root, max_bad=1)  # what is imported late is imported now: nobody may not read Python's own folders
        yield root


def test_exactly_the_bad_ones_are_bad_with_their_reasons_and_the_rest_is_counted(zoo):
    with unprivileged():
        inventory = inspect(zoo)
        heads = inspect(zoo, decode=False)
        splits = open_data(zoo, max_bad=0.5, classes=["a", "b"])
    assert {bad.key: bad.reason for bad in inventory.bad} == {f"a/{animal.name}": animal.what for animal in BAD}
    ordinary = {f"{name}/{i:04d}.jpg" for name in "ab" for i in range(50)}
    assert set(inventory.good) == {f"a/{animal.name}" for animal in GOOD} | ordinary
    assert inventory.notes == Counter(note for animal in GOOD for note in animal.what)
    for fate, found in (("ignored", inventory.ignored), ("skipped", inventory.skipped)):
        assert found == Counter(animal.what for animal in ELSE if animal.fate == fate)
    assert inventory.classes_outside == []
    by_pixels = {f"a/{name}" for name in ("bad-checksum.png", "truncated.bmp", "truncated.gif", "truncated.png")}
    assert {bad.key for bad in heads.bad} == {bad.key for bad in inventory.bad} - by_pixels
    assert sorted(splits.train.keys + splits.val.keys) == sorted(inventory.good), "training uses exactly the good ones"
    assert {bad.key for bad in splits.bad} == {bad.key for bad in inventory.bad}


def test_the_tree_is_never_written_to(zoo):
    before = digest(zoo)
    with unprivileged():
        inspect(zoo)
    inspect(zoo)
    splits = open_data(zoo, max_bad=0.5, classes=["a", "b"], follow_links=False)
    for source in (splits.train, splits.val):
        for i in range(len(source)):
            open_image(source.read(i).data, value_range=splits.value_range)
    assert digest(zoo) == before


def test_digest_would_notice(tmp_path):
    class_folders(tmp_path, 2)
    before = digest(tmp_path)
    stamp = os.stat(tmp_path / "a/0000.jpg")
    os.utime(tmp_path / "a/0000.jpg", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert digest(tmp_path) != before


def of_bytes(animals: list[Animal]) -> pytest.MarkDecorator:
    animals = [animal for animal in animals if isinstance(animal.content, bytes)]
    return pytest.mark.parametrize("animal", animals, ids=lambda animal: ascii(animal.name[:20]))


@of_bytes(GOOD)
def test_a_look_the_whole_and_training_agree(animal):
    info = image_info(animal.content)
    value_range = common_range([info.values] if info.values else [])
    image = open_image(animal.content, value_range=value_range)
    assert (info.size, image.mode) == ((image.height, image.width), "RGB")
    assert info.notes == tuple(note for note in animal.what if note != "extension")
    source = KeyedSource(lambda key: animal.content, ["a"], ["it"], [0])
    trained = ImageDataset(source, Whole(), value_range=value_range).__getitems__([(0, 0)])
    np.testing.assert_array_equal(trained.pixels[0], np.asarray(image))


@of_bytes(BAD)
def test_a_look_and_the_whole_refuse_alike(animal):
    assert outcome(animal.content) == animal.what
