"""Sources agree: the same images give the same classes, order and sides, and an added image moves no other."""

from __future__ import annotations

import csv
import json
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.data.pictures import jpeg, tar
from weft.data import ImageDataset, SplitPlan, eval_transform, library, make_loader, open_data
from weft.data.source import Source, sort_class_names
from weft.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

WORDS = {"train": "train", "val": "validation", "test": "test"}
CAPITALS = {"train": "Training", "val": "Valid", "test": "Testing"}
LAYOUTS = [("train",), ("train", "val"), ("train", "test"), ("train", "val", "test")]
NAMES = [("cat", "dog", "owl"), ("10", "2", "1")]


class Photo(NamedTuple):
    """An image with its class and side, and a name of its own."""

    side: str
    label: str
    name: str
    data: bytes


def photos(names: tuple[str, ...], sides: tuple[str, ...], per_class: int = 5) -> list[Photo]:
    """Different images, two a class for each side but `train`; the held-out ones in another order."""
    made = [
        Photo(side, name, f"{i}{number}{place}", jpeg(1000 * place + 100 * number + i))
        for place, side in enumerate(sides)
        for number, name in enumerate(names)
        for i in range(per_class if side == "train" else 2)
    ]
    train = [photo for photo in made if photo.side == "train"]
    held_out = [photo for photo in made if photo.side != "train"]
    random.Random(0).shuffle(held_out)
    return train + held_out


def by_side(made: list[Photo]) -> dict[str, list[Photo]]:
    return {side: [photo for photo in made if photo.side == side] for side in dict.fromkeys(p.side for p in made)}


def write_files(root: Path, made: list[Photo], folder_of: Callable[[str], str]) -> list[str]:
    """Write the images to folders of sides and classes; return their paths."""
    paths = [f"{folder_of(photo.side)}/{photo.label}/{photo.name}.jpg" for photo in made]
    for path, photo in zip(paths, made, strict=True):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(photo.data)
    return paths


def folder(root: Path, made: list[Photo], folder_of: Callable[[str], str] = WORDS.__getitem__, **_: Any) -> Path:
    write_files(root / "photos", made, folder_of)
    return root / "photos"


def table(root: Path, made: list[Photo], form: str = "csv", **_: Any) -> Path:
    paths = write_files(root, made, lambda side: "all")
    columns = {
        "image": paths,
        "label": [photo.label for photo in made],
        "split": [WORDS[photo.side].upper() for photo in made],
    }
    file = root / f"table.{form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), file)
        return file
    if form == "tsv":
        columns = {"Class": columns["label"], "Split": columns["split"], "Path": [f"{root}/{path}" for path in paths]}
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened, delimiter="\t" if form == "tsv" else ",")
        writer.writerows([columns, *zip(*columns.values(), strict=True)])
    return file


def shards(root: Path, made: list[Photo], ending: str = "cls", **_: Any) -> Path:
    for side, of_side in by_side(made).items():
        members = []
        for photo in of_side:
            text = json.dumps({"label": photo.label, "more": [1]}) if ending == "json" else f"{photo.label}\n"
            members += [(f"{photo.name}.jpg", photo.data), (f"{photo.name}.{ending}", text.encode())]
        tar(root / "shards" / f"photos_{WORDS[side]}-000.tar", members)
    return root / "shards"


def folders_in_a_shard(root: Path, made: list[Photo], **_: Any) -> Path:
    members = [(f"photos/{WORDS[p.side].title()}/{p.label}/scan.{p.name}.jpg", p.data) for p in made]
    return tar(root / "photos.tar", members)


def class_number(photo: Photo, names: list[str]) -> int:
    return names.index(photo.label) if photo.label else -1


