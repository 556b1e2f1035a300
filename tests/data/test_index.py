"""The index of files: a file that did not change is not read again, a changed one always is.

A cache that is damaged as a whole or cannot be used: tests/inference/test_features.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import encoded, jpeg, photo
from tests.data.zoo import class_folders
from weft.cli import main
from weft.data import decode, index, inspect, open_data
from weft.data import folder as folders
from weft.data.bit_depth import Values
from weft.data.fingerprint import difference, fingerprint
from weft.data.source import Splits
from weft.errors import DataError
from weft.files import cache_dir

Read = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "SETTLED_NS", 0)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "photos", 6)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Open data, and return the names of the files that are opened."""
    opened: list[str] = []
    of_file = decode.open_regular

    def noted(path: Any) -> Any:
        opened.append(os.path.basename(path))
        return of_file(path)

    for module in (decode, folders):
        monkeypatch.setattr(module, "open_regular", noted)

    def names(data: Path, *, whole: bool = False, **options: Any) -> list[str]:
        opened.clear()
        inspect(data) if whole else open_data(data, **options)
        return sorted(set(opened))

    return names


def facts(splits: Splits) -> tuple[Any, ...]:
    """Everything that is known about a dataset."""
    sides = [(side.keys, side.labels, list(side.digests)) for side in (splits.train, splits.val)]
    return (*sides, splits.notes, splits.bad, splits.sizes.tolist(), splits.values)


def add_others(photos: Path) -> None:
    """Files of every fate: bad by the first bytes, by the header, by the pixels; deep; no image; without extension."""
    (photos / "a" / "empty.jpg").touch()
    (photos / "a" / "text.jpg").write_text("no image")
    (photos / "a" / "cut.png").write_bytes(encoded(photo(32, 32), "PNG")[:-200])
    (photos / "a" / "thin.png").write_bytes(encoded(photo(1, 101), "PNG"))
    (photos / "b" / "notes.txt").write_text("no image")
    (photos / "b" / "unnamed").write_bytes(jpeg(77))
    (photos / "b" / "other.png").write_bytes(jpeg(78))
    Image.new("I;16", (16, 16), 3000).save(photos / "b" / "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(photo(20, 30))
    turned.save(photos / "b" / "turned.jpg", exif=exif)
    turned.save(photos / "b" / "prepared.jpg", comment=b"weft value_range 0 4095")
    (photos / "b" / "cut.jpg").write_bytes((photos / "b" / "prepared.jpg").read_bytes()[:-60])
    (photos / "b" / "sub").mkdir()
    (photos / "b" / "sub" / "x.jpg").write_bytes(jpeg(79))


def test_unchanged_files_are_not_read_again_and_give_the_same_dataset(photos, read):
    add_others(photos)
    options = dict(max_bad=0.9)
    first = facts(open_data(photos, **options))
    assert read(photos, **options) == []
    assert facts(open_data(photos, **options)) == first
    shutil.rmtree(cache_dir())
    assert len(read(photos, **options)) == 6 + 12  # names of both classes, and others
    assert facts(open_data(photos, **options)) == first


CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda path: path.write_bytes(jpeg(500)),
    "same size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "renamed over": lambda path: os.replace(path.with_name("0005.jpg"), path),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:200]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_read_even_if_its_time_is_set_back(photos, read, change):
    read(photos)
    path = photos / "a" / "0002.jpg"
    before = path.stat()
    CHANGES[change](path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(photos, max_bad=0.9) == ["0002.jpg"]
    known = facts(open_data(photos, max_bad=0.9))
    shutil.rmtree(cache_dir())
    assert facts(open_data(photos, max_bad=0.9)) == known


def test_new_and_removed_files_leave_the_others_known(photos, read):
    read(photos)
    (photos / "a" / "0000.jpg").unlink()
    (photos / "a" / "0001b.jpg").write_bytes(jpeg(900))
    (photos / "c").mkdir()
    (photos / "c" / "one.jpg").write_bytes(jpeg(901))
    assert read(photos) == ["0001b.jpg", "one.jpg"]
    assert read(photos) == []


def test_files_that_changed_just_before_are_read_again(photos, read, monkeypatch):
    """A further change could leave size and times equal."""
    monkeypatch.setattr(index, "SETTLED_NS", 3_600 * 10**9)
    assert len(read(photos)) == 6
    assert len(read(photos)) == 6


def test_the_check_reads_every_file_again(photos, read, capsys):
    read(photos)
    path = photos / "a" / "0002.jpg"
    assert {path.name for path in photos.rglob("*.jpg")} == set(read(photos, whole=True))
    content = path.read_bytes()
    with path.open("r+b") as file:  # damage of the disk, which changes no time
        file.truncate(300)
        file.write(content[:1])
    assert main(["data", "check", str(photos), "--strict"]) == 3
    assert "a/0002.jpg: truncated" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"1 truncated \(a/0002\.jpg\)"):
        open_data(photos, max_bad=0)


def test_tables_folders_in_folders_and_parts_of_a_dataset_are_known(tmp_path, read):
    class_folders(tmp_path / "photos" / "train", 4)
    class_folders(tmp_path / "photos" / "val", 2, first_seed=50)
    data = tmp_path / "photos"
    read(data)
    assert read(data / "val") == []
    assert read(data / "train") == []
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(data.glob("train/*/*.jpg"))]
    (tmp_path / "table.csv").write_text("image,label\n" + "\n".join(rows) + "\n")
    assert len(read(tmp_path / "table.csv")) == 4  # a table lists other files of the same folders
    assert read(tmp_path / "table.csv") == []
    assert read(data) == []


