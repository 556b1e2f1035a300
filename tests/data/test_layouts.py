"""Folders and names: which are classes, which are a split, and which are refused with what was seen."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.data import open_data
from weft.data.open import inspect, problem_of
from weft.data.split_names import split_folders, split_of
from weft.errors import DataError, UsageError
from weft.runs.directory import check_run_dir

PAIRS = [
    *(("Training", "Testing"), ("Train", "Test"), ("TRAIN", "VAL"), ("training", "validation"), ("train", "dev")),
    *(
        ("images_train", "images_test"),
        ("seg_train", "seg_test"),
        ("train_images", "test_images"),
        ("trainset", "valset"),
    ),
    *(
        ("train2017", "val2017"),
        ("flowers_train", "flowers_test"),
        ("TrainImages", "ValidImages"),
        ("train_set", "eval"),
    ),
]


@pytest.mark.parametrize(("train", "held_out"), PAIRS)
def test_the_usual_names_of_splits_are_read_in_any_form(train: str, held_out: str, tmp_path: Path) -> None:
    class_folders(tmp_path / train, 5, ("cat", "dog"))
    class_folders(tmp_path / held_out, 2, ("cat", "dog"), first_seed=50)
    splits = open_data(tmp_path)
    assert splits.classes == ["cat", "dog"]
    assert {key.split("/")[0] for key in splits.train.keys} == {train}
    assert {key.split("/")[0] for key in splits.val.keys} == {held_out}
    assert f"the dataset's own split, {train}/ and {held_out}/" in splits.notes[0]
    with pytest.raises(UsageError, match="The output must be outside the data folder"):
        check_run_dir(tmp_path / held_out / "run", str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["latest", "contest", "restaurant", "strain", "devil", "training_validation", "train-test", "invalid", "bus"],
)
def test_other_words_are_no_splits(name: str) -> None:
    assert split_of(name) == ""


@pytest.mark.parametrize("name", ["train", "test", "val", "Testing"])
def test_a_class_may_have_the_name_of_a_split(name: str, tmp_path: Path) -> None:
    class_folders(tmp_path / "flat", 5, ("bus", name))
    assert open_data(tmp_path / "flat").classes == sorted(["bus", name])
    class_folders(tmp_path / "split" / "train", 5, ("bus", name))
    class_folders(tmp_path / "split" / "val", 2, ("bus", name), first_seed=50)
    splits = open_data(tmp_path / "split")
    assert splits.classes == sorted(["bus", name])
    assert (len(splits.train), len(splits.val)) == (10, 4)


def test_of_several_folders_of_a_side_one_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "train_images", "val", "validation", "test", "extra")):
        class_folders(tmp_path / name, 3, ("cat", "dog"), first_seed=100 * seed)
    splits = open_data(tmp_path)
    assert {key.split("/")[0] for key in [*splits.train.keys, *splits.val.keys]} == {"train", "val"}
    assert "Not read, because train/ exists: extra/, train_images/, validation/." in splits.notes
    assert "Not read: test/. After training: weft evaluate RUN DATA --split test." in splits.notes
    assert split_folders(["bus_station", "train_station"]) == {}


def test_a_folder_of_unsorted_test_images_is_no_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 5, ("cat", "dog"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.jpg").write_bytes(jpeg(99))
    splits = open_data(tmp_path)
    assert (len(splits.train), len(splits.val), splits.is_given) == (8, 2, False)
    assert "Not read, because train/ exists: test/." in splits.notes
    with pytest.raises(DataError, match="--split test needs a dataset with a test split; this one has train"):
        open_data(tmp_path, test=True)


def test_folders_with_the_same_subfolders_are_refused_as_a_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "january", 3, ("cat", "dog"))
    class_folders(tmp_path / "june", 3, ("Cat", "dog", "owl"), first_seed=50)
    message = (
        r"in '.*' all have the same ones: january/ \(cat, dog\), june/ \(Cat, dog, owl\)\. If january, june are a"
        " split, name the folders train, val and test"
    )
    with pytest.raises(DataError, match=message):
        open_data(tmp_path)
    assert "all have the same ones" in problem_of(inspect(tmp_path))
    classes = ["january", "june"]
    assert open_data(tmp_path, classes=classes, evaluate_only=True).classes == classes, "the model's own classes"


def test_classes_with_other_subfolders_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "cat", 3, ("persian", "siamese"))
    class_folders(tmp_path / "dog", 3, ("poodle", "pug"), first_seed=50)
    note = (
        "No class folder has an image of its own, the images are in further folders: cat/ (persian, siamese), dog/"
        " (poodle, pug)."
    )
    assert note in open_data(tmp_path).notes
    assert note in inspect(tmp_path).remarks
    (tmp_path / "cat" / "own.jpg").write_bytes(jpeg(99))
    assert note not in open_data(tmp_path).notes


def test_one_common_subfolder_is_no_split(tmp_path: Path) -> None:
    for seed, name in enumerate(("cat", "dog")):
        class_folders(tmp_path / name, 3, ("images",), first_seed=50 * seed)
    assert open_data(tmp_path).classes == ["cat", "dog"]


def test_a_wrapper_folder_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos" / "dataset", 3, ("cat", "dog"))
    (tmp_path / "photos" / "readme.txt").write_text("")
    with pytest.raises(DataError, match=r"in 2 folders: cat, dog\. Did you mean .*photos/dataset\?"):
        open_data(tmp_path / "photos")
    class_folders(tmp_path / "archive" / "data" / "train", 3, ("cat", "dog"))
    class_folders(tmp_path / "archive" / "data" / "test", 3, ("cat", "dog"), first_seed=50)
    with pytest.raises(DataError, match=r"in 2 folders: test, train\. Did you mean .*archive/data\?"):
        open_data(tmp_path / "archive")
    class_folders(tmp_path / "inner" / "train" / "images", 3, ("cat", "dog"))
    with pytest.raises(DataError, match=r"in 2 folders: cat, dog\. Move the folders in images/ one level up"):
        open_data(tmp_path / "inner")


def test_numbered_folders_are_in_their_own_order(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 3, ("10", "9", "2"))
    assert open_data(tmp_path / "a").classes == ["2", "9", "10"]
    class_folders(tmp_path / "b", 3, ("10", "9", "two"))
    assert open_data(tmp_path / "b").classes == ["10", "9", "two"]


def test_images_next_to_what_is_read_are_counted(tmp_path: Path) -> None:
    for side in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / side / name).mkdir(parents=True)
            for i in range(3):
                (tmp_path / side / name / f"{i}.jpg").write_bytes(
                    jpeg(10 * len(side) + 100 * len(set(name) & set("cat")) + i)
                )
    (tmp_path / "loose.jpg").write_bytes(jpeg(1))
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "photos.tar", "w") as tar:
        for name in ("cat", "dog"):
            tar.add(tmp_path / "train" / name, name)
    (shards / "loose.png").write_bytes(jpeg(2))
    for data in (tmp_path, shards):
        assert any("Skipped: 1 beside" in note for note in open_data(data).notes), data


def test_bad_images_that_training_does_not_use_are_no_problem(tmp_path: Path) -> None:
    """`data check` refuses what training refuses, and nothing else."""
    class_folders(tmp_path, 5, ("cat", "dog"))
    for i in range(30):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i)[:200])
    assert problem_of(inspect(tmp_path)) == ""
    assert len(open_data(tmp_path).train) == 8


def test_a_bad_image_is_on_the_side_that_it_would_be_on(tmp_path: Path) -> None:
    """Also where the dataset has training images alone, of which some are held out."""
    class_folders(tmp_path / "train", 5, ("cat", "dog"))
    held_out = open_data(tmp_path).val.keys
    assert len(held_out) == 2
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        path.write_bytes(data[:100])
        (bad,) = open_data(tmp_path, max_bad=0.2).bad
        assert bad.split == ("val" if bad.key in held_out else "train")
        path.write_bytes(data)
