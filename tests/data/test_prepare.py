"""Prepared data: the images, classes and sides of the original, smaller, in shards; never half written."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.data import open_data
from weft.data.prepare import prepare_data
from weft.errors import StorageError, UsageError


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_prepared_data_have_the_same_sides_and_are_replaced_on_request(tmp_path):
    photos, packed = class_folders(tmp_path / "photos", 10), tmp_path / "packed"
    before = open_data(photos)
    done = prepare_data(photos, packed, 16)
    after = open_data(packed)
    assert (done["train"], done["val"]) == (len(before.train), len(before.val)) == (len(after.train), len(after.val))
    assert (after.classes, after.train.labels, after.is_given) == (before.classes, before.train.labels, True)
    for i in range(len(after.train)):
        assert min(Image.open(io.BytesIO(after.train.read(i).data)).size) == 16
    first = files(packed)
    with pytest.raises(UsageError, match=r"must be new or empty; .*packed is neither"):
        prepare_data(photos, packed, 16)
    prepare_data(photos, packed, 16, force=True)
    assert files(packed) == first
    (packed / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"also holds 'mine\.txt'"):
        prepare_data(photos, packed, 16, force=True)
    with pytest.raises(UsageError, match="size must be at least 8 pixels; got 4"):
        prepare_data(photos, tmp_path / "other", 4)


def test_prepared_classes_keep_their_names(tmp_path):
    """Also those that no folder can have, as in FGVC-Aircraft."""
    names = ["F-16A/B", "F/A-18", "left/other", "right/other", "..", "plain", "with space", "caf\u00e9.x"]
    rows = ["path,label"]
    for number in range(3 * len(names)):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
        rows.append(f'{number}.jpg,"{names[number // 3]}"')
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    before = open_data(tmp_path / "table.csv")
    prepare_data(tmp_path / "table.csv", tmp_path / "packed", 16)
    after = open_data(tmp_path / "packed")
    assert after.classes == before.classes == sorted(names)
    assert after.train.labels == before.train.labels


def test_the_data_stay_if_they_cannot_be_replaced(tmp_path, monkeypatch):
    photos, packed = class_folders(tmp_path / "photos"), tmp_path / "packed"
    prepare_data(photos, packed, 16)
    first = files(packed)

    def fail(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    monkeypatch.setattr("weft.files.rename", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        prepare_data(photos, packed, 32, force=True)
    assert files(packed) == first
    assert [path.name for path in tmp_path.glob(".*")] == []
