"""Groups of images by pattern, name, time and series; what a rule says nothing about is a group of its own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from tests.data.pictures import jpeg
from weft.data import SplitPlan, open_data
from weft.data.groups import GroupError, groups_of
from weft.errors import UsageError


def groups(rule: str, *keys: str, files: Mapping[str, bytes] | None = None) -> list[str]:
    return groups_of(rule, keys, dict(files or {}).__getitem__, None)


def photo(time: str | None, camera: str = "Pixel 7") -> bytes:
    """Return a JPEG with EXIF data."""
    image, file = Image.new("RGB", (8, 8)), io.BytesIO()
    exif = image.getexif()
    exif[ExifTags.Base.Make], exif[ExifTags.Base.Model] = camera.split()
    if time is not None:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = time
    image.save(file, "JPEG", exif=exif)
    return file.getvalue()


def test_a_group_is_the_parenthesised_part_or_the_match() -> None:
    keys = "cat/p7_1.jpg", "dog/p7_2.jpg", "dog/other.jpg"
    assert groups(r"p(\d+)_", *keys) == ["7", "7", "/dog/other.jpg"]
    assert groups(r"p\d+", *keys) == ["p7", "p7", "/dog/other.jpg"]
    assert groups(r"^(cat|dog)/(p)?", *keys)[1] == "dog/p"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a/clip3_frame0012.jpg a/clip3_frame7.jpg b/clip3_frame7.jpg", "a/clip3_frame a/clip3_frame b/clip3_frame"),
        ("a/00012_00029.ppm a/00012_00030.ppm a/00013_00001.ppm", "a/00012 a/00012 a/00013"),
        ("a/cat(1).jpg a/cat-20.jpg a/cat.jpg", "a/cat a/cat /a/cat.jpg"),
    ],
)
def test_a_name_without_its_counter_is_a_group(names: str, expected: str) -> None:
    assert groups("name", *names.split()) == expected.split()


def test_photos_of_a_camera_without_a_long_pause_are_a_group() -> None:
    files = {
        "a.jpg": photo("2024:05:01 10:00:00"),
        "b.jpg": photo("2024:05:01 10:00:50"),
        "c.jpg": photo("2024:05:01 10:01:40"),
        "later.jpg": photo("2024:05:01 10:02:41"),
        "other camera.jpg": photo("2024:05:01 10:00:50", "Nikon D90"),
        "no time.jpg": photo(None),
        "wrong time.jpg": photo("0000:00:00 00:00:00"),
        "no EXIF.jpg": jpeg(1),
        "damaged.jpg": b"\xff\xd8\xff\xe1\x00\x10Exif\0\0damaged",
    }
    found = groups("exif", *reversed(files), files=files)[::-1]
    assert found[:3] == ["Pixel 7 2024-05-01 10:00:00"] * 3
    assert found[3:5] == ["Pixel 7 2024-05-01 10:02:41", "Nikon D90 2024-05-01 10:00:50"]
    assert found[5:] == [f"/{name}" for name in list(files)[5:]]
    with pytest.raises(GroupError, match=r"none of 1 does, such as 'no EXIF\.jpg'\. Use --group similar"):
        groups("exif", "no EXIF.jpg", files=files)


def test_series_are_groups_and_need_features() -> None:
    assert groups_of("similar", ["a", "b", "c"], bytes, {"a": "1", "c": "1"}) == ["1", "/b", "1"]
    with pytest.raises(UsageError, match="--group similar needs the features of a network"):
        groups("similar", "a.jpg")


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Two classes of four clips with three frames each."""
    for number in range(24):
        path = tmp_path / ("ill", "well")[number % 2] / f"clip{number // 6}_{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(number))
    return tmp_path


def test_a_folder_is_split_by_each_rule(frames: Path) -> None:
    plain = open_data(frames)
    series = {key: key.split("_")[0] for key in (*plain.train.keys, *plain.val.keys)}
    for plan in (SplitPlan(group="name"), SplitPlan(group="similar", series=series)):
        splits = open_data(frames, plan)
        assert not {series[key] for key in splits.train.keys} & {series[key] for key in splits.val.keys}
    none = open_data(frames, SplitPlan(group="none"))
    assert none.val.keys == plain.val.keys
    assert none.groups is None


@pytest.mark.parametrize("rule", ["similar", "exif", "name", "none"])
def test_a_column_with_the_name_of_a_rule_comes_first(frames: Path, rule: str) -> None:
    names = [str(path) for path in frames.rglob("*.jpg")]
    rows = [f"{name},{Path(name).parent.name},{number % 4}" for number, name in enumerate(names)]
    table = frames / "table.csv"
    table.write_text("\n".join([f"image,label,{rule}", *rows]))
    splits = open_data(table, SplitPlan(group=rule))
    assert set(splits.groups or ()) | set(splits.val_groups or ()) == set("0123")
