"""`weft data check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.pictures import bomb, encoded, jpeg, photo
from tests.data.zoo import class_folders, digest
from weft.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Seven good pictures, one of them a copy, three bad ones, and company."""
    class_folders(tmp_path, 3, ("cats", "dogs"))
    (tmp_path / "cats" / "cut.jpg").write_bytes(jpeg()[:500])
    (tmp_path / "cats" / "two\nlines.jpg").write_bytes(b"<html>")
    (tmp_path / "dogs" / "empty.jpg").write_bytes(b"")
    (tmp_path / "dogs" / "0000.jpg").write_bytes(encoded(photo()[..., 0], "JPEG"))
    (tmp_path / "dogs" / "notes.txt").write_text("x")
    (tmp_path / "dogs" / ".hidden").write_text("x")
    (tmp_path / "dogs" / "cat.jpg").write_bytes((tmp_path / "cats" / "0001.jpg").read_bytes())
    return tmp_path


def test_the_report(mixed: Path, capsys: Capture) -> None:
    before = digest(mixed)
    assert main(["data", "check", str(mixed)]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "bad   cats/cut.jpg: truncated (the file is truncated)",
        r"bad   cats/two\nlines.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF)",
        "bad   dogs/empty.jpg: zero-byte (it is empty (0 bytes))",
        "",
        "7 good, classes 2: cats 3, dogs 4",
        "3 bad: 1 not-an-image, 1 truncated, 1 zero-byte",
        "1 ignored, neither named nor made like an image: 1 .txt",
        "1 gray: gray, converted to RGB",
        "1 there more than once, the same to the byte: cats/0001.jpg = dogs/cat.jpg",
        "1 hidden, passed over: hidden, or a system file (.DS_Store, __MACOSX, Thumbs.db)",
    ]
    assert digest(mixed) == before


def test_json(mixed: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(mixed), "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["classes"] == {"": {"cats": 3, "dogs": 4}}
    assert facts["copies"] == [["cats/0001.jpg", "dogs/cat.jpg"]]
    assert [(bad["key"], bad["reason"]) for bad in facts["bad"]] == [
        ("cats/cut.jpg", "truncated"),
        ("cats/two\nlines.jpg", "not-an-image"),
        ("dogs/empty.jpg", "zero-byte"),
    ]
    assert (facts["good"], facts["ignored"], facts["notes"], facts["skipped"]) == (
        7,
        {"txt": 1},
        {"gray": 1},
        {"hidden": 1},
    )


def test_nothing_bad_is_success(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "train", 2)
    class_folders(tmp_path / "val", 1, first_seed=9)
    class_folders(tmp_path / "test", 1, first_seed=12)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 good in train/, classes 2: a 2, b 2",
        "2 good in val/, classes 2: a 1, b 1",
        "0 bad",
        "Not read, because train/ exists: test/.",
    ]


def test_a_flat_folder_is_checked_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg())
    (tmp_path / "b.jpg").write_bytes(b"")
    assert main(["data", "check", str(tmp_path)]) == 3
    assert "1 good outside all class folders, which training does not use" in capsys.readouterr().out


def test_max_pixels(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path, 1)
    (tmp_path / "a" / "large.png").write_bytes(bomb(1001))
    assert main(["data", "check", str(tmp_path)]) == 0
    assert main(["data", "check", str(tmp_path), "--max-pixels", "1_000_000"]) == 3
    assert "bad   a/large.png: too-many-pixels" in capsys.readouterr().out


def test_first_bytes_only(mixed: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(mixed), "--no-decode"]) == 3
    assert "2 bad: 1 not-an-image, 1 zero-byte" in capsys.readouterr().out


def test_links(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "data", 1)
    class_folders(tmp_path / "store", 1, ("c",), first_seed=9)
    (tmp_path / "data" / "c").symlink_to("../store/c")
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    assert "Not entered, links to outside: c. See --follow-links." in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "data"), "--follow-links"]) == 0
    assert "3 good, classes 3: a 1, b 1, c 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["check", "/no/such/place"], 3, "The data directory must exist; '/no/such/place' does not."),
        (["check", "digits"], 2, "DATA must be a directory; got digits, which comes with scikit-learn"),
        (["check", ".", "--max-pixels", "0"], 2, "--max-pixels must be a whole number from 1 on; got '0'."),
        (["check", ".", "--max-pixels", "1e8"], 2, "--max-pixels must be a whole number from 1 on; got '1e8'."),
        (["check"], 2, "weft data check is called as: weft data check DATA."),
        (["prepare", "x"], 2, "weft data prepare is called as: weft data prepare DATA OUT."),
        (["prepare", "x", "y", "--size", "big"], 2, "--size must be a whole number of pixels; got 'big'."),
        (["chek", "."], 2, "invalid choice: 'chek'"),
    ],
)
def test_refusals(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == code
    assert message in capsys.readouterr().err


def test_the_papers_data_sets(capsys: Capture) -> None:
    assert main(["data", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["flowers", "102", "2,040", "6,149", "torchvision:Flowers102"] in [row[:5] for row in rows]
    assert main(["data", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["train"] == 1_281_167


def test_prepare(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "data", 5)
    assert main(["data", "prepare", str(tmp_path / "data"), str(tmp_path / "packed"), "--size", "16"]) == 0
    assert "8 images for training and 2 held out, in 2 shards" in capsys.readouterr().out
    assert main(["data", "prepare", str(tmp_path / "data"), str(tmp_path / "packed"), "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 2


def test_it_never_imports_torch(tmp_path: Path) -> None:
    class_folders(tmp_path, 1)
    code = "import sys; from weft.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "data", "check", str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
