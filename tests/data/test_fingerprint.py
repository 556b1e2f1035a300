"""The fingerprint of a dataset tells which images changed."""

from __future__ import annotations

import pytest

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.data import open_data
from weft.data.fingerprint import Fingerprint, difference, fingerprint
from weft.errors import CheckpointError


def test_a_fingerprint_tells_what_changed(tmp_path):
    photos, file = class_folders(tmp_path / "photos", 10, ("cat", "dog")), tmp_path / "images.tsv.gz"
    old = fingerprint(open_data(photos))
    old.write(file)
    assert Fingerprint.read(file) == old

    def found() -> str | None:
        return difference(old, fingerprint(open_data(photos)))

    assert found() is None
    (photos / "cat" / "0003.jpg").write_bytes(jpeg(3) + b" ")
    assert found() == "1 image changed (cat/0003.jpg)."
    (photos / "dog" / "new.jpg").write_bytes(jpeg(77))
    assert "1 image new (dog/new.jpg)" in found()
    assert "changed (" in found()
    (photos / "dog").rename(photos / "wolf")
    assert found() == "1 class gone (dog), 1 class new (wolf)."


@pytest.mark.parametrize("damage", [b"", b"text", b"\x1f\x8b half"])
def test_a_damaged_fingerprint_is_refused(damage, tmp_path):
    (tmp_path / "images.tsv.gz").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"must list the images of the run; it cannot be read"):
        Fingerprint.read(tmp_path / "images.tsv.gz")
