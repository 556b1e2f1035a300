"""`weft data check` and `weft data prepare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.pictures import bomb, encoded, jpeg, photo
from tests.data.zoo import class_folders, digest
from weft.cli import main
from weft.errors import UsageError


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Seven good images, one of them a copy and one gray; three bad ones; other files."""
    class_folders(tmp_path, 3, ("cats", "dogs"))
    (tmp_path / "cats" / "cut.jpg").write_bytes(jpeg()[:500])
    (tmp_path / "cats" / "two\nlines.jpg").write_bytes(b"<html>")
    (tmp_path / "dogs" / "empty.jpg").write_bytes(b"")
    (tmp_path / "dogs" / "0000.jpg").write_bytes(encoded(photo()[..., 0], "JPEG"))
    (tmp_path / "dogs" / "notes.txt").write_text("x")
    (tmp_path / "dogs" / ".hidden").write_text("x")
    (tmp_path / "dogs" / "cat.jpg").write_bytes((tmp_path / "cats" / "0001.jpg").read_bytes())
    return tmp_path


def test_the_report(mixed, capsys):
    before = digest(mixed)
    assert main(["data", "check", str(mixed)]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "bad   cats/cut.jpg: truncated (the file is truncated)",
        r"bad   cats/two\nlines.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF, AVIF, HEIF)",
        "bad   dogs/empty.jpg: zero-byte (it is empty (0 bytes))",
        "",
        "7 good, classes 2: cats 3, dogs 4",
        "3 bad: 1 not-an-image, 1 truncated, 1 zero-byte",
        "1 ignored, not images by name or content: 1 .txt",
        "1 gray: gray, converted to RGB",
        "1 duplicate, byte-identical: cats/0001.jpg = dogs/cat.jpg",
        "1 hidden, skipped: hidden, or a system file (.DS_Store, __MACOSX, Thumbs.db)",
        f"Trainable: no. At most 0.1 of the files may be bad; in '{mixed}' 0.3 are: 1 not-an-image,"
        r" 1 truncated, 1 zero-byte (cats/cut.jpg, cats/two\nlines.jpg, dogs/empty.jpg). List them all with"
        " `weft data check`, repair or remove them, or raise data.max_bad.",
    ]
    assert main(["data", "check", str(mixed), "--json"]) == 3
    fields = json.loads(capsys.readouterr().out)
    assert fields["classes"] == {"": {"cats": 3, "dogs": 4}}
    assert fields["copies"] == [["cats/0001.jpg", "dogs/cat.jpg"]]
    assert [(bad["key"], bad["reason"]) for bad in fields["bad"]] == [
        ("cats/cut.jpg", "truncated"),
        ("cats/two\nlines.jpg", "not-an-image"),
        ("dogs/empty.jpg", "zero-byte"),
    ]
    numbers = (7, {"txt": 1}, {"gray": 1}, {"hidden": 1})
    assert (fields["good"], fields["ignored"], fields["notes"], fields["skipped"]) == numbers
    assert main(["data", "check", str(mixed), "--no-decode"]) == 3
    assert "3 bad: 1 not-an-image, 1 truncated, 1 zero-byte" in capsys.readouterr().out  # its header is cut
    assert digest(mixed) == before


def folders(root: Path, **images: int) -> Path:
    for seed, (name, number) in enumerate(images.items()):
        class_folders(root, number, (name,), first_seed=100 * seed)
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


def linked(root: Path) -> Path:
    class_folders(root.parent / "store", 2, ("c",), first_seed=300)
    folders(root, a=2, b=2)
    (root / "c").symlink_to("../store/c")
    return root


def damaged(root: Path, bad: int) -> Path:
    folders(root, a=10, b=10)
    for number in range(bad):
        (root / "a" / f"bad{number}.jpg").write_bytes(b"<html>")
    return root


def table(root: Path, rows: str) -> Path:
    folders(root.parent / "photos", a=3, b=3)
    root.with_suffix(".csv").write_text(rows)
    return root.with_suffix(".csv")


GOOD_ROWS = "image,label\n" + "".join(f"photos/{name}/{i:04}.jpg,{name}\n" for name in "ab" for i in range(3))
DATA: dict[str, tuple[bool, Callable[[Path], Path]]] = {  # more refusals, without processes: tests/data/test_folder.py
    "two classes": (True, lambda root: folders(root, a=2, b=2)),
    "few bad files": (True, lambda root: damaged(root, 2)),
    "a table": (True, lambda root: table(root, GOOD_ROWS)),
    "only empty classes": (False, lambda root: folders(root, a=0, b=0)),
    "linked classes": (False, linked),
    "many bad files": (False, lambda root: damaged(root, 5)),
    "a name with an escape sequence": (False, lambda root: folders(root, **{"a": 2, "b\x1b[31m": 2})),
    "a table without labels": (False, lambda root: table(root, "image\nphotos/a/0000.jpg\n")),
    "no such folder": (False, lambda root: root),
}


