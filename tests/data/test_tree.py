"""Hostile trees: every picture once, an end in time, and a report that can be printed."""

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
from weft.data.tree import walk
from weft.errors import DataError


def keys(root, **options) -> list[str]:
    return inspect(root, **options).good


def test_a_loop_of_links_shows_each_picture_once(tmp_path):
    class_folders(tmp_path, 3)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "b" / "other").symlink_to("../a")
    inventory = inspect(tmp_path)
    assert inventory.good == [f"{c}/000{i}.jpg" for c in "ab" for i in range(3)]
    assert inventory.skipped == Counter({"link-to-listed": 3})


def test_two_links_that_point_at_each_other(tmp_path):
    class_folders(tmp_path, 1)
    (tmp_path / "a" / "one.jpg").symlink_to("two.jpg")
    (tmp_path / "a" / "two.jpg").symlink_to("one.jpg")
    assert [(bad.key, bad.reason) for bad in inspect(tmp_path).bad] == [
        ("a/one.jpg", "missing"),
        ("a/two.jpg", "missing"),
    ]


def test_a_link_to_a_file_outside_is_read(tmp_path):
    class_folders(tmp_path / "data", 1)
    (tmp_path / "store.jpg").write_bytes(jpeg(9))
    (tmp_path / "data" / "a" / "x.jpg").symlink_to(tmp_path / "store.jpg")
    (tmp_path / "data" / "b" / "y.jpg").symlink_to(tmp_path / "store.jpg")  # the same picture: once
    inventory = inspect(tmp_path / "data")
    assert inventory.good == ["a/0000.jpg", "a/x.jpg", "b/0000.jpg"]
    assert inventory.skipped == Counter({"link-to-listed": 1})


def test_a_linked_folder_outside_is_entered_only_on_request(tmp_path):
    class_folders(tmp_path / "data", 1)
    class_folders(tmp_path / "store", 2, ("c",), first_seed=50)
    (tmp_path / "data" / "c").symlink_to(tmp_path / "store" / "c")
    inventory = inspect(tmp_path / "data")
    assert (len(inventory.good), inventory.classes_outside) == (2, ["c"])
    assert inventory.skipped == Counter({"link-out": 1})
    assert keys(tmp_path / "data", follow_links=True)[2:] == ["c/0000.jpg", "c/0001.jpg"]


def test_following_links_comes_to_an_end(tmp_path):
    class_folders(tmp_path / "data", 1)
    (tmp_path / "data" / "a" / "parent").symlink_to(tmp_path)
    assert keys(tmp_path / "data", follow_links=True) == ["a/0000.jpg", "b/0000.jpg"]


def test_a_link_into_a_hidden_store_of_the_tree_is_read(tmp_path):
    class_folders(tmp_path, 1)
    class_folders(tmp_path / ".store", 1, ("c", "d"), first_seed=70)
    (tmp_path / "c").symlink_to(".store/c")
    (tmp_path / "a" / "x.jpg").symlink_to("../.store/d/0000.jpg")
    assert keys(tmp_path) == ["a/0000.jpg", "a/x.jpg", "b/0000.jpg", "c/0000.jpg"]


def test_hard_links_are_files_in_their_own_right(tmp_path):
    class_folders(tmp_path, 1)
    os.link(tmp_path / "a" / "0000.jpg", tmp_path / "a" / "same.jpg")
    assert keys(tmp_path) == ["a/0000.jpg", "a/same.jpg", "b/0000.jpg"]


def test_the_root_may_be_a_link(tmp_path):
    class_folders(tmp_path / "data", 1)
    (tmp_path / "link").symlink_to("data")
    assert keys(tmp_path / "link") == ["a/0000.jpg", "b/0000.jpg"]


def test_pipes_and_sockets_are_never_opened(tmp_path, monkeypatch):
    class_folders(tmp_path, 1)
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    os.mkfifo(tmp_path / "a" / "pipe")
    monkeypatch.chdir(tmp_path / "a")
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind("socket.png")
    inventory = inspect(tmp_path)
    assert [(bad.key, bad.reason) for bad in inventory.bad] == [
        ("a/pipe.jpg", "not-a-file"),
        ("a/socket.png", "not-a-file"),
    ]
    assert inventory.skipped == Counter({"special": 1})


def test_links_to_pipes_are_not_opened_either(tmp_path):
    class_folders(tmp_path / "data", 1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "data" / "a" / "x.jpg").symlink_to("../../pipe")
    (tmp_path / "data" / "a" / "x").symlink_to("../../pipe")
    inventory = inspect(tmp_path / "data")
    assert [(bad.key, bad.reason) for bad in inventory.bad] == [("a/x.jpg", "not-a-file")]
    assert inventory.skipped == Counter({"special": 1})


def test_hidden_folders_and_junk_are_no_classes(tmp_path):
    class_folders(tmp_path, 1)
    for name in (".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir"):
        class_folders(tmp_path / name, 1)
    inventory = inspect(tmp_path)
    assert inventory.classes == {"": ["a", "b"]}
    assert (len(inventory.good), inventory.skipped["hidden"]) == (2, 4)


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


def test_a_folder_that_may_not_be_listed():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        class_folders(root, 1)
        inspect(root)  # imports what is imported late
        (root / "b").chmod(0)
        with unprivileged():
            inventory = inspect(root)
        (root / "b").chmod(0o755)
    assert [(bad.key, bad.reason) for bad in inventory.bad] == [("b", "unreadable")]
    assert "b cannot be used: the operating system refused to read it (Permission denied)." == inventory.bad[0].message


def test_a_root_that_may_not_be_listed():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0)
        with (
            unprivileged(),
            pytest.raises(DataError, match=rf"must be readable; '{folder}' is not \(Permission denied\)"),
        ):
            inspect(folder)
        for opened in (check_exists, open_data):
            with unprivileged(), pytest.raises(DataError, match=r"must be readable; .* is not \(Permission denied\)"):
                opened(folder)
        os.chmod(folder, 0o700)


def test_only_some_of_the_root(tmp_path):
    class_folders(tmp_path, 1, ("train", "val", "other"))
    found = walk(str(tmp_path), only={"train", "val"})
    assert sorted(key for key, kind in found if kind == "file") == ["train/0000.jpg", "val/0000.jpg"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: None,
            r"must exist; '.*photos' does not\. Pass a folder with one folder of",
        ),
        (lambda path: path.write_bytes(b"x"), r"The data must be a directory; '.*photos' is not"),
        (lambda path: path.symlink_to("nowhere"), r"The data must be a directory; '.*photos' is not"),
    ],
)
def test_no_directory(tmp_path, make, message):
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        inspect(tmp_path / "photos")


def test_many_files_without_decoding(tmp_path):
    """The work grows with the number of files, not faster, and few calls are made for each."""
    data, work = jpeg(), []
    for count in (1_000, 2_000):
        for i in range(count):
            if i % 100 == 0:
                folder = tmp_path / str(count) / f"class{i // 100:03d}"
                folder.mkdir(parents=True)
            (folder / f"{i}.jpg").write_bytes(data)
        with counted_calls() as calls:
            inventory = inspect(tmp_path / str(count), decode=False)
        assert len(inventory.good) == count
        work.append(calls.count)
    assert work[1] < 2.1 * work[0]
    assert work[1] < 300 * 2_000