def parquet_of_images(root: Path, made: list[Photo], *, names: list[str], several: bool = False, **_: Any) -> Path:
    """As the hub stores them: images as bytes, labels as numbers, class names in the metadata."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}

    def write(of_file: list[Photo], path: Path, **split: list[str]) -> None:
        images = [{"bytes": photo.data, "path": f"{photo.name}.jpg"} for photo in of_file]
        labels = [class_number(photo, names) for photo in of_file]
        made = pyarrow.table({"image": pyarrow.array(images, struct), "label": labels, **split})
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(made, path, row_group_size=4)

    if not several:
        write(made, root / "photos.parquet", split=[WORDS[photo.side] for photo in made])
        return root / "photos.parquet"
    for side, of_side in by_side(made).items():
        for part in (0, 1):
            write(of_side[part::2], root / "data" / f"{WORDS[side]}-0000{part}-of-00002.parquet")
    return root / "data"


def hf(root: Path, made: list[Photo], *, names: list[str], monkeypatch: pytest.MonkeyPatch, named: bool = True) -> str:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=names) if named else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    parts = {}
    for side, of_side in by_side(made).items():
        images = [{"bytes": photo.data, "path": None} for photo in of_side]
        labels = [class_number(photo, names) if named else photo.label for photo in of_side]
        parts[WORDS[side]] = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(parts))
    return "hf:photos"


def hf_folder(root: Path, made: list[Photo], *, monkeypatch: pytest.MonkeyPatch, **_: Any) -> str:
    """The true `load_dataset`."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", root / "hf")
    return f"hf:imagefolder?data_dir={folder(root, made)}"


def torchvision(root: Path, made: list[Photo], *, names: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
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


SOURCES: dict[str, Callable[..., Any]] = {
    "folder": folder,
    "capital folder": partial(folder, folder_of=CAPITALS.__getitem__),
    "prefixed folder": partial(folder, folder_of="seg_{0}/seg_{0}".format),
    "csv": table,
    "tsv": partial(table, form="tsv"),
    "parquet of paths": partial(table, form="parquet"),
    "shards": shards,
    "shards with json": partial(shards, ending="json"),
    "folders in a shard": folders_in_a_shard,
    "parquet of images": parquet_of_images,
    "parquet files": partial(parquet_of_images, several=True),
    "hf": hf,
    "hf with texts": partial(hf, named=False),
    "hf folder": hf_folder,
    "torchvision": torchvision,
}
CASES = [
    (source, sides, names)
    for source in SOURCES
    for sides in LAYOUTS
    for names in (NAMES[:1] if source == "hf folder" else NAMES)  # a library's own order of names stays
    if source != "torchvision" or len(sides) == 2
]
MOVED = ("tsv", "parquet of images", "parquet files")  # their keys have the folder of the test, or numbers of rows
STABLE = [name for name in SOURCES if name.split()[0] not in ("hf", "torchvision") and name not in MOVED]


def contents(*sources: Source) -> list[tuple[str, bytes]]:
    return sorted((side.classes[side.read(i).label], side.read(i).data) for side in sources for i in range(len(side)))


def of_side(made: list[Photo], side: str) -> list[tuple[str, bytes]]:
    return sorted((photo.label, photo.data) for photo in made if photo.side == side)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))

    def run(source: str, made: list[Photo], place: str = "data") -> Any:
        (tmp_path / place).mkdir()
        names = sort_class_names({photo.label for photo in made} - {""})
        return SOURCES[source](tmp_path / place, made, names=names, monkeypatch=monkeypatch)

    return run