def test_a_smaller_or_larger_limit_on_pixels_is_applied_to_known_files(photos):
    (photos / "a" / "large.jpg").write_bytes(encoded(photo(100, 100), "JPEG"))
    for limit, reasons in ((None, []), (9_000, ["too-many-pixels"]), (None, []), (9_000, ["too-many-pixels"])):
        assert [bad.reason for bad in open_data(photos, max_pixels=limit).bad] == reasons


def test_levels_find_what_they_read(photos, read):
    add_others(photos)
    reasons = {
        check: {bad.key: bad.reason for bad in open_data(photos, check=check, max_bad=0.9).bad}
        for check in ("none", "header", "decode")
    }
    assert reasons["none"] == {}
    by_header = {"a/empty.jpg": "zero-byte", "a/text.jpg": "not-an-image", "a/thin.png": "too-thin"}
    assert reasons["header"] == by_header
    assert reasons["decode"] == by_header | {"a/cut.png": "truncated", "b/cut.jpg": "truncated"}
    known = {check: facts(open_data(photos, check=check, max_bad=0.9)) for check in reasons}
    for check, expected in known.items():  # whatever is known beyond
        shutil.rmtree(cache_dir())
        assert facts(open_data(photos, check=check, max_bad=0.9)) == expected
    shutil.rmtree(cache_dir())
    assert read(photos, check="none") == []
    assert {key.rpartition("/")[2] for key in open_data(photos, check="none").train.keys} <= {
        path.name for path in photos.rglob("*.*g")
    }


def test_many_images_are_checked_by_their_headers_and_the_note_says_so(photos, monkeypatch):
    monkeypatch.setattr("weft.data.open.MOST_DECODED", 11)
    splits = open_data(photos)
    assert any("headers of the images are checked, since there are more than 11:" in note for note in splits.notes)
    size = (photos / splits.train.keys[0]).stat().st_size
    assert next(iter(splits.train.digests)) == f"{size}\t"
    monkeypatch.setattr("weft.data.open.MOST_DECODED", 12)
    assert not any("headers" in note for note in open_data(photos).notes)


def test_datasets_with_and_without_hashes_are_compared_by_sizes(photos):
    decoded, headers = (fingerprint(open_data(photos, check=check)) for check in ("decode", "header"))
    assert decoded.has_hashes
    assert not headers.has_hashes
    assert difference(decoded, headers) is None
    path = photos / "a" / "0001.jpg"
    path.write_bytes(path.read_bytes() + b"\0")
    for check, old in (("decode", headers), ("header", decoded)):
        assert difference(old, fingerprint(open_data(photos, check=check))) == "1 image changed (a/0001.jpg)."
    shutil.rmtree(cache_dir())
    sides = decoded.sides_of(open_data(photos, check="header").train)
    assert sides.count("train") == len(sides) - ("a/0001.jpg" in open_data(photos).train.keys)


