"""Every kind of file gets its one verdict; the data directory stays as it was, to the nanosecond."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.zoo import ANIMALS, BAD, ELSE, GOOD, class_folders, digest, settle
from weft.data import inspect, open_data, open_image
from weft.data.bit_depth import common_range
from weft.data.decode import image_info
from weft.errors import DataError

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
    """One of each kind in class `a`, a hundred ordinary pictures around them; open to everybody."""
    with tempfile.TemporaryDirectory(prefix="zoo") as folder:
        root = Path(folder)
        root.chmod(0o755)
        class_folders(root, 50, first_seed=100)
        settle(root / "a", ANIMALS)
        open_data(
            root, max_bad=1
        )  # Python's own folders may be closed to nobody: what is imported late is imported now
        yield root


def test_there_are_at_least_24_kinds():
    assert len({(animal.fate, animal.what) for animal in ANIMALS}) >= 24
    assert len({animal.name for animal in ANIMALS}) == len(ANIMALS)


def test_exactly_the_bad_ones_are_bad_with_their_reasons(zoo):
    with unprivileged():
        inventory = inspect(zoo)
    assert {bad.key: bad.reason for bad in inventory.bad} == {f"a/{animal.name}": animal.what for animal in BAD}
    assert {picture for picture in inventory.good if not picture.rsplit("/", 1)[1][:4].isdigit()} == {
        f"a/{animal.name}" for animal in GOOD
    }
    assert len(inventory.good) == 100 + len(GOOD)


def test_notes_and_the_rest_are_counted(zoo):
    with unprivileged():
        inventory = inspect(zoo)
    assert inventory.notes == Counter(note for animal in GOOD for note in animal.what)
    assert inventory.ignored == Counter(animal.what for animal in ELSE if animal.fate == "ignored")
    assert inventory.skipped == Counter(animal.what for animal in ELSE if animal.fate == "skipped")
    assert inventory.classes_outside == []


def test_first_bytes_alone_find_what_shows_there(zoo):
    with unprivileged():
        inventory = inspect(zoo, decode=False)
    visible = {"zero-byte", "not-an-image", "not-a-file", "missing", "unreadable"}
    assert {bad.key for bad in inventory.bad} == {f"a/{animal.name}" for animal in BAD if animal.what in visible}
    assert inventory.notes == Counter()


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


def test_training_uses_exactly_the_good_ones(zoo):
    with unprivileged():
        inventory = inspect(zoo)
        splits = open_data(zoo, max_bad=0.5, classes=["a", "b"])
    used = [source.read(i).key for source in (splits.train, splits.val) for i in range(len(source))]
    assert sorted(used) == sorted(inventory.good)
    assert len(set(used)) == len(used)
    assert {bad.key for bad in splits.bad} == {f"a/{animal.name}" for animal in BAD}


def test_more_than_a_tenth_bad_stops_training(zoo):
    with (
        unprivileged(),
        pytest.raises(DataError, match=r"At most 0\.1 of the files may be bad; .* 0\.146 are: .*truncated"),
    ):
        open_data(zoo, classes=["a", "b"])


def test_a_thousand_good_files_raise_no_alarm(tmp_path):
    kinds = [animal for animal in GOOD if isinstance(animal.content, bytes) and "." in animal.name]
    for i in range(1000):
        kind = kinds[i % len(kinds)]
        suffix = kind.name.rsplit(".", 1)[1]
        (tmp_path / f"c{i % 2}").mkdir(exist_ok=True)
        (tmp_path / f"c{i % 2}" / f"{i}.{suffix}").write_bytes(kind.content)
    inventory = inspect(tmp_path)
    assert inventory.bad == []
    assert len(inventory.good) == 1000


@pytest.mark.parametrize("animal", [a for a in GOOD if isinstance(a.content, bytes)], ids=lambda a: ascii(a.name[:20]))
def test_a_look_and_the_whole_agree(animal):
    seen = image_info(animal.content)
    image = open_image(animal.content, value_range=common_range([seen.values] if seen.values else []))
    assert (seen.size, image.mode) == ((image.height, image.width), "RGB")
    assert seen.notes == tuple(note for note in animal.what if note != "extension")


@pytest.mark.parametrize("animal", [a for a in BAD if isinstance(a.content, bytes)], ids=lambda a: a.name)
def test_a_look_and_the_whole_refuse_alike(animal):
    for read in (image_info, open_image):
        with pytest.raises(DataError, match=r"^The image cannot be used: ") as caught:
            read(animal.content)
        assert caught.value.reason == animal.what
