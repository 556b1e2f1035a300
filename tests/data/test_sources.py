"""Tables, tar shards, torchvision, Hugging Face: the same pictures, by whatever way they come."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.pictures import jpeg
from weft.data import ImageDataset, eval_transform, make_loader, open_data
from weft.data.fingerprint import Fingerprint, difference, fingerprint
from weft.data.library import TORCHVISION, _class_of
from weft.data.open import ALIASES
from weft.data.prepare import prepare_data
from weft.data.shards import open_shards
from weft.data.source import Splits
from weft.errors import CheckpointError, DataError, StorageError, UsageError

PER_CLASS = 10
CLASSES = ("cat", "dog")


def files() -> dict[tuple[str, int], bytes]:
    return {(name, i): jpeg(100 * n + i) for n, name in enumerate(CLASSES) for i in range(PER_CLASS)}


def as_folder(root: Path) -> Path:
    for (name, i), data in files().items():
        path = root / "photos" / name / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root / "photos"


def as_csv(root: Path) -> Path:
    as_folder(root)
    rows = [f"photos/{name}/{i}.jpg,{name}" for name, i in files()]
    (root / "table.csv").write_text("image,label\n" + "\n".join(rows) + "\n")
    return root / "table.csv"


def as_tsv(root: Path) -> Path:
    as_folder(root)
    rows = [f"{name}\tnote\t{root}/photos/{name}/{i}.jpg" for name, i in files()]
    (root / "table.tsv").write_text("Class\tother\tPath\n" + "\n".join(rows) + "\n\n")
    return root / "table.tsv"


def as_parquet(root: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    as_folder(root)
    names = list(files())
    columns = {"filename": [f"photos/{name}/{i}.jpg" for name, i in names], "class": [name for name, _ in names]}
    parquet.write_table(pyarrow.table(columns), root / "table.parquet")
    return root / "table.parquet"


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def as_shards(root: Path, ending: str = "cls") -> str:
    """Two shards in the WebDataset layout."""
    for shard in range(2):
        with tarfile.open(root / f"part-{shard:02}.tar", "w") as archive:
            for number, ((name, _), data) in enumerate(list(files().items())[shard::2]):
                add(archive, f"{shard}{number:04}.jpg", data)
                text = json.dumps({"label": name, "more": [1]}) if ending == "json" else f"{name}\n"
                add(archive, f"{shard}{number:04}.{ending}", text.encode())
    return str(root / "part-{00..01}.tar")


def as_json_shards(root: Path) -> str:
    return as_shards(root, "json")


def as_class_shard(root: Path) -> Path:
    with tarfile.open(root / "all.tar", "w") as archive:
        for (name, i), data in files().items():
            add(archive, f"photos/{name}/{i}.jpg", data)
    return root / "all.tar"


def as_hf(root: Path) -> str:
    return f"hf:imagefolder?data_dir={as_folder(root)}"


def test_copies_are_noticed_in_shards_too(tmp_path: Path) -> None:
    shards = as_shards(tmp_path)
    with tarfile.open(tmp_path / "part-01.tar", "a") as archive:
        add(archive, "again.jpg", next(iter(files().values())))
        add(archive, "again.cls", b"elsewhere\n")
    (note,) = [note for note in open_data(shards, allow_empty_class=True).notes if "several classes" in note]
    assert "part-00.tar/00000.jpg = part-01.tar/again.jpg" in note


WAYS = (as_folder, as_csv, as_tsv, as_parquet, as_shards, as_json_shards, as_class_shard, as_hf)
NOISY = pytest.mark.filterwarnings("ignore")  # of other libraries


def contents(splits: Splits) -> set[tuple[str, bytes]]:
    sides = (splits.train, splits.val)
    return {(splits.classes[side.read(i).label], side.read(i).data) for side in sides for i in range(len(side))}


@NOISY
@pytest.mark.parametrize("way", WAYS)
def test_the_same_pictures_by_every_way(way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))
    splits = open_data(way(tmp_path))
    assert splits.classes == list(CLASSES)
    expected = {(name, data) for (name, _), data in files().items()}
    assert contents(splits) == expected
    assert contents(pickle.loads(pickle.dumps(splits))) == expected  # as spawned worker processes receive it
    assert (len(splits.train), len(splits.val)) == (16, 4)
    assert not splits.is_given


@NOISY
@pytest.mark.parametrize("way", [as_csv, as_shards])
def test_worker_processes_read_the_same(way, tmp_path: Path) -> None:
    splits = open_data(way(tmp_path))
    cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    batches = []
    for workers in (0, 2):
        dataset = ImageDataset(splits.train, eval_transform({**cfg, "crop_pct": 1.0, "crop_mode": "center"}))
        batches.append(torch.cat([images for images, _ in make_loader(dataset, 4, shuffle=True, workers=workers)]))
    assert torch.equal(*batches)
    pickle.loads(pickle.dumps(splits.train.reader))("part-00.tar/00000.jpg") if way is as_shards else None


def test_a_table_with_splits(tmp_path: Path) -> None:
    as_folder(tmp_path)
    rows = [f"photos/{name}/{i}.jpg,{name},{'test' if i < 3 else 'train'}" for name, i in files()]
    (tmp_path / "table.csv").write_text("image,label,split\n" + "\n".join(rows))
    splits = open_data(tmp_path / "table.csv")
    assert (len(splits.train), len(splits.val), splits.is_given) == (14, 6, True)


def test_numbers_are_in_their_own_order(tmp_path: Path) -> None:
    as_folder(tmp_path)
    rows = [f"photos/{name}/{i}.jpg,{i}" for name, i in files()] + ["photos/cat/0.JPG,10"]
    (tmp_path / "photos" / "cat" / "0.JPG").write_bytes(jpeg(7))
    (tmp_path / "table.csv").write_text("image,label\n" + "\n".join(rows))
    assert open_data(tmp_path / "table.csv").classes == [str(number) for number in range(11)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image\na.jpg\n", r"must have a column 'label' \(or class, target, category\); .* has image\."),
        ("name,label\na,x\n", r"must have a column 'image' .* has name, label\. .*: --set data\.image=COLUMN"),
        ("image,label\na.jpg\n", r"must name an image and its class; row 2 of .* does not"),
        ("image,label\na.jpg,x\na.jpg,y\n", r"list every image once; row 3 of .* lists 'a\.jpg' again"),
        ("image,label,split\na.jpg,x,later\n", r"The split must be train, val or test; row 2 of .* has 'later'"),
        ("", r"has none"),
    ],
)
def test_tables_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "table.csv")


def test_files_that_only_look_like_tables(tmp_path: Path) -> None:
    (tmp_path / "table.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"that ends in \.parquet must be a Parquet file"):
        open_data(tmp_path / "table.parquet")
    with pytest.raises(DataError, match=r"must be readable; .*nowhere\.csv' is not \(No such file"):
        open_data(tmp_path / "nowhere.csv")


def test_bad_pictures_are_left_out_by_every_way(tmp_path: Path) -> None:
    table = as_csv(tmp_path)
    (tmp_path / "photos" / "cat" / "3.jpg").write_bytes(jpeg(1)[:500])
    (tmp_path / "photos" / "dog" / "4.jpg").unlink()
    splits = open_data(table, max_bad=0.5)
    assert sorted((bad.key, bad.reason) for bad in splits.bad) == [
        ("photos/cat/3.jpg", "truncated"),
        ("photos/dog/4.jpg", "missing"),
    ]
    assert len(splits.train) + len(splits.val) == 18


def test_shards_of_a_split_and_what_has_no_class(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for side, count in (("train", 8), ("val", 2)):
        with tarfile.open(shards / f"{side}-000.tar", "w") as archive:
            for name in CLASSES:
                for i in range(count):
                    add(archive, f"{name}{i}.png.jpg" if i else f"{name}{i}.jpg", jpeg(i))
                    add(archive, f"{name}{i}.cls", name.encode())
            add(archive, "lonely.jpg", jpeg(1))
    splits = open_data(shards)
    assert (len(splits.train), len(splits.val), splits.is_given) == (16, 4, True)
    assert [(bad.key, bad.reason) for bad in splits.bad] == [
        ("train-000.tar/lonely.jpg", "no-class"), ("val-000.tar/lonely.jpg", "no-class")
    ]  # fmt: skip


def test_hostile_archives_reach_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "secret.jpg"
    outside.write_bytes(jpeg(5))
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for (name, i), data in files().items():
            add(archive, f"{name}/{i}.jpg", data)
        add(archive, "../../cat/up.jpg", jpeg(6))
        add(archive, "/cat/absolute.jpg", jpeg(8))
        for kind, name in ((tarfile.SYMTYPE, "cat/link.jpg"), (tarfile.LNKTYPE, "cat/hard.jpg")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(outside)
            archive.addfile(member)
        member = tarfile.TarInfo("cat/device.jpg")
        member.type = tarfile.CHRTYPE
        archive.addfile(member)
    before = sorted(os.listdir(tmp_path))
    listing = open_shards(str(tmp_path / "evil.tar"))
    assert {picture.rpartition("/")[2] for picture in listing.keys} == {
        *(f"{i}.jpg" for i in range(PER_CLASS)), "up.jpg", "absolute.jpg"
    }  # fmt: skip
    assert listing.read("evil.tar/../../cat/up.jpg") == jpeg(6)  # a name in the archive, not a path
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone.tar", DataError, r"must be an uncompressed tar file; .*gone\.tar' cannot be read \(No such file"),
        ("part-{9..2}.tar", UsageError, r"must be ascending, with at most a million numbers; got '\{9\.\.2\}'"),
        ("https://example.com/x.tar", UsageError, r"must be a local path; got 'https://example\.com/x\.tar'"),
        ("file:///etc/x.tar", UsageError, "must be a local path"),
    ],
)
def test_shards_that_are_none(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        open_data(name if "://" in name else str(tmp_path / name))
    (tmp_path / "zip.tar").write_bytes(b"PK\x03\x04" * 500)
    with pytest.raises(DataError, match="must be an uncompressed tar file"):
        open_data(tmp_path / "zip.tar")


def cifar(root: Path, name: str = "CIFAR10") -> Path:
    """The layout that torchvision downloads, with 60 pictures."""
    random = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for batch in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": random.integers(0, 255, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / batch).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"kind{i}" for i in range(10)]}))
    return root


def pets(root: Path) -> Path:
    """The layout of Oxford-IIIT Pet: lists, and files named after breeds."""
    for folder in ("annotations", "images"):
        (root / "oxford-iiit-pet" / folder).mkdir(parents=True)
    for split, count in (("trainval", 4), ("test", 2)):
        lines = []
        for number, breed in enumerate(("Abyssinian", "pug"), start=1):
            for i in range(count):
                key = f"{breed}_{split}{i}"
                (root / "oxford-iiit-pet" / "images" / f"{key}.jpg").write_bytes(jpeg(10 * number + i))
                lines.append(f"{key} {number} 1 1")
        (root / "oxford-iiit-pet" / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@NOISY
def test_torchvision_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10, OxfordIIITPet

    for kind in (CIFAR10, OxfordIIITPet):  # the true files have sums that these small ones cannot have
        monkeypatch.setattr(kind, "_check_integrity", lambda self: True, raising=False)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    splits = open_data(f"torchvision:CIFAR10?root={cifar(tmp_path)}")
    assert (len(splits.train), len(splits.val), splits.is_given) == (50, 10, True)
    assert splits.classes == [f"kind{i}" for i in range(10)]
    theirs = CIFAR10(tmp_path, train=False)
    pixels = np.asarray(Image.open(io.BytesIO(splits.val.read(3).data)))
    assert np.array_equal(pixels, theirs.data[3])
    splits = open_data(f"torchvision:OxfordIIITPet?root={pets(tmp_path)}")
    assert (len(splits.train), len(splits.val), splits.classes) == (8, 4, ["Abyssinian", "Pug"])
    assert splits.train.read(0).data == jpeg(10)


@NOISY
def test_the_papers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    monkeypatch.setenv("WEFT_DATA", str(cifar(tmp_path / "data")))
    splits = open_data("cifar10")
    assert (len(splits.train), len(splits.val), len(splits.classes)) == (50, 10, 10)
    monkeypatch.chdir(tmp_path)
    as_folder(tmp_path)
    (tmp_path / "photos").rename(tmp_path / "cifar10")
    assert open_data("cifar10").classes == list(CLASSES)  # a folder of that name wins


def test_names_without_data_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"OxfordIIITPet must be in .* torchvision:OxfordIIITPet\?download=1"):
        open_data("pets")
    with pytest.raises(UsageError, match=r"Unknown torchvision dataset 'CIFAR1O'. Nearest: CIFAR10"):
        open_data("torchvision:CIFAR1O")
    with pytest.raises(UsageError, match=r"Unknown option after the question mark 'rot'. Nearest: root"):
        open_data("torchvision:CIFAR10?rot=x")


def test_every_alias_is_a_dataset_of_torchvision() -> None:
    assert set(ALIASES.values()) <= TORCHVISION.keys()


def test_a_fingerprint_tells_what_changed(tmp_path: Path) -> None:
    photos = as_folder(tmp_path)
    old = fingerprint(open_data(photos))
    old.write(tmp_path / "images.tsv.gz")
    assert Fingerprint.read(tmp_path / "images.tsv.gz") == old
    assert difference(old, fingerprint(open_data(photos))) is None
    (photos / "cat" / "3.jpg").write_bytes(jpeg(3) + b" ")
    assert difference(old, fingerprint(open_data(photos))) == "1 image changed (cat/3.jpg)."
    (photos / "dog" / "new.jpg").write_bytes(jpeg(77))
    found = difference(old, fingerprint(open_data(photos)))
    assert "1 image new (dog/new.jpg)" in found
    assert "changed (" in found
    (photos / "dog").rename(photos / "wolf")
    assert difference(old, fingerprint(open_data(photos))) == "1 class gone (dog), 1 class new (wolf)."


def test_a_fingerprint_that_is_damaged(tmp_path: Path) -> None:
    for damage in (b"", b"text", b"\x1f\x8b half"):
        (tmp_path / "images.tsv.gz").write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"must list the images of the run; it cannot be read"):
            Fingerprint.read(tmp_path / "images.tsv.gz")


def test_prepared_classes_keep_their_names(tmp_path: Path) -> None:
    """Also those that no folder can have, as in FGVC-Aircraft."""
    names = ["F-16A/B", "F/A-18", "left/other", "right/other", "..", "plain", "with space", "caf\u00e9.x"]
    rows = []
    for number, name in enumerate(names):
        for i in range(3):
            path = tmp_path / f"{number}-{i}.jpg"
            path.write_bytes(jpeg(10 * number + i))
            rows.append(f'{path.name},"{name}"')
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    before = open_data(tmp_path / "table.csv")
    prepare_data(tmp_path / "table.csv", tmp_path / "packed", 16)
    after = open_data(tmp_path / "packed")
    assert after.classes == before.classes == sorted(names)
    assert after.train.labels == before.train.labels


def test_the_data_stay_if_they_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = as_folder(tmp_path)
    prepare_data(photos, tmp_path / "packed", 16)
    first = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}

    def fail(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    monkeypatch.setattr("weft.files.rename", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        prepare_data(photos, tmp_path / "packed", 32, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()} == first
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    for number in range(60):
        with tarfile.open(tmp_path / f"{number:03}.tar", "w") as archive:
            add(archive, f"{CLASSES[number % 2]}/{number}.jpg", jpeg(number))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        splits = open_data(tmp_path)
        assert len([splits.train.read(i) for i in range(len(splits.train))]) == 48
        assert not splits.bad
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_hidden_labels_of_a_library_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    feature = datasets.ClassLabel(names=["a", "b"])
    assert _class_of(feature, 1, "x", "train") == "b"
    for value in (-1, None, 2):
        with pytest.raises(DataError, match=rf"an image of the split 'validation' has {value}"):
            _class_of(feature, value, "x", "validation", "val")
        assert _class_of(feature, value, "x", "test", "test") == ""


def test_links_in_a_circle_are_no_folders(tmp_path: Path) -> None:
    photos = as_folder(tmp_path)
    (photos / "circle").symlink_to(photos / "circle")
    assert open_data(photos).classes == list(CLASSES)


def test_prepared_once(tmp_path: Path) -> None:
    photos = as_folder(tmp_path)
    before = open_data(photos)
    done = prepare_data(photos, tmp_path / "packed", 16)
    after = open_data(tmp_path / "packed")
    assert (done["train"], done["val"]) == (len(before.train), len(before.val)) == (len(after.train), len(after.val))
    assert after.classes == before.classes
    assert after.is_given
    for i in range(len(before.train)):
        assert after.train.labels[i] == before.train.labels[i]
        assert min(Image.open(io.BytesIO(after.train.read(i).data)).size) == 16
    with pytest.raises(UsageError, match=r"must be new or empty; .*packed is neither"):
        prepare_data(photos, tmp_path / "packed", 16)
    first = [path.read_bytes() for path in sorted((tmp_path / "packed").iterdir())]
    prepare_data(photos, tmp_path / "packed", 16, force=True)
    assert [path.read_bytes() for path in sorted((tmp_path / "packed").iterdir())] == first
    (tmp_path / "packed" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"also holds 'mine\.txt'"):
        prepare_data(photos, tmp_path / "packed", 16, force=True)
    with pytest.raises(UsageError, match="size must be at least 8 pixels; got 4"):
        prepare_data(photos, tmp_path / "other", 4)
