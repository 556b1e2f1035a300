"""Datasets of torchvision and Hugging Face, by name: classes, sides and pixels are the library's."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.data import open_data
from weft.data.library import TORCHVISION, _class_of
from weft.data.open import ALIASES
from weft.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


@pytest.fixture(autouse=True)
def _no_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true files have sums that these small ones cannot have."""
    from torchvision.datasets import CIFAR10, OxfordIIITPet

    for kind in (CIFAR10, OxfordIIITPet):
        monkeypatch.setattr(kind, "_check_integrity", lambda self: True, raising=False)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))


def cifar(root: Path) -> None:
    """The layout that torchvision downloads, with 60 images."""
    random = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for batch in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": random.integers(0, 255, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / batch).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"kind{i}" for i in range(10)]}))


def pets(root: Path) -> None:
    """The layout of Oxford-IIIT Pet: lists, and files named after breeds."""
    base = root / "oxford-iiit-pet"
    for folder in ("annotations", "images"):
        (base / folder).mkdir(parents=True)
    for split, count in (("trainval", 4), ("test", 2)):
        lines = []
        for number, breed in enumerate(("Abyssinian", "pug"), start=1):
            for i in range(count):
                (base / "images" / f"{breed}_{split}{i}.jpg").write_bytes(jpeg(10 * number + i))
                lines.append(f"{breed}_{split}{i} {number} 1 1")
        (base / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")


def cars(root: Path) -> None:
    """The devkit of Stanford Cars as torchvision expects it: MATLAB files of annotations, folders of images."""
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    names = np.array([f"Make Model {number} 2012" for number in range(3)], dtype=object)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names[None]})
    kinds = [(key, "O") for key in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
    for part, count, file in (
        ("train", 12, base / "devkit" / "cars_train_annos.mat"),
        ("test", 6, base / "cars_test_annos_withlabels.mat"),
    ):
        (base / f"cars_{part}").mkdir()
        rows = [(1, 1, 10, 10, 1 + number % 3, f"{number + 1:05}.jpg") for number in range(count)]
        for number, row in enumerate(rows):
            (base / f"cars_{part}" / row[-1]).write_bytes(jpeg(number + (1000 if part == "test" else 0)))
        savemat(file, {"annotations": np.array(rows, dtype=kinds)[None]})


PETS = {jpeg(10 * number + i): name for number, name in enumerate(("Abyssinian", "Pug"), start=1) for i in range(4)}
CARS = {jpeg(number): f"Make Model {number % 3} 2012" for number in range(12)}


@pytest.mark.parametrize(
    ("dataset", "alias", "make", "expected", "num_val"),
    [("OxfordIIITPet", "pets", pets, PETS, 4), ("StanfordCars", "cars", cars, CARS, 6)],
)
def test_files_are_read_as_they_are(dataset, alias, make, expected, num_val, tmp_path):
    make(tmp_path)
    for name in (f"torchvision:{dataset}?root={tmp_path}", alias):
        splits = open_data(name)
        samples = [splits.train.read(i) for i in range(len(splits.train))]
        assert {sample.data: splits.classes[sample.label] for sample in samples} == expected
        assert (len(splits.val), splits.classes, splits.is_given) == (num_val, sorted(set(expected.values())), True)


def test_pixels_in_memory_are_png_files(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    cifar(tmp_path)
    for name in (f"torchvision:CIFAR10?root={tmp_path}", "cifar10"):
        splits = open_data(name)
        assert (len(splits.train), len(splits.val), splits.is_given) == (50, 10, True)
        assert splits.classes == [f"kind{i}" for i in range(10)]
        pixels = np.asarray(Image.open(io.BytesIO(splits.val.read(3).data)))
        assert np.array_equal(pixels, CIFAR10(tmp_path, train=False).data[3])
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "cifar10")
    assert open_data("cifar10").classes == ["a", "b"], "a folder of that name comes first"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("pets", DataError, r"OxfordIIITPet must be in .* torchvision:OxfordIIITPet\?download=1"),
        ("torchvision:CIFAR1O", UsageError, r"'CIFAR1O'. Nearest: CIFAR10"),
        ("torchvision:CIFAR10?rot=x", UsageError, r"'rot'. Nearest: root"),
    ],
)
def test_names_without_data_say_what_to_do(name, error, words):
    with pytest.raises(error, match=words):
        open_data(name)


def test_every_alias_is_a_dataset_of_torchvision():
    assert set(ALIASES.values()) <= TORCHVISION.keys()


def test_only_a_test_split_may_hide_its_labels():
    feature = pytest.importorskip("datasets").ClassLabel(names=["a", "b"])
    assert _class_of(feature, 1, "x", "train") == "b"
    for value in (-1, None, 2):
        with pytest.raises(DataError, match=rf"an image of the split 'validation' has {value}"):
            _class_of(feature, value, "x", "validation", "val")
        assert _class_of(feature, value, "x", "test", "test") == ""
