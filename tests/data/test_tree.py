"""Hostile trees: every image once, an end in time, and a report that can be printed."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from tests.data.test_zoo import unprivileged
from tests.data.zoo import class_folders
from tests.helpers import counted_calls
from weft.data import inspect, open_data
from weft.data.open import check_exists
from weft.errors import DataError

OWN = ["a/0000.jpg", "b/0000.jpg"]


def link(root: Path, **targets: str) -> None:
    for place, target in targets.items():
        (root / "data" / place.replace("__", "/")).symlink_to(target)


def store(root: Path, place: str) -> None:
    class_folders(root / place, 1, ("c", "d"), first_seed=50)


def twice(root: Path) -> None:
    (root / "store").write_bytes(jpeg(9))
    link(root, a__x="../../store", b__y="../../store")


def outside(root: Path) -> None:
    store(root, "store")
    link(root, c="../store/c")


def hidden(root: Path) -> None:
    store(root, "data/.store")
    link(root, c=".store/c", a__x=".././.store/d/0000.jpg")


def junk(root: Path) -> None:
    for name in (".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir"):
        store(root, f"data/{name}")


TREES = {  # what is added; images found besides `OWN`, also with links followed; what is skipped
    "loops": (lambda root: link(root, a__loop="..", a__self=".", b__other="../a"), [], [], {"link-to-listed": 3}),
    "a circle": (lambda root: link(root, circle="circle"), [], [], {"broken-link": 1}),
    "the folder above": (lambda root: link(root, a__parent=str(root)), [], [], {"link-out": 1}),
    "one image twice": (twice, ["a/x"], ["a/x"], {"link-to-listed": 1}),
    "outside": (outside, [], ["c/0000.jpg"], {"link-out": 1}),
    "a hidden store": (hidden, ["a/x", "c/0000.jpg"], ["a/x", "c/0000.jpg"], {"hidden": 1}),
    "junk": (junk, [], [], {"hidden": 4}),
    "hard links": (lambda root: os.link(root / "data/a/0000.jpg", root / "data/a/1"), ["a/1"], ["a/1"], {}),
}


@pytest.mark.parametrize("case", TREES)
def test_each_image_is_listed_once_and_the_walk_ends(case, tmp_path):
    add, found, followed, skipped = TREES[case]
    data = class_folders(tmp_path / "data", 1)
    add(tmp_path)
    inventory = inspect(data)
    assert inventory.good == sorted([*OWN, *found])
    assert inventory.skipped == Counter(skipped)
    assert inventory.classes_outside == (["c"] if case == "outside" else [])
    assert inventory.classes == {"": ["a", "b", *(["c"] if "c/0000.jpg" in found else [])]}
    assert inspect(data, follow_links=True).good == sorted([*OWN, *followed])
    (tmp_path / "link").symlink_to("data")  # the root may be a link
    assert inspect(tmp_path / "link").good == inventory.good


def test_pipes_sockets_and_links_to_them_are_never_opened(tmp_path, monkeypatch):
    a = class_folders(tmp_path / "data", 1) / "a"
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(a / "pipe.jpg")
    os.mkfifo(a / "pipe")
    for name in ("x.jpg", "x"):
        (a / name).symlink_to("../../pipe")
    for one, other in (("one", "two"), ("two", "one")):
        (a / f"{one}.jpg").symlink_to(f"{other}.jpg")
    monkeypatch.chdir(a)
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind("socket.png")
    inventory = inspect(tmp_path / "data")
    bad = {"one.jpg": "missing", "two.jpg": "missing"}
    bad |= dict.fromkeys(("pipe.jpg", "socket.png", "x.jpg"), "not-a-file")
    assert {file.key: file.reason for file in inventory.bad} == {f"a/{name}": reason for name, reason in bad.items()}
    assert inventory.skipped == Counter(special=2)


def test_odd_names_survive_and_the_report_is_printable(tmp_path):
    odd = os.fsdecode(b"caf\xe9\xff.jpg")
    names = ["two\nlines.jpg", "y" * 251 + ".jpg", "\x1b[31mred.jpg", "\u202egpj.jpg", " .jpg", "日本.jpg"]
    (tmp_path / "a").mkdir()
    for name in names:
        (tmp_path / "a" / name).write_bytes(jpeg())
        (tmp_path / "a" / f"bad{name[:-100]}.jpg").write_bytes(b"")
    (tmp_path / "a" / odd).write_bytes(jpeg())
    (tmp_path / odd).mkdir()
    inventory = inspect(tmp_path)
    assert sorted(inventory.good) == sorted(f"a/{name}" for name in names)
    assert {bad.key for bad in inventory.bad if bad.reason == "not-utf-8"} == {odd, f"a/{odd}"}
    assert inventory.classes == {"": ["a"]}
    assert all(bad.message.isprintable() for bad in inventory.bad)
    text = json.dumps(inventory.as_dict())
    assert text.isascii()
    assert [bad["key"] for bad in json.loads(text)["bad"]] == [bad.key for bad in inventory.bad]


def test_deep_folders(tmp_path, monkeypatch):
    class_folders(tmp_path, 1)
    monkeypatch.chdir(tmp_path / "a")
    for _ in range(40):  # 40 names of 200 bytes: a longer path than the system opens
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    (tmp_path / "a" / "e" / "f" / "g").mkdir(parents=True)
    (tmp_path / "a" / "e" / "f" / "g" / "deep.jpg").write_bytes(jpeg(3))
    inventory = inspect(tmp_path)
    assert inventory.good == ["a/0000.jpg", "a/e/f/g/deep.jpg", "b/0000.jpg"]
    assert [(bad.key[:5], bad.reason) for bad in inventory.bad] == [("a/ddd", "unreadable")]


def test_folders_that_may_not_be_listed_are_bad_and_as_a_root_refused():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        class_folders(root, 1)
        inspect(root)  # imports what is imported late
        (root / "b").chmod(0)
        with unprivileged():
            (bad,) = inspect(root).bad
            for opened in (inspect, check_exists, open_data):
                with pytest.raises(DataError, match=rf"must be readable; '{name}/b' is not \(Permission denied\)"):
                    opened(root / "b")
        (root / "b").chmod(0o755)
    assert (bad.key, bad.reason) == ("b", "unreadable")
    assert bad.message == "b cannot be used: the operating system refused to read it (Permission denied)."


def test_the_work_grows_with_the_number_of_files_not_faster(tmp_path):
    data, work = jpeg(), []
    for count in (400, 800):
        for i in range(count):
            folder = tmp_path / str(count) / f"class{i // 100:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.jpg").write_bytes(data)
        with counted_calls() as calls:
            assert len(inspect(tmp_path / str(count), decode=False).good) == count
        work.append(calls.count)
    assert work[1] < 2.1 * work[0]
    assert work[1] < 300 * 800