@pytest.mark.parametrize("case", DATA)
def test_the_verdict_is_that_of_training(case, tmp_path, capsys, monkeypatch):
    """Training is stopped once it has accepted the data."""
    is_trainable, write = DATA[case]
    data = write(tmp_path / "data")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("accepted")

    monkeypatch.setattr("weft.train.plan.image_size_hint", stop)
    trained = main(["train", str(data), "--model", "levit_nano_32", "--out", str(tmp_path / "run"), "--quiet"])
    refusal = capsys.readouterr().err.strip().removeprefix("weft: ")
    assert trained == (130 if is_trainable else 3)
    assert main(["data", "check", str(data), "--quiet"]) == (0 if is_trainable else 3)
    printed = capsys.readouterr()
    if case in ("no such folder", "a table without labels"):
        assert printed.err.strip().removeprefix("weft: ") == refusal
        return
    assert ("Trainable: yes" in printed.out) == is_trainable
    assert is_trainable or printed.out.endswith(f"\nTrainable: no. {refusal}\n")
    main(["data", "check", str(data), "--json", "--quiet"])
    found = json.loads(capsys.readouterr().out)
    assert (found["trainable"], found["reason"] is None) == (is_trainable, is_trainable)


def test_strict_fails_on_any_bad_file(tmp_path, capsys):
    data = str(damaged(tmp_path / "data", 1))
    assert main(["data", "check", data]) == 0
    assert "Trainable: yes, without the bad files: " in capsys.readouterr().out
    assert main(["data", "check", data, "--strict"]) == 3
    assert main(["data", "check", data, "--strict", "--no-decode"]) == 3


def test_splits_are_counted_and_a_test_set_is_not_read(tmp_path, capsys):
    for seed, (name, number) in enumerate({"train": 2, "val": 1, "test": 1}.items()):
        class_folders(tmp_path / name, number, first_seed=9 * seed)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 good in train/, classes 2: a 2, b 2",
        "2 good in val/, classes 2: a 1, b 1",
        "0 bad",
        "Not read: test/. After training: weft evaluate RUN DATA --split test.",
        f"Trainable: yes: weft train {tmp_path}",
    ]
    assert main(["data", "check", str(tmp_path / "train" / "a")]) == 3
    assert "2 good, but outside all class folders; not used in training" in capsys.readouterr().out
    (tmp_path / "train" / "a" / "large.png").write_bytes(bomb(1001))
    assert main(["data", "check", str(tmp_path), "--max-pixels", "1000000"]) == 3
    assert "bad   train/a/large.png: too-many-pixels" in capsys.readouterr().out


def test_links_are_followed_where_they_are_allowed_from_the_check_to_the_evaluation(tmp_path, capsys):
    data, out = str(linked(tmp_path / "data")), str(tmp_path / "run")
    assert main(["data", "check", data]) == 3
    assert "Not followed, links to folders outside: c. To read them, also in training: --f" in capsys.readouterr().out
    assert main(["data", "check", data, "--follow-links"]) == 0
    printed = capsys.readouterr().out
    assert "6 good, classes 3: a 2, b 2, c 2" in printed
    assert printed.endswith("/data --follow-links\n")
    tiny = ["--model", "levit_nano_32", "--epochs", "1", "--batch-size", "3", "--out", out, "--quiet"]
    assert main(["train", data, *tiny]) == 3
    assert (
        "must be inside it; links to the outside: c. Move the folders there, or follow links: --follow-links."
        in capsys.readouterr().err
    )
    assert main(["train", data, *tiny, "--follow-links"]) == 0
    assert main(["evaluate", out, data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("report: ")[1].split("\n", 1)[1])["n"] == 3


def test_a_file_of_series_is_checked_before_the_images_and_written_after_the_report(tmp_path, capsys, monkeypatch):
    data = str(class_folders(tmp_path / "data", 2))
    (tmp_path / "old.csv").touch()

    def fail(*_: object, **__: object) -> None:
        raise UsageError("no features")

    monkeypatch.setattr("weft.train.find_series", fail)
    assert main(["data", "check", data, "--series", str(tmp_path / "new.csv")]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith(f"Trainable: yes: weft train {data}\n")
    assert printed.err.endswith("no features\n")
    monkeypatch.setattr("weft.data.open.inspect", fail)
    for name, message in {
        "series.txt": "--series must name a CSV file, which --group reads; got",
        "old.csv": "--series must name a new file; ",
        "data/series.csv": "The output must be outside the data folder",
    }.items():
        assert main(["data", "check", data, "--series", str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == ""


def test_prepare(tmp_path, capsys):
    class_folders(tmp_path / "data", 5)
    arguments = ["data", "prepare", str(tmp_path / "data"), str(tmp_path / "packed")]
    assert main([*arguments, "--size", "16"]) == 0
    assert "8 images for training and 2 held out, in 2 shards" in capsys.readouterr().out
    assert main([*arguments, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 2