@pytest.mark.parametrize(("source", "sides", "names"), CASES)
def test_every_source_gives_the_same_classes_and_sides(source, sides, names, write):
    made = photos(names, sides)
    data = write(source, made)
    splits = open_data(data)
    assert splits.classes == splits.train.classes == splits.val.classes == sort_class_names(names)
    if len(sides) == 1:
        assert contents(splits.train, splits.val) == of_side(made, "train")
        assert (len(splits.train), len(splits.val), splits.is_given) == (12, 3, False)
    else:
        assert splits.is_given
        assert contents(splits.train) == of_side(made, "train")
        assert contents(splits.val) == of_side(made, "val" if "val" in sides else "test")
        noted = [note for note in splits.notes if note.endswith("weft evaluate RUN DATA --split test.")]
        assert len(noted) == (len(sides) == 3), "images that are not read are named"
    if source == "torchvision":
        return
    copy = pickle.loads(pickle.dumps(splits))  # as spawned worker processes receive it
    assert contents(copy.train, copy.val) == contents(splits.train, splits.val)
    if "test" in sides:
        assert contents(open_data(data, test=True, evaluate_only=True).val) == of_side(made, "test")
    elif "val" in sides:
        with pytest.raises(DataError, match="--split test needs a dataset with a test split; this one has train, val"):
            open_data(data, test=True)


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "torchvision"])
def test_truncated_images_are_left_out_on_their_side_and_move_no_other(source, write):
    made = photos(("cat", "dog"), ("train", "val"), per_class=10)
    for place in (3, -1):
        made[place] = made[place]._replace(data=made[place].data[:500])
    splits = open_data(write(source, made))
    assert sorted((bad.reason, bad.split) for bad in splits.bad) == [("truncated", "train"), ("truncated", "val")]
    assert contents(splits.train) == of_side([*made[:3], *made[4:]], "train")
    assert contents(splits.val) == of_side(made[:-1], "val")


@pytest.mark.parametrize("options", [{}, {"folds": 5, "fold": 2}], ids=["split", "fold"])
@pytest.mark.parametrize("source", STABLE)
def test_an_added_image_moves_at_most_one_of_its_class(source, options, write):
    """Only where the number of held-out images of its class grows by one."""
    made = photos(("ant", "bee", "cow"), ("train",), per_class=15)
    added = Photo("train", "bee", "added", jpeg(99))

    def sides(data: Any) -> dict[tuple[str, bytes], str]:
        splits = open_data(data, SplitPlan(seed=3, **options))
        return {image: side for side in ("train", "val") for image in contents(getattr(splits, side))}

    before, after = sides(write(source, made)), sides(write(source, [added, *reversed(made)], "grown"))
    assert before.keys() == set(of_side(made, "train"))
    assert after.keys() == {*before, ("bee", added.data)}
    moved = [image for image in before if before[image] != after[image]]
    assert {label for label, _ in moved} <= {"bee"}
    if not options:  # ranks of a class are dealt to five folds in turn: the next in rank may follow into another fold
        assert len(moved) <= 1
        held_out = sorted(label for (label, _), side in before.items() if side == "val")
        assert held_out == sorted(["ant", "bee", "cow"] * 3)


@pytest.mark.parametrize("source", ["csv", "shards"])
def test_worker_processes_read_the_same(source, write):
    """An open file that is forked would share its place."""
    splits = open_data(write(source, photos(("cat", "dog"), ("train",))))
    transform = eval_transform({"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0})
    batches = []
    for workers in (0, 2):
        loader = make_loader(ImageDataset(splits.train, transform), 2, shuffle=True, workers=workers)
        batches.append(torch.cat([images for images, _ in loader]))
    assert torch.equal(*batches)


@pytest.mark.parametrize("source", ["csv", "parquet of images", "hf"])
def test_hidden_labels_of_a_test_split_stop_nothing_else(source, write):
    made = photos(("cat", "dog"), ("train", "test"))
    data = write(source, [photo._replace(label="" if photo.side == "test" else photo.label) for photo in made])
    splits = open_data(data)
    assert contents(splits.train, splits.val) == of_side(made, "train")
    assert any(note.startswith("Not read: 4 images of test.") for note in splits.notes)
    with pytest.raises(DataError, match="Every image of the test split must have a class; 4 images have none"):
        open_data(data, test=True)


def test_other_subsets_of_a_library_are_named(write, monkeypatch):
    made = photos(("cat", "dog"), ("train", "val"))
    write("hf", made)
    import datasets

    parts = datasets.load_dataset("photos")
    parts["extra"] = parts["train"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: parts)
    splits = open_data("hf:photos")
    assert contents(splits.train) == of_side(made, "train")
    assert "Not read: extra of hf:photos." in splits.notes
    assert contents(open_data("hf:photos?val=extra").val) == of_side(made, "train")