@pytest.mark.parametrize("value", [None, 7, "x", b"\xff\xfe", b""])
@pytest.mark.parametrize("column", ["names", "records", "special", "crc"])
def test_a_row_with_other_values_is_replaced(photos, read, column, value):
    first = facts(open_data(photos))
    with contextlib.closing(sqlite3.connect(cache_dir() / index.FILE)) as table, table:
        new = "CAST(? AS TEXT)" if value == b"\xff\xfe" else "?"
        table.execute(f"UPDATE rows SET {column} = {new}", (value,))
    assert facts(open_data(photos)) == first
    assert read(photos) == []


SCRIPT = """
import sys
from weft.data import index, open_data
index.SETTLED_NS, index.SAVE_S, index.MANY = 0, 0.0, 0
checked = index.FileIndex._record
def slow(self, place, found):
    checked(self, place, found)
    print(place, flush=True)
    if sys.argv[2:]:
        sys.stdin.readline()
index.FileIndex._record = slow
open_data(sys.argv[1])
"""


def test_a_killed_process_leaves_what_it_found(photos, read):
    command = [sys.executable, "-c", SCRIPT, str(photos), "step by step"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(12 + 8):  # the first bytes of all, and eight images
        process.stdout.readline()
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    names = read(photos)
    assert names == ["0002.jpg", "0003.jpg", "0004.jpg", "0005.jpg"]  # of class b
    assert read(photos) == []


def test_processes_that_start_together_read_each_file_once(photos):
    command = [sys.executable, "-c", SCRIPT, str(photos)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    checked = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sum(map(len, checked)) == 2 * 12


def opened(name: str, number: int) -> index.FileIndex:
    keys, stamps = [f"{i}.{name}" for i in range(number)], np.ones((number, 3), np.int64)
    return index.FileIndex(keys, {"": number}, name, stamps, began=1 << 62)


def test_a_process_that_comes_next_takes_over(monkeypatch):
    """Also if it looked into the cache before, and the other had just ended when it began."""
    monkeypatch.setattr(index, "MANY", 0)
    one, other = opened("jpg", 3), opened("jpg", 3)
    asked = list[str]()

    def find(key: str) -> index.Found:
        asked.append(key)
        return index.Found(index.DECODED)

    one.fill(np.arange(2), index.DECODED, find)
    other.fill(np.arange(3), index.DECODED, find)
    assert asked == ["0.jpg", "1.jpg", "2.jpg"]


def test_another_version_of_the_decoder_of_heif_knows_nothing(monkeypatch):
    """An image that one environment decodes may not be usable in another."""
    one = opened("heic", 1)
    one._record(0, index.Found(index.DECODED))
    one._save()
    assert opened("heic", 1).records["level"].tolist() == [index.DECODED]
    assert f" {decode.heif_version()} " in index.CONTEXT
    monkeypatch.setattr(index, "CONTEXT", index.CONTEXT.replace(f" {decode.heif_version()} ", " another "))
    assert opened("heic", 1).records["level"].tolist() == [index.UNKNOWN]


def test_a_version_with_other_records_knows_nothing():
    """Their bytes would be read as other values, or as an error, which removes the cache."""
    source = Path(index.__file__).read_text()
    other: dict[str, Any] = {"__name__": index.__name__}
    exec(source.replace('("digest", "V12")', '("digest", "V8")'), other)
    assert other["RECORD"].itemsize == index.RECORD.itemsize - 4
    assert other["CONTEXT"] != index.CONTEXT


def test_images_of_16_bits_have_their_values():
    one = opened("png", 3_000)
    for place in range(3_000):
        one._record(place, index.Found(index.DECODED, decode.ImageInfo((2, 2), "PNG", (), Values(0, 1, 2))))
    one._save()
    assert len(opened("png", 3_000).values) == 3_000
