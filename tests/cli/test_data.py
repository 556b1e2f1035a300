"""`weft data check`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.pictures import bomb, encoded, jpeg, photo
from tests.data.zoo import class_folders, digest
from weft.cli import main
from weft.cli.app import option_names

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
    assert digest(mixed) == before


def test_json(mixed: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(mixed), "--json"]) == 3
    fields = json.loads(capsys.readouterr().out)
    assert fields["classes"] == {"": {"cats": 3, "dogs": 4}}
    assert fields["copies"] == [["cats/0001.jpg", "dogs/cat.jpg"]]
    assert [(bad["key"], bad["reason"]) for bad in fields["bad"]] == [
        ("cats/cut.jpg", "truncated"),
        ("cats/two\nlines.jpg", "not-an-image"),
        ("dogs/empty.jpg", "zero-byte"),
    ]
    assert (fields["good"], fields["ignored"], fields["notes"], fields["skipped"]) == (
        7,
        {"txt": 1},
        {"gray": 1},
        {"hidden": 1},
    )


def folders(root: Path, **images: int) -> Path:
    for seed, (name, number) in enumerate(images.items()):
        class_folders(root, number, (name,), first_seed=100 * seed)
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


def empty(root: Path) -> Path:
    root.mkdir()
    return root


def split(root: Path, train: dict[str, int], val: dict[str, int]) -> Path:
    folders(root / "train", **train)
    folders(root / "val", **val)
    return root


def linked(root: Path) -> Path:
    folders(root.parent / "store", c=2)
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
DATA: dict[str, tuple[bool, Callable[[Path], Path]]] = {
    "two classes": (True, lambda root: folders(root, a=2, b=2)),
    "a class with one image": (True, lambda root: folders(root, a=1, b=3)),
    "a split": (True, lambda root: split(root, {"a": 2, "b": 2}, {"a": 1, "b": 1})),
    "a class without validation images": (True, lambda root: split(root, {"a": 2, "b": 2}, {"a": 1})),
    "few bad files": (True, lambda root: damaged(root, 2)),
    "a table": (True, lambda root: table(root, GOOD_ROWS)),
    "an empty folder": (False, empty),
    "one class": (False, lambda root: folders(root, a=4)),
    "no class folders": (False, lambda root: folders(root / "x", a=4) / "a"),
    "an empty class": (False, lambda root: folders(root, a=2, b=2, c=0)),
    "only empty classes": (False, lambda root: folders(root, a=0, b=0)),
    "linked classes": (False, linked),
    "a class only in val": (False, lambda root: split(root, {"a": 2, "b": 2}, {"a": 1, "c": 1})),
    "an empty val": (False, lambda root: split(root, {"a": 2, "b": 2}, {"a": 0})),
    "nothing to hold out": (False, lambda root: folders(root, a=1, b=1)),
    "many bad files": (False, lambda root: damaged(root, 5)),
    "a name with an escape sequence": (False, lambda root: folders(root, **{"a": 2, "b\x1b[31m": 2})),
    "a table without labels": (False, lambda root: table(root, "image\nphotos/a/0000.jpg\n")),
    "no such folder": (False, lambda root: root),
}


@pytest.mark.parametrize("case", DATA)
def test_the_verdict_is_that_of_training(
    case: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert found["trainable"] == is_trainable
    assert (found["reason"] is None) == is_trainable


def test_strict_fails_on_any_bad_file(tmp_path: Path, capsys: Capture) -> None:
    data = str(damaged(tmp_path / "data", 1))
    assert main(["data", "check", data]) == 0
    assert "Trainable: yes, without the bad files: " in capsys.readouterr().out
    assert main(["data", "check", data, "--strict"]) == 3
    assert main(["data", "check", data, "--strict", "--no-decode"]) == 3


def test_nothing_bad_is_success(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "train", 2)
    class_folders(tmp_path / "val", 1, first_seed=9)
    class_folders(tmp_path / "test", 1, first_seed=12)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 good in train/, classes 2: a 2, b 2",
        "2 good in val/, classes 2: a 1, b 1",
        "0 bad",
        "Not read: test/. After training: weft evaluate RUN DATA --split test.",
        f"Trainable: yes: weft train {tmp_path}",
    ]


def test_a_flat_folder_is_checked_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg())
    (tmp_path / "b.jpg").write_bytes(b"")
    assert main(["data", "check", str(tmp_path)]) == 3
    assert "1 good, but outside all class folders; not used in training" in capsys.readouterr().out


def test_max_pixels(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path, 2)
    (tmp_path / "a" / "large.png").write_bytes(bomb(1001))
    assert main(["data", "check", str(tmp_path)]) == 0
    assert main(["data", "check", str(tmp_path), "--max-pixels", "1000000"]) == 3
    assert "bad   a/large.png: too-many-pixels" in capsys.readouterr().out


def test_first_bytes_only(mixed: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(mixed), "--no-decode"]) == 3
    assert "2 bad: 1 not-an-image, 1 zero-byte" in capsys.readouterr().out


def test_links(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "data", 2)
    class_folders(tmp_path / "store", 2, ("c",), first_seed=9)
    (tmp_path / "data" / "c").symlink_to("../store/c")
    assert main(["data", "check", str(tmp_path / "data")]) == 3
    assert "Not followed, links to folders outside: c. To read them, also in training: --f" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "data"), "--follow-links"]) == 0
    printed = capsys.readouterr().out
    assert "6 good, classes 3: a 2, b 2, c 2" in printed
    assert printed.endswith("/data --follow-links\n")
    out = str(tmp_path / "run")
    tiny = ["--model", "levit_nano_32", "--epochs", "1", "--batch-size", "3", "--out", out, "--quiet"]
    assert main(["train", str(tmp_path / "data"), *tiny]) == 3
    assert main(["train", str(tmp_path / "data"), *tiny, "--follow-links"]) == 0
    assert main(["evaluate", out, str(tmp_path / "data"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("report: ")[1].split("\n", 1)[1])["n"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "/no/such/place"], 3, "The data directory must exist; '/no/such/place' does not."),
        (["check", "digits"], 2, "DATA must be a directory; got digits, which is part of scikit-learn"),
        (["check", ".", "--max-pixels", "0"], 2, "max_pixels must be a whole number at least 1; got '0'"),
        (
            ["check", ".", "--max-pixels", "1e8"],
            2,
            "must be a whole number at least 1; got '1e8'",
        ),
        (["check"], 2, "weft data check needs DATA; got none. Usage: weft data check DATA [options]. See: "),
        (
            ["prepare", "x"],
            2,
            "weft data prepare needs OUT; got none. Usage: weft data prepare DATA OUT [options]. See: ",
        ),
        (
            ["prepare", "x", "y", "--size", "big"],
            2,
            "--size must be a whole number; got 'big'. See: ",
        ),
        (["chek", "."], 2, "Unknown command of weft data 'chek'. Nearest: check, "),
    ],
)
def test_refusals(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == code
    assert message in capsys.readouterr().err


def test_prepare(tmp_path: Path, capsys: Capture) -> None:
    class_folders(tmp_path / "data", 5)
    assert main(["data", "prepare", str(tmp_path / "data"), str(tmp_path / "packed"), "--size", "16"]) == 0
    assert "8 images for training and 2 held out, in 2 shards" in capsys.readouterr().out
    assert main(["data", "prepare", str(tmp_path / "data"), str(tmp_path / "packed"), "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 2


def test_it_never_imports_torch(tmp_path: Path) -> None:
    class_folders(tmp_path, 2)
    code = "import sys; from weft.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "data", "check", str(tmp_path)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("name", "places"), [("check", 1), ("review", 1), ("prepare", 2)])
def test_an_option_of_another_command_is_refused(name: str, places: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = {command: set(option_names(f"data {command}")) for command in ("check", "review", "prepare")}
    others = {option for option in set.union(*options.values()) - options[name] if option.startswith("--")}
    assert len(others) >= 3
    for option in sorted(others):
        assert main(["data", name, *["x"] * places, option, "1"]) == 2
        assert f"Unknown option of weft data {name} '{option}'. Nearest: " in capsys.readouterr().err
