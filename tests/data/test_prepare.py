"""Prepared data: the images, classes and sides of the original, smaller, in shards; never half written."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.cli import main
from weft.data import open_data, prepare
from weft.data.prepare import prepare_data
from weft.data.source import KeyedSource
from weft.data.split import rank
from weft.errors import DataError, UsageError, WeftError


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def by_number(source: KeyedSource) -> list[int]:
    """Return the labels of samples in the order of their numbers."""
    return [label for _, label in sorted(zip(source.keys, source.labels, strict=True))]


def test_prepared_data_have_the_same_sides_and_are_replaced_on_request(tmp_path):
    photos, packed = class_folders(tmp_path / "photos", 10), tmp_path / "packed"
    before = open_data(photos)
    done = prepare_data(photos, packed, 16)
    after = open_data(packed)
    assert (done["train"], done["val"]) == (len(before.train), len(before.val)) == (len(after.train), len(after.val))
    assert (after.classes, by_number(after.train), after.is_given) == (before.classes, before.train.labels, True)
    assert after.train.labels != sorted(after.train.labels)  # each part of a shard has images of all classes
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


def test_prepared_groups_are_on_one_side(tmp_path: Path, capsys) -> None:
    for number in range(40):
        folder = tmp_path / "data" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (6 * number, 0, 0)).save(folder / f"clip{number % 10}_{number}.png")
    prepare_data(tmp_path / "data", tmp_path / "random", 16, workers=0)
    assert "The shards keep this random split." in capsys.readouterr().err
    prepare_data(tmp_path / "data", tmp_path / "grouped", 16, group=r"(clip\d)", workers=0)
    assert "random split" not in capsys.readouterr().err
    splits = open_data(tmp_path / "grouped")
    sides = [
        {round(np.asarray(decoded(source.read(i).data))[..., 0].mean() / 6) % 10 for i in range(len(source))}
        for source in (splits.train, splits.val)
    ]
    assert sides[0] | sides[1] == set(range(10))
    assert not sides[0] & sides[1]
    with pytest.raises(UsageError, match="Write the series to a file, and name it: weft data check"):
        prepare_data(tmp_path / "data", tmp_path / "similar", 16, group="similar", workers=0)


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
    assert by_number(after.train) == before.train.labels


def damaged(folder: Path, *names: str, per_class: int = 12) -> Path:
    """Class folders in which some images have a good header and no pixels."""
    class_folders(folder, per_class)
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: data.index(b"\xff\xda") + 20])
    return folder


def test_shards_are_byte_identical_with_any_number_of_processes(tmp_path: Path, monkeypatch) -> None:
    """Also with several shards, and with a damaged image, which takes no number from the others."""
    monkeypatch.setattr(prepare, "SHARD_BYTES", 8000)
    photos = class_folders(tmp_path / "photos", 12)
    keys = open_data(photos).train.keys
    prepare_data(photos, tmp_path / "whole", 16, workers=0, quiet=True)
    bad = keys[5]
    damaged(photos, bad)
    done = {n: prepare_data(photos, tmp_path / f"packed{n}", 16, workers=n, quiet=True) for n in (0, 1, 2)}
    assert done[0] == done[1] == done[2]
    assert [(row["image"], bad in row["error"]) for row in done[0]["unreadable"]] == [(bad, True)]
    assert done[0]["train"] == len(keys) - 1
    first = files(tmp_path / "packed0")
    assert len(first) > 4
    assert first == files(tmp_path / "packed1") == files(tmp_path / "packed2")
    samples = [
        {Path(key).stem: source.read(i).data for i, key in enumerate(source.keys)}
        for source in (open_data(tmp_path / name).train for name in ("whole", "packed0"))
    ]
    del samples[0][f"{5:08}"]
    assert samples[0] == samples[1]
    assert not multiprocessing.active_children()


def test_images_are_decoded_once_and_the_damaged_are_listed(tmp_path: Path, capsys) -> None:
    photos, packed = damaged(tmp_path / "photos", "a/0003.jpg"), tmp_path / "packed"
    assert main(["data", "prepare", str(photos), str(packed), "--json", "--workers", "1"]) == 3
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert summary["train"] + summary["val"] == 23
    assert [row["image"] for row in summary["unreadable"]] == ["a/0003.jpg"]
    assert "weft: a/0003.jpg cannot be used: the file is truncated" in shown.err
    assert shown.err.endswith("weft: 1 images could not be read.\n")


def test_too_many_damaged_images_are_refused(tmp_path: Path) -> None:
    photos = damaged(tmp_path / "photos", *(f"a/000{number}.jpg" for number in range(3)))
    with pytest.raises(DataError, match=r"At most 0\.1 of the 24 files may be bad; so far 3 are: a/000"):
        prepare_data(photos, tmp_path / "packed", 16)
    lost = damaged(tmp_path / "lost", per_class=30)
    for path in sorted((lost / "a").iterdir())[3:]:
        path.unlink()
    damaged_class = [f"a/{path.name}" for path in (lost / "a").iterdir()]
    for name in damaged_class:
        (lost / name).write_bytes((photos / "a/0000.jpg").read_bytes())
    with pytest.raises(DataError, match=r"Every class must have at least one usable image in the train split; .* of a"):
        prepare_data(lost, tmp_path / "packed", 16)
    assert not (tmp_path / "packed").exists()
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UsageError, match="workers must be auto or at least 0; got -1"):
        prepare_data(photos, tmp_path / "packed", 16, workers=-1)


def test_a_process_that_ends_is_reported_with_the_image(tmp_path: Path, monkeypatch) -> None:
    photos, parent, number = class_folders(tmp_path / "photos", 12), os.getpid(), [0]

    def vanish(*arguments: object) -> bytes:
        number[0] += 1
        if number[0] > 2 and os.getpid() != parent:
            time.sleep(0.5)  # until the parent has the results before
            os.kill(os.getpid(), signal.SIGKILL)
        return b"image"

    monkeypatch.setattr(prepare, "_smaller", vanish)
    key = sorted(open_data(photos).train.keys, key=lambda key: rank(key, 0))[2]
    with pytest.raises(
        WeftError, match=rf"one did not, at {key} or an image soon after it \(DataLoader worker .*Lower --workers"
    ):
        prepare_data(photos, tmp_path / "packed", 16, workers=1)
    assert not (tmp_path / "packed").exists()


@pytest.mark.slow
def test_no_process_remains_after_a_kill(tmp_path: Path) -> None:
    photos, packed = class_folders(tmp_path / "photos", 1000), tmp_path / "packed"
    words = ["data", "prepare", str(photos), str(packed), "--size", "8", "--workers", "2", "--quiet"]
    process = psutil.Popen([sys.executable, "-m", "weft", *words], stderr=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    while len(children) < 2:
        assert process.poll() is None
        children = process.children()
        time.sleep(0.01)
    time.sleep(0.3)  # their results fill the pipe
    process.kill()
    process.wait(10)
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert not packed.exists()


def test_the_value_range_of_prepared_images_is_in_their_headers(tmp_path: Path) -> None:
    for name, high in (("a", 4000), ("b", 3000)):
        (tmp_path / "deep" / name).mkdir(parents=True)
        for i in range(3):
            pixels = np.linspace(0, high, 32 * 32).reshape(32, 32).astype(np.uint16) + i
            Image.fromarray(pixels).save(tmp_path / "deep" / name / f"{i}.png")
    prepare_data(tmp_path / "deep", tmp_path / "packed", 16, quiet=True)
    expected = open_data(tmp_path / "deep").value_range
    assert expected == (0, 4095)
    assert {open_data(tmp_path / "packed", check=check).value_range for check in ("header", "decode")} == {expected}
