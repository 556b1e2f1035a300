"""Groups of images by pattern, name, time and series; what a rule says nothing about is a group of its own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from tests.data.pictures import bomb, jpeg
from weft.data import SplitPlan, open_data
from weft.data.groups import GroupError, groups_of, read_groups, write_groups
from weft.errors import UsageError


def groups(rule: str, *keys: str, files: Mapping[str, bytes] | None = None) -> list[str]:
    return groups_of(rule, keys, dict(files or {}).__getitem__, None)[0]


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
        "too large.png": bomb(15_000),
        "damaged.jpg": b"\xff\xd8\xff\xe1\x00\x10Exif\0\0damaged",
    }
    found = groups("exif", *reversed(files), files=files)[::-1]
    assert found[:3] == ["Pixel 7 2024-05-01 10:00:00"] * 3
    assert found[3:5] == ["Pixel 7 2024-05-01 10:02:41", "Nikon D90 2024-05-01 10:00:50"]
    assert found[5:] == [f"/{name}" for name in list(files)[5:]]
    with pytest.raises(GroupError, match=r"none of 1 does, such as 'no EXIF\.jpg'\. Use --group similar"):
        groups("exif", "no EXIF.jpg", files=files)


def test_series_are_groups_and_need_features() -> None:
    assert groups_of("similar", ["a", "b", "c"], bytes, {"a": "1", "c": "1"})[0] == ["1", "/b", "1"]
    with pytest.raises(UsageError, match="--group similar needs the features of a network"):
        groups("similar", "a.jpg")


EDITED = {
    "comma": b"image,group\na/1.jpg,x\na/2.jpg,\na/3.jpg,y\n",
    "Excel": b"\xef\xbb\xbfimage;group\r\na/1.jpg;x\r\na/2.jpg;\r\na/3.jpg;y\r\n;\r\n",
    "tabs": b"Image\tGroup\tnotes\na/1.jpg\tx\tsharp\na/2.jpg\na/3.jpg\ty\t\n",
    "blanks": b"image, group \na/1.jpg, x\na/2.jpg,  \n a/3.jpg ,y \n",
    "quotes": b'"group","image"\n"x","a/1.jpg"\n"","a/2.jpg"\n"y","a/3.jpg"\n',
}


@pytest.mark.parametrize("form", EDITED)
def test_a_file_that_a_spreadsheet_has_saved_is_read(form: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.CSV"
    file.write_bytes(EDITED[form])
    assert groups(str(file), "a/1.jpg", "a/2.jpg", "a/3.jpg") == ["x", "/a/2.jpg", "y"]


def test_a_written_file_keeps_the_names_of_images(tmp_path: Path) -> None:
    written = {"a/1;2.jpg": "x", "a/ b, c.jpg": "y", " d.jpg": "z", "e\udcff.jpg": "x", 'f"\n.jpg': "y"}
    write_groups(tmp_path / "groups.csv", written | {"g.jpg": ""})
    listed = read_groups(tmp_path / "groups.csv")
    assert {key: listed[key] for key in written} == written
    assert "g.jpg" not in listed


REFUSED = {
    "other columns": (b"image,series\na,1\n", "image and group, in UTF-8; its first line is 'image,series'. Begin"),
    "UTF-16": ("image\tgroup\na\t1\n".encode("utf-16"), r"first line is 'image\\tgroup' in UTF-16\. Begin"),
    "empty": (b"", "its first line is ''"),
    "two groups": (b"image,group\na,1\nb,2\na,3\n", "must name one group for each image; for 'a' it names '1' and '3'"),
    "a group or none": (b"image,group\na,1\na,\n", "for 'a' it names '1' and ''"),
    "other images": (b"image,group\nb,1\n", "must name the groups of images of the data, such as 'a'; it names the g"),
    "no groups": (b"image,group\na,\n", "it names the group of none of them"),
    "a quote": (b'image,group\n"' + b"a" * 200_000, r"it cannot be read \(field larger than field limit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_without_a_clear_meaning_is_refused(case: str, tmp_path: Path) -> None:
    content, message = REFUSED[case]
    (tmp_path / "groups.csv").write_bytes(content)
    with pytest.raises(GroupError, match=message):
        groups(str(tmp_path / "groups.csv"), "a")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("nope.csv", "A CSV file of --group must exist; 'nope.csv' is no file. Check the path, or write it: weft"),
        ("", "or match the names of images; '' matches none of 1, such as 'a'"),
        ("b?", r"'b\?' matches none of 1"),
        ("(", r"must be a column of the table, an existing CSV file, .*; '\(' is none of these"),
    ],
)
def test_a_value_without_a_meaning_is_refused(group: str, message: str) -> None:
    with pytest.raises((GroupError, UsageError), match=message):
        groups(group, "a")


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
    file = frames.with_suffix(".csv")
    write_groups(file, series | {"ill/gone.jpg": "", "other/1.jpg": "clip"})
    listed = open_data(frames, SplitPlan(group=str(file)))
    assert listed.val.keys == splits.val.keys
    assert f"2 rows name no image of the data, of 26 in {file}: ill/gone.jpg, other/1.jpg." in listed.notes
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
