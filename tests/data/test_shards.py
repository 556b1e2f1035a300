"""Tar shards: no image is lost, replaced or given another class without a sentence that says so."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import sqlite3
import tarfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import jpeg, tar
from weft.cli.app import main
from weft.data import inspect, open_data, shards
from weft.data.inventory import Inventory, digest_of
from weft.data.shards import open_shards, shard_paths
from weft.errors import DataError, UsageError

Members = list[tuple[str, bytes]]


def images(start: int = 0, number: int = 6, form: str = "{name}/{i}.jpg") -> Members:
    return [
        (form.format(name=name, i=i), jpeg(start + 100 * n + i))
        for n, name in enumerate(("cat", "dog"))
        for i in range(number)
    ]


def labelled(start: int = 0, number: int = 6) -> Members:
    members = images(start, number, "{name}{i}.jpg")
    return [part for name, data in members for part in ((name, data), (f"{name[:-4]}.cls", name[:3].encode()))]


def below(folder: str, members: Members) -> Members:
    return [(f"{folder}/{name}", data) for name, data in members]


def by_folder(members: Members) -> dict[str, str]:
    return {name.removeprefix("./"): name.split("/")[-2] for name, _ in members}


def found(*paths: Path, **options: Any) -> dict[str, tuple[str, bytes]]:
    """Return class and content of every image of shards by its name in the archive."""
    splits = open_data("{" + ",".join(map(str, paths)) + "}" if len(paths) > 1 else paths[0], max_bad=0.99, **options)
    samples = [side.read(i) for side in (splits.train, splits.val) for i in range(len(side))]
    return {one.key.partition(".tar/")[2]: (splits.classes[one.label], one.data) for one in samples}


def classes_of(data: Path) -> dict[str, str]:
    return {name: label for name, (label, _) in found(data).items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lists of shards, which also has those that were written just before."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "SETTLED_NS", 0)
    return tmp_path / "cache" / shards.FILE


def test_shards_of_one_name_in_two_folders_keep_all_images(tmp_path):
    for part in (0, 1):
        tar(tmp_path / f"part-{part}" / "train.tar", images(10 * part))
    splits = open_data(str(tmp_path / "part-{0..1}" / "train.tar"))
    sides = (splits.train, splits.val)
    contents = {side.read(i).data for side in sides for i in range(len(side))}
    assert contents == {data for part in (0, 1) for _, data in images(10 * part)}
    assert {key.partition("/")[0] for side in sides for key in side.keys} == {"part-0", "part-1"}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("s://h/{t-{00..01},v-{0..1}}.tar", [f"s://h/{x}.tar" for x in ("t-00", "t-01", "v-0", "v-1")]),
        ("{0..1}/{a,b{3..4}}.tar", [f"{i}/{x}.tar" for i in (0, 1) for x in ("a", "b3", "b4")]),
        ("x{y}.tar", ["x{y}.tar"]),
        ("x{y.tar", ["x{y.tar"]),
        ("x}.tar", ["x}.tar"]),
        ("file:///data/a.tar", ["/data/a.tar"]),
    ],
)
def test_braces_mean_several_shards(text, paths):
    assert shard_paths(text) == paths


def test_files_are_checked_under_their_own_names_next_to_a_test_split(tmp_path):
    for number, name in enumerate(("test", "train", "val")):
        tar(tmp_path / f"{name}-0.tar", images(1_000 * number))
    broken = images(1_000)[3][0]
    tar(tmp_path / "train-0.tar", [(name, data[:200] if name == broken else data) for name, data in images(1_000)])
    for _ in range(2):
        splits = open_data(tmp_path)
        assert [(bad.key, bad.reason) for bad in splits.bad] == [(f"train-0.tar/{broken}", "truncated")]
        for side in (splits.train, splits.val):
            assert list(side.digests) == [digest_of(side.read(i).data) for i in range(len(side))]


@pytest.mark.parametrize("content", [None, 7, "text", b"", *(zlib.compress(data) for data in (b"[]", b"{}", b"1"))])
def test_a_damaged_list_is_made_again(tmp_path, cache, content):
    data = tar(tmp_path / "a.tar", images())
    keys = open_data(data).train.keys
    with contextlib.closing(sqlite3.connect(cache)) as table, table:
        assert table.execute("UPDATE rows SET content = ?", (content,)).rowcount == 1
    assert open_data(data).train.keys == keys
    with contextlib.closing(sqlite3.connect(cache)) as table:
        ((replaced,),) = table.execute("SELECT content FROM rows")
    assert b"cat/0.jpg" in zlib.decompress(replaced)


@pytest.mark.usefixtures("cache")
def test_the_list_of_a_shard_is_made_again_if_the_shard_changes(tmp_path, monkeypatch):
    data = tar(tmp_path / "a.tar", [*images(), ("cat/notes.txt", b"x"), ("cat/.hidden", b"x")])
    first, notes = found(data), open_data(data).notes
    with monkeypatch.context() as without:
        without.setattr(shards.ShardContent, "read", None)
        assert (found(data), open_data(data).notes) == (first, notes)
    assert {"1 .txt", "1 hidden"} <= {part for note in notes for part in ("1 .txt", "1 hidden") if part in note}
    tar(data, images(50, number=7))
    assert {name: content for name, (_, content) in found(data).items()} == dict(images(50, number=7))


def test_a_file_that_a_later_one_replaces_is_counted(tmp_path):
    new = jpeg(77)
    data = tar(tmp_path / "a.tar", [*images(), ("cat/0.jpg", new), ("./cat/1.jpg", new)])
    inventory = inspect(data)
    assert (len(inventory.good), inventory.skipped) == (12, Counter(replaced=2))
    assert any("2 replaced (a file in a tar that a later one" in note for note in open_data(data).notes)
    assert [inventory.read(f"a.tar/cat/{i}.jpg") for i in range(3)] == [new, new, jpeg(2)]


def test_shards_next_to_those_of_a_split_are_named_or_refused(tmp_path, capsys):
    for number, name in enumerate(("train-0", "val-0", "extra")):
        tar(tmp_path / f"{name}.tar", images(20 * number))
    splits = open_data(tmp_path)
    assert (len(splits.train), len(splits.val), splits.is_given) == (12, 12, True)
    unread = "Not read, because other shards are for training: extra.tar."
    assert unread in splits.notes
    assert main(["data", "check", str(tmp_path)]) == 0
    assert unread in capsys.readouterr().out
    (tmp_path / "train-0.tar").rename(tmp_path / "train-0")
    with pytest.raises(DataError, match=r"\(val-0\.tar\), .* must begin with train; got extra\.tar"):
        open_data(tmp_path)
    (tmp_path / "train-0").rename(tmp_path / "train-0.tar")
    (tmp_path / "val-0.tar").unlink()
    assert {key.partition("/")[0] for key in open_data(tmp_path).train.keys} == {"train-0.tar"}


LABELLED = {f"{name}{i}.jpg": name for name in ("cat", "dog") for i in range(6)}
DOTS = [
    *(("2024.05.01.jpg", jpeg(50)), ("2024.05.02.jpg", jpeg(51)), ("2024.05.03", jpeg(52))),
    *(("2024.05.01.cls", b"cat"), ("2024.05.02.json", b'{"label": "dog"}')),
    *(("2024.05.03.txt", b"dog"), ("2024.05.03.json", b'{"label": "cat"}')),
]
MASKS = [(f"{name}{i}.mask.png", jpeg(200 + i)) for name in ("cat", "dog") for i in range(6)]
FORMS = ("{name}/Scan 2024.05.{i:02}.jpg", "./{name}/v1.{i}.tar.gz.JPG", "a.b/{name}/{i}..jpg")
CLASSES = {  # files, classes, a note
    **{form: (images(form=form), by_folder(images(form=form)), "") for form in FORMS},
    "the longest name": (
        [*labelled(), *DOTS],
        {**LABELLED, "2024.05.01.jpg": "cat", "2024.05.02.jpg": "dog", "2024.05.03": "cat"},
        "",
    ),
    "other metadata": ([*labelled(), ("cat0.json", b'{"width": 24}'), ("cat1.txt", b"a text")], LABELLED, "1 .json"),
    "masks": ([*labelled(), *MASKS], LABELLED, "12 same-sample (a further image with the same label file"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_label_files_or_folders_give_the_classes_in_any_order(case, tmp_path):
    members, expected, note = CLASSES[case]
    for seed in range(4):
        members = sorted(members) if seed == 0 else random.Random(seed).sample(members, len(members))
        data = tar(tmp_path / f"{seed}.tar", members)
        assert classes_of(data) == expected
        assert any(note in said for said in open_data(data).notes)


def test_an_image_without_label_gets_no_class_from_the_folder_of_labelled_ones(tmp_path):
    tar(tmp_path / "train-0.tar", below("pack", [*labelled(), ("lost.jpg", jpeg(9))]))
    tar(tmp_path / "val-0.tar", below("pack", [*labelled(50), ("lost.jpg", jpeg(8))]))
    splits = open_data(tmp_path)
    assert splits.classes == ["cat", "dog"]
    assert [(bad.key, bad.reason, bad.split) for bad in splits.bad] == [
        (f"{side}-0.tar/pack/lost.jpg", "no-class", side) for side in ("train", "val")
    ]


def test_hidden_and_system_files_are_skipped_and_counted_as_in_folders(tmp_path):
    apple = b"\0\5\26\7" + b"\0" * 100
    junk = ["photos/.DS_Store", "__MACOSX/photos/cat/0.jpg", "photos/cat/Thumbs.db", "photos/.cache/cat/1.jpg"]
    members = below("photos", images())
    hidden = [(f"{name.rpartition('/')[0]}/._{name.rpartition('/')[2]}", apple) for name, _ in members]
    members = [*hidden, *members, *((name, apple) for name in junk), ("photos/a.txt", b"x")]
    data = tar(tmp_path / "shards" / "mac.tar", members)
    inventory = inspect(data)
    assert (len(inventory.good), inventory.bad) == (12, [])
    assert (inventory.skipped, inventory.ignored) == (Counter(hidden=16), Counter(txt=1))
    (data.parent / "._mac.tar").write_bytes(apple)
    (data.parent / ".ipynb_checkpoints").mkdir()
    beside = inspect(data.parent)
    assert (beside.good, beside.bad, beside.skipped) == (inventory.good, [], Counter(hidden=18))


def test_a_shard_has_the_images_that_its_files_have_unpacked(tmp_path):
    """By content, as in folders: with and without extension, linked, and what is none."""
    folder = tmp_path / "photos"
    for name, data in images(form="{name}/{i:08x}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "cat" / "notes.md").write_text("none")
    (folder / "cat" / "text.jpg").write_text("none")
    (folder / "cat" / "hard.jpg").hardlink_to(folder / "cat" / "00000000")
    (folder / "cat" / "soft.jpg").symlink_to("00000001")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(folder, ".")
    of_folder, of_shard = inspect(folder), inspect(tmp_path / "photos.tar")
    assert set(of_shard.good) == {f"photos.tar/{entry}" for entry in of_folder.good}
    assert [bad.reason for bad in of_shard.bad] == [bad.reason for bad in of_folder.bad] == ["not-an-image"]
    assert (of_shard.ignored, of_shard.skipped) == (of_folder.ignored, of_folder.skipped)
    assert len(of_shard.good) == 13


def test_hostile_archives_reach_nothing(tmp_path):
    outside = tmp_path / "secret.jpg"
    outside.write_bytes(jpeg(5))
    evil = tar(tmp_path / "evil.tar", [*images(), ("../../cat/up.jpg", jpeg(6)), ("/cat/absolute.jpg", jpeg(8))])
    with tarfile.open(evil, "a") as archive:
        for kind, name in ((tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "hard"), (tarfile.CHRTYPE, "device")):
            member = tarfile.TarInfo(f"cat/{name}.jpg")
            member.type, member.linkname = kind, str(outside)
            archive.addfile(member)
    before = sorted(os.listdir(tmp_path))
    listing = open_shards(str(evil))
    names = {key.rpartition("/")[2] for key in listing.keys}
    assert names == {*(f"{i}.jpg" for i in range(6)), "up.jpg", "absolute.jpg"}
    assert listing.read("evil.tar/../../cat/up.jpg") == jpeg(6)  # a name in the archive, not a path
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone.tar", DataError, r"must be an uncompressed tar file; .*gone\.tar' cannot be read \(No such file"),
        ("zip.tar", DataError, "must be an uncompressed tar file"),
        ("pipe.tar", DataError, r"pipe\.tar' cannot be read \(it is not a file\)"),
        ("joined.tar", DataError, r"joined\.tar' cannot be read \(it has more content after its end marker"),
        ("part-{9..2}.tar", UsageError, r"must be ascending, with at most a million numbers; got '\{9\.\.2\}'"),
        ("file:///etc/x.tar", DataError, r"'/etc/x\.tar' cannot be read \(No such file"),
        ("{a,./a}.tar", UsageError, r"Every shard must be named once; got 'a\.tar' twice"),
        ("none://host/x.tar", UsageError, r"must be a URL that fsspec reads; Protocol not known: none"),
    ],
)
def test_shards_that_are_none_are_refused(name, error, message, tmp_path):
    tar(tmp_path / "a.tar", images())
    (tmp_path / "zip.tar").write_bytes(b"PK\x03\x04" * 500)
    os.mkfifo(tmp_path / "pipe.tar")
    joined = tar(tmp_path / "joined.tar", images())
    joined.write_bytes(2 * joined.read_bytes())
    with pytest.raises(error, match=message):
        open_data(name if "://" in name else str(tmp_path / name))


def test_more_shards_than_open_files(tmp_path):
    for number in range(60):
        tar(tmp_path / f"{number:03}.tar", [(f"{('cat', 'dog')[number % 2]}/{number}.jpg", jpeg(number))])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        splits = open_data(tmp_path)
        assert len([splits.train.read(i) for i in range(len(splits.train))]) == 48
        assert not splits.bad
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


FIELDS = {
    "name": (0, 100), "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12),
    "checksum": (148, 8), "type": (156, 1), "link": (157, 100), "magic": (257, 8), "owner": (265, 32),
    "group": (297, 32), "major": (329, 8), "minor": (337, 8), "prefix": (345, 155), "rest": (500, 12),
}  # fmt: skip
TYPES = b"0123456789ASLKDMNVXgx\0\xff"


def with_checksum(data: bytearray, start: int) -> bytearray:
    header = data[start : start + 512]
    header[148:156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return data


def members_of(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return archive.getmembers()


def values(length: int) -> list[bytes]:
    """Values of a field that readers have failed on: large, negative, not numbers."""
    numbers = (2**64 - 1, 2**63, 2**62, 2**40, -1, -512, -(2**62))
    binary = [(b"\x80" if n >= 0 else b"\xff") + n.to_bytes(11, "big", signed=True)[-11:] for n in numbers]
    texts = [b"77777777777", b"-1", b"-0001000", b"9x", b"\0" * 12, b" " * 12, b"\xff" * 12, b"\x80" + b"\xff" * 11]
    return [value[-length:].ljust(length, b"\0") for value in (*binary, *texts)]


def refusal(path: Path) -> tuple[str, Inventory | None]:
    """The sentence with which a shard is refused, or what it has; any other exception is a failure."""
    try:
        return "", inspect(path, decode=False)
    except DataError as error:
        return str(error), None


def test_whatever_a_header_says_gives_images_or_one_sentence(tmp_path):
    """Nothing but `DataError` with the name of the file; where a shard opens, at most the changed file is missing."""
    path = tar(tmp_path / "a.tar", images(number=2))
    plain, headers = path.read_bytes(), [member.offset for member in members_of(path)]
    random_bytes = random.Random(0).randbytes
    refused = 0
    for start in (headers[0], headers[2]):
        for name, (offset, length) in FIELDS.items():
            kinds = [bytes([kind]) for kind in TYPES]
            for value in kinds if name == "type" else [*values(length), random_bytes(length)]:
                data = bytearray(plain)
                data[start + offset : start + offset + length] = value
                path.write_bytes(data if name == "checksum" else with_checksum(data, start))
                message, inventory = refusal(path)
                if inventory is None:
                    assert re.search(r"A shard must be .*a\.tar' cannot be read \(.+\)", message), message
                    refused += 1
                else:
                    counted = len(inventory.good) + len(inventory.bad) + inventory.skipped.total()
                    assert counted + inventory.ignored.total() >= 3, (name, value)
    assert refused > 50


def test_extended_headers_with_hostile_values(tmp_path):
    path = tmp_path / "a.tar"
    for key in ("size", "path", "mtime", *(f"GNU.sparse.{key}" for key in ("map", "size", "major", "realsize"))):
        for value in ("-512", "99999999999999999999", "nan", "", "\n", "1e9", "," * 50):
            with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
                for name, data in images(number=2):
                    member = tarfile.TarInfo(name)
                    member.size, member.pax_headers = len(data), {key: value}
                    archive.addfile(member, io.BytesIO(data))
            message, inventory = refusal(path)
            assert "a.tar" in message or inventory is not None


def test_a_shard_that_is_torn_anywhere_is_reported(tmp_path, capsys):
    path = tar(tmp_path / "a.tar", images(number=2))
    plain, last = path.read_bytes(), members_of(path)[-1]
    for place in range(0, last.offset_data + -(-last.size // 512) * 512, 256):
        path.write_bytes(plain[:place])
        message, inventory = refusal(path)
        assert "a.tar" in (message if inventory is None else inventory.bad[0].message), place
    path.write_bytes(plain[: last.offset])  # the last image is gone, and nothing else is torn
    (bad,) = inspect(path).bad
    assert (bad.key, bad.reason) == ("a.tar", "truncated")
    assert bad.message == "a.tar has no end marker: its last images may be missing. Copy it again."
    main(["data", "check", str(path)])
    assert f"bad   {bad.message}\n" in capsys.readouterr().out


def test_a_folder_named_like_a_shard_is_a_folder(tmp_path):
    folder = tmp_path / "photos.tar"
    folder.mkdir()
    with pytest.raises(DataError, match=r"must contain images; '.*/photos\.tar' contains none"):
        open_data(folder)
    for name, data in images():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    assert sorted(inspect(folder).keys) == sorted(name for name, _ in images())


def test_sparse_files_are_reported(tmp_path):
    path = tar(tmp_path / "a.tar", images())
    data = bytearray(path.read_bytes())
    data[156:157] = b"S"  # type of the first file
    path.write_bytes(with_checksum(data, 0))
    assert [(bad.key, bad.reason) for bad in inspect(path).bad] == [("a.tar/cat/0.jpg", "damaged")]


@pytest.mark.parametrize("wrapper", ["", "photos/", "./a/photos/"])
@pytest.mark.parametrize("names", ["train val test", "Training Valid Testing", "imgs_train - imgs_test"])
@pytest.mark.parametrize("form", [images, labelled])
def test_folders_of_a_split_in_a_shard_are_a_split(wrapper, names, form, tmp_path):
    train, val, test = names.split()
    sides = [below(wrapper + name, form(100 * place)) for place, name in enumerate((train, val, test)) if name != "-"]
    data = tar(tmp_path / "photos.tar", [member for side in sides for member in side])
    splits = open_data(data)
    assert splits.is_given
    assert len(splits.train) == len(splits.val) == 12
    assert all(f"/{train}/" in key for key in splits.train.keys)
    assert all(f"/{test if val == '-' else val}/" in key for key in splits.val.keys)
    assert any("images of test" in note for note in splits.notes) == (val != "-")
    assert all(f"/{test}/" in key for key in open_data(data, test=True).val.keys)


def test_folders_in_a_shard_next_to_its_split_are_named(tmp_path):
    members = [member for i, top in enumerate(("train", "val", "more")) for member in below(top, images(9 * i))]
    splits = open_data(tar(tmp_path / "photos.tar", members))
    assert not any("/more/" in key for key in [*splits.train.keys, *splits.val.keys])
    assert any("more/" in note and "Not read" in note for note in splits.notes)


@pytest.mark.parametrize(
    "form",
    ["{name}/{i}.jpg", "{name}/{name}-{i}/{i}.jpg", "{name}/x/{i}.jpg", "p/{name}/{i}.jpg", "p/{name}/{name}/{i}.jpg"],
)
def test_folders_in_class_folders_are_no_classes(form, tmp_path):
    outside = [("p/cover.jpg", jpeg(99))] if form.startswith("p/") else []
    splits = open_data(tar(tmp_path / "photos.tar", [*images(form=form), *outside]), max_bad=0.2)
    assert len(splits.bad) == len(outside)
    assert splits.classes == ["cat", "dog"]
    further = [note for note in splits.notes if "further folders" in note]
    assert bool(further) == (form.count("/") - form.startswith("p/") > 1)
