"""Sources agree: the same images give the same classes in the same order, and none changes its split unnoticed."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.data.pictures import jpeg
from weft.data import library, open_data
from weft.data.source import Source, Splits, sort_class_names
from weft.errors import DataError

WORDS = {"train": "train", "val": "validation", "test": "test"}
LAYOUTS = [("train",), ("train", "val"), ("train", "test"), ("train", "val", "test")]
NAMES = [("cat", "dog", "owl"), ("10", "2", "1")]


class Photo(NamedTuple):
    """An image with its class and side."""

    side: str
    label: str
    data: bytes


def photos(names: tuple[str, ...], sides: tuple[str, ...]) -> list[Photo]:
    """Different images, five a class for training and two for each other side; the held-out ones in another order."""
    made = [
        Photo(side, name, jpeg(1000 * place + 100 * number + i))
        for place, side in enumerate(sides)
        for number, name in enumerate(names)
        for i in range(5 if side == "train" else 2)
    ]
    train = [photo for photo in made if photo.side == "train"]
    held_out = [photo for photo in made if photo.side != "train"]
    random.Random(0).shuffle(held_out)
    return train + held_out


def write_files(root: Path, made: list[Photo], folder_of: Callable[[str], str]) -> list[str]:
    """Write the images to folders of sides and classes; return their paths."""
    paths = [f"{folder_of(photo.side)}/{photo.label}/{i:03}.jpg" for i, photo in enumerate(made)]
    for path, photo in zip(paths, made, strict=True):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(photo.data)
    return paths


def as_folder(root: Path, made: list[Photo], **_: Any) -> Path:
    write_files(root / "photos", made, lambda side: WORDS[side])
    return root / "photos"


def as_capital_folder(root: Path, made: list[Photo], **_: Any) -> Path:
    write_files(root / "photos", made, lambda side: {"train": "Training", "val": "Valid", "test": "Testing"}[side])
    return root / "photos"


def as_prefixed_folder(root: Path, made: list[Photo], **_: Any) -> Path:
    write_files(root / "photos", made, lambda side: f"seg_{side}/seg_{side}")
    return root / "photos"


def as_table(root: Path, made: list[Photo], **_: Any) -> Path:
    paths = write_files(root, made, lambda side: "all")
    with (root / "table.csv").open("w", newline="") as file:
        rows = [(path, photo.label, WORDS[photo.side].upper()) for path, photo in zip(paths, made, strict=True)]
        csv.writer(file).writerows([("image", "label", "split"), *rows])
    return root / "table.csv"


def as_shards(root: Path, made: list[Photo], **_: Any) -> Path:
    (root / "shards").mkdir()
    for side in dict.fromkeys(photo.side for photo in made):
        with tarfile.open(root / "shards" / f"photos_{WORDS[side]}-000.tar", "w") as archive:
            for i, photo in enumerate(made):
                for ending, data in (("jpg", photo.data), ("cls", photo.label.encode())):
                    member = tarfile.TarInfo(f"{i:04}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data)) if photo.side == side else None
    return root / "shards"


def as_folders_in_a_shard(root: Path, made: list[Photo], **_: Any) -> Path:
    with tarfile.open(root / "photos.tar", "w") as archive:
        for number, photo in enumerate(made):
            member = tarfile.TarInfo(f"photos/{WORDS[photo.side].title()}/{photo.label}/scan.{number}.jpg")
            member.size = len(photo.data)
            archive.addfile(member, io.BytesIO(photo.data))
    return root / "photos.tar"


def number(photo: Photo, names: list[str]) -> int:
    return names.index(photo.label) if photo.label else -1


def parquet_table(made: list[Photo], names: list[str], *, split: bool = False) -> Any:
    """A table as the hub stores it: images as bytes, labels as numbers, class names in the metadata."""
    pyarrow = pytest.importorskip("pyarrow")
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = [{"bytes": photo.data, "path": f"{i}.jpg"} for i, photo in enumerate(made)]
    columns = {"image": pyarrow.array(images, struct), "label": [number(photo, names) for photo in made]}
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    if split:
        columns["split"] = [WORDS[photo.side] for photo in made]
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def as_parquet(root: Path, made: list[Photo], *, names: list[str], **_: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(parquet_table(made, names, split=True), root / "photos.parquet", row_group_size=4)
    return root / "photos.parquet"


def as_parquet_files(root: Path, made: list[Photo], *, names: list[str], **_: Any) -> Path:
    from pyarrow import parquet

    (root / "data").mkdir()
    for side in dict.fromkeys(photo.side for photo in made):
        of_side = [photo for photo in made if photo.side == side]
        for part in (0, 1):
            table = parquet_table(of_side[part::2], names)
            parquet.write_table(table, root / "data" / f"{WORDS[side]}-0000{part}-of-00002.parquet")
    return root / "data"


def as_hf(
    root: Path, made: list[Photo], *, names: list[str], monkeypatch: pytest.MonkeyPatch, named: bool = True
) -> str:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=names) if named else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    parts = {}
    for side in dict.fromkeys(photo.side for photo in made):
        of_side = [photo for photo in made if photo.side == side]
        columns = {
            "image": [{"bytes": photo.data, "path": None} for photo in of_side],
            "label": [number(photo, names) if named else photo.label for photo in of_side],
        }
        parts[WORDS[side]] = datasets.Dataset.from_dict(columns, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(parts))
    return "hf:photos"


def as_hf_texts(root: Path, made: list[Photo], **options: Any) -> str:
    return as_hf(root, made, named=False, **options)


def as_torchvision(root: Path, made: list[Photo], *, names: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    paths = write_files(root, made, lambda side: side)
    held_out = next((photo.side for photo in made if photo.side != "train"), "")

    class Stub:
        def __init__(self, root: str, split: str) -> None:
            self.classes = names if split == "train" else names[::-1]
            of_side = [(path, photo) for path, photo in zip(paths, made, strict=True) if photo.side == split]
            self.samples = [(f"{root}/{path}", self.classes.index(photo.label)) for path, photo in of_side]
            self.targets = [label for _, label in self.samples]

    monkeypatch.setattr("torchvision.datasets.Stub", Stub, raising=False)
    monkeypatch.setitem(library.TORCHVISION, "Stub", ({"split": "train"}, {"split": held_out}))
    return f"torchvision:Stub?root={root}"


FILES = [as_folder, as_capital_folder, as_prefixed_folder, as_table, as_shards, as_folders_in_a_shard]
SOURCES = [*FILES, as_parquet, as_parquet_files, as_hf, as_hf_texts, as_torchvision]
CASES = [(source, sides) for source in SOURCES for sides in LAYOUTS if source is not as_torchvision or len(sides) == 2]


def contents(source: Source) -> list[tuple[str, bytes]]:
    return sorted((source.classes[source.read(i).label], source.read(i).data) for i in range(len(source)))


def of_side(made: list[Photo], side: str) -> list[tuple[str, bytes]]:
    return sorted((photo.label, photo.data) for photo in made if photo.side == side)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Splits]:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    root, address = tmp_path / "data", list[Any]()

    def run(source: Callable[..., Any], made: list[Photo], **options: Any) -> Splits:
        if not root.exists():
            root.mkdir()
            names = sort_class_names({photo.label for photo in made} - {""})
            address.append(source(root, made, names=names, monkeypatch=monkeypatch))
        return open_data(address[0], **options)

    return run


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.parametrize(("source", "sides"), CASES)
def test_every_source_gives_the_same_classes_and_sides(
    source: Callable[..., Any], sides: tuple[str, ...], names: tuple[str, ...], opened: Callable[..., Splits]
) -> None:
    made = photos(names, sides)
    splits = opened(source, made)
    assert splits.classes == splits.train.classes == splits.val.classes == sort_class_names(names)
    if len(sides) == 1:
        assert sorted(contents(splits.train) + contents(splits.val)) == of_side(made, "train")
        assert not splits.is_given
        return
    held_out = "val" if "val" in sides else "test"
    assert splits.is_given
    assert contents(splits.train) == of_side(made, "train")
    assert contents(splits.val) == of_side(made, held_out)
    noted = [note for note in splits.notes if note.endswith("weft evaluate RUN DATA --split test.")]
    assert len(noted) == (len(sides) == 3), "images that are not read are named"
    if source is as_torchvision:
        return
    if "test" in sides:
        assert contents(opened(source, made, test=True, evaluate_only=True).val) == of_side(made, "test")
    else:
        with pytest.raises(DataError, match="--split test needs a dataset with a test split; this one has train, val"):
            opened(source, made, test=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", [as_table, as_parquet, as_hf])
def test_hidden_labels_of_a_test_split_stop_nothing_else(
    source: Callable[..., Any], opened: Callable[..., Splits]
) -> None:
    made = photos(("cat", "dog"), ("train", "test"))
    hidden = [photo._replace(label="" if photo.side == "test" else photo.label) for photo in made]
    splits = opened(source, hidden)
    assert sorted(contents(splits.train) + contents(splits.val)) == of_side(made, "train")
    assert any(note.startswith("Not read: 4 images of test.") for note in splits.notes)
    with pytest.raises(DataError, match="Every image of the test split must have a class; 4 images have none"):
        opened(source, hidden, test=True)


@pytest.mark.filterwarnings("ignore")
def test_other_subsets_of_a_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = photos(("cat", "dog"), ("train", "val"))
    as_hf(tmp_path, made, names=["cat", "dog"], monkeypatch=monkeypatch)
    import datasets

    parts = datasets.load_dataset("photos")
    parts["extra"] = parts["train"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: parts)
    splits = open_data("hf:photos")
    assert contents(splits.train) == of_side(made, "train")
    assert "Not read: extra of hf:photos." in splits.notes
    assert contents(open_data("hf:photos?val=extra").val) == of_side(made, "train")
