"""Data directories as they come: what is accepted, how it is split, and what is refused in which words."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter

import pytest
from PIL import Image

from tests.data.pictures import jpeg
from tests.data.zoo import class_folders
from weft.data import SplitPlan, image_size_hint, open_data
from weft.errors import DataError, UsageError


def test_class_names_that_look_equal_are_refused(tmp_path) -> None:
    class_folders(tmp_path, 2, ("caf\u00e9", "cafe\u0301", "tea"))
    with pytest.raises(DataError, match=r"more than the Unicode form of a letter; 'cafe\\u0301' and 'caf\\xe9' are"):
        open_data(tmp_path)


def test_given_classes_are_matched_in_any_unicode_form(tmp_path) -> None:
    class_folders(tmp_path, 2, ("cafe\u0301", "tea"))
    splits = open_data(tmp_path, classes=["tea", "caf\u00e9"])
    assert splits.classes == ["tea", "caf\u00e9"]
    assert sorted((key[0], label) for key, label in zip(splits.train.keys, splits.train.labels, strict=True)) == [
        ("c", 1), ("t", 0)
    ]  # fmt: skip


def keys(source) -> list[str]:
    return [source.read(i).key for i in range(len(source))]


def labels(source) -> list[int]:
    return [source.read(i).label for i in range(len(source))]


@pytest.fixture
def photos(tmp_path):
    """20 pictures in each of three classes."""
    return class_folders(tmp_path, 20, ("cat", "dog", "owl"))


@pytest.fixture
def given(tmp_path):
    """A split that came with the data."""
    class_folders(tmp_path / "train", 4, ("cat", "dog", "owl"))
    class_folders(tmp_path / "val", 2, ("cat", "dog", "owl"), first_seed=50)
    return tmp_path


def test_without_a_split_one_is_made_and_said(photos):
    splits = open_data(photos)
    assert (len(splits.train), len(splits.val)) == (48, 12)
    assert splits.classes == splits.train.classes == splits.val.classes == ["cat", "dog", "owl"]
    assert Counter(labels(splits.val)) == {0: 4, 1: 4, 2: 4}
    assert sorted(keys(splits.train) + keys(splits.val)) == sorted(
        f"{name}/{i:04d}.jpg" for name in splits.classes for i in range(20)
    )
    assert splits.train.labels == labels(splits.train)
    assert not splits.is_given
    assert splits.notes == [
        "48 images in 3 classes for training, 12 held out: a stratified split of 20 % made with seed 0, "
        "because the dataset has none."
    ]


def test_read_gives_the_bytes_of_the_file(photos):
    splits = open_data(str(photos))
    sample = splits.train.read(7)
    assert sample.data == (photos / sample.key).read_bytes()
    assert sample.key.split("/")[0] == splits.classes[sample.label]


def test_the_split_is_a_function_of_the_seed_and_the_names(photos):
    assert keys(open_data(photos, SplitPlan(seed=3)).val) == keys(open_data(photos, SplitPlan(seed=3)).val)
    assert keys(open_data(photos, SplitPlan(seed=3)).val) != keys(open_data(photos, SplitPlan(seed=4)).val)
    before = set(keys(open_data(photos, SplitPlan(seed=3)).val))
    (photos / "cat" / "new.jpg").write_bytes(jpeg(99))
    after = set(keys(open_data(photos, SplitPlan(seed=3)).val))
    assert {key for key in before ^ after if not key.startswith("cat")} == set()
    assert len(before - after) <= 1


def test_a_fraction_is_kept_for_every_class(photos):
    assert Counter(labels(open_data(photos, SplitPlan(val_fraction=0.5)).val)) == {0: 10, 1: 10, 2: 10}
    assert Counter(labels(open_data(photos, SplitPlan(val_fraction=0.001)).val)) == {0: 1, 1: 1, 2: 1}
    assert Counter(labels(open_data(photos, SplitPlan(val_fraction=0.999)).train)) == {0: 1, 1: 1, 2: 1}


def test_the_datas_own_split(given):
    splits = open_data(given)
    assert (len(splits.train), len(splits.val), splits.is_given) == (12, 6, True)
    assert {key.split("/")[0] for key in keys(splits.train)} == {"train"}
    assert splits.notes == [
        "12 images in 3 classes for training, 6 held out: the dataset's own split, train/ and val/."
    ]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_names_of_the_held_out_folder(tmp_path, name):
    class_folders(tmp_path / "train", 3)
    class_folders(tmp_path / name, 2, first_seed=30)
    splits = open_data(tmp_path)
    assert keys(splits.val)[0] == f"{name}/a/0000.jpg"
    assert f"train/ and {name}/" in splits.notes[0]


def test_val_goes_before_test_which_is_not_read(given):
    class_folders(given / "test", 2, ("cat", "dog", "owl", "yak"), first_seed=80)
    splits = open_data(given)
    assert {key.split("/")[0] for key in keys(splits.val)} == {"val"}
    assert "Not read: test/. After training: weft evaluate RUN DATA --split test." in splits.notes
    shutil.rmtree(given / "test" / "yak")
    tested = open_data(given, test=True)
    assert {key.split("/")[0] for key in keys(tested.val)} == {"test"}


def test_train_alone_is_split(tmp_path):
    class_folders(tmp_path / "train", 10)
    splits = open_data(tmp_path)
    assert (len(splits.train), len(splits.val), splits.is_given) == (16, 4, False)
    assert "a stratified split of 20 % made with seed 0" in splits.notes[0]


def test_a_class_of_trains(tmp_path):
    class_folders(tmp_path, 5, ("bus", "train"))
    assert open_data(tmp_path).classes == ["bus", "train"]


def test_a_class_only_in_val_is_refused_by_name(tmp_path):
    class_folders(tmp_path / "train", 2, ("a", "b", "c"))
    class_folders(tmp_path / "val", 2, ("b", "c", "d"), first_seed=20)
    with pytest.raises(
        DataError, match=r"Every class of val/ must also be in train/; only in val/: d\. Add images of it"
    ):
        open_data(tmp_path)


def test_a_class_missing_from_val_is_noted_and_moves_no_index(tmp_path):
    class_folders(tmp_path / "train", 2, ("a", "b", "c"))
    class_folders(tmp_path / "val", 2, ("b", "c"), first_seed=20)
    splits = open_data(tmp_path)
    assert splits.val.classes == ["a", "b", "c"]
    assert labels(splits.val) == [1, 1, 2, 2]
    assert "No validation image of 1 class: a." in splits.notes


def test_an_empty_class_is_refused_by_name(photos):
    (photos / "ant").mkdir()
    (photos / "bee").mkdir()
    (photos / "bee" / "notes.txt").write_text("no picture")
    with pytest.raises(
        DataError, match=r"Every class must have at least one usable image; empty: ant, bee\. Add images"
    ):
        open_data(photos)


def test_an_empty_class_in_train_is_refused_even_if_val_has_it(given):
    for path in (given / "train" / "cat").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"at least one usable image in train/; empty: cat\."):
        open_data(given)


def test_an_empty_class_keeps_its_index_on_request(photos):
    (photos / "ant").mkdir()
    splits = open_data(photos, allow_empty_class=True)
    assert splits.classes == ["ant", "cat", "dog", "owl"]
    assert set(labels(splits.train)) == {1, 2, 3}
    assert "No validation image of 1 class: ant." in splits.notes


def test_a_class_of_bad_files_is_empty(photos):
    (photos / "ant").mkdir()
    (photos / "ant" / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty: ant\."):
        open_data(photos)


def test_one_class_is_refused(tmp_path):
    class_folders(tmp_path, 3, ("cat",))
    with pytest.raises(DataError, match=r"A classifier needs at least two classes; '.*' has one, 'cat'\. Add a folder"):
        open_data(tmp_path)


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"must exist; '.*/photoz' does not\. Pass a folder .* or the name digits"):
        open_data(tmp_path / "photoz")


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"The data directory must contain images; '.*' contains none\. Put one folder"):
        open_data(tmp_path)
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.cr3").write_bytes(b"\0\0\0\x18ftypcrx ")
    with pytest.raises(DataError, match=r"contains none \(but 1 \.cr3\)"):
        open_data(tmp_path)


def test_images_without_folders_are_refused(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    with pytest.raises(
        DataError, match=r"must contain one folder per class; '.*' has 1 image and no folder\. Sort the images"
    ):
        open_data(tmp_path)


def test_images_beside_the_class_folders_are_left_out_and_noted(photos):
    (photos / "cover.jpg").write_bytes(jpeg())
    splits = open_data(photos)
    assert len(splits.train) + len(splits.val) == 60
    assert "Not used, because outside all class folders: 1 image." in splits.notes


def test_a_class_folder_that_is_a_link_to_outside(tmp_path):
    class_folders(tmp_path / "data", 3)
    class_folders(tmp_path / "store", 3, ("c",), first_seed=30)
    (tmp_path / "data" / "c").symlink_to("../store/c")
    with pytest.raises(
        DataError, match=r"Folders of '.*' must be inside it; links to the outside: c\. .* --follow-links"
    ):
        open_data(tmp_path / "data")
    assert open_data(tmp_path / "data", follow_links=True).classes == ["a", "b", "c"]


def test_bad_files_are_left_out_counted_and_named(photos):
    for i, (name, data) in enumerate({"cat": b"", "dog": b"<html>", "owl": jpeg()[:500]}.items()):
        (photos / name / f"{i:04d}.jpg").write_bytes(data)
    splits = open_data(photos)
    assert len(splits.train) + len(splits.val) == 57
    assert [(bad.key, bad.reason) for bad in splits.bad] == [
        ("cat/0000.jpg", "zero-byte"),
        ("dog/0001.jpg", "not-an-image"),
        ("owl/0002.jpg", "truncated"),
    ]
    assert (
        "3 bad files excluded: 1 not-an-image, 1 truncated, 1 zero-byte (cat/0000.jpg, dog/0001.jpg, owl/0002.jpg)."
        in splits.notes
    )


def test_what_is_held_out_counts_without_its_bad_files(tmp_path):
    class_folders(tmp_path / "train", 50)
    class_folders(tmp_path / "val", 50, first_seed=200)
    for i in range(5):
        (tmp_path / "val" / "a" / f"{i:04d}.jpg").write_bytes(jpeg()[:500])
    splits = open_data(tmp_path)
    assert (len(splits.train), len(splits.val)) == (100, 95)
    assert [bad.split for bad in splits.bad] == ["val"] * 5


def test_a_made_split_knows_whose_the_bad_files_are(photos):
    held_out = keys(open_data(photos).val)
    for key in held_out[:2]:
        (photos / key).write_bytes(jpeg()[:500])
    splits = open_data(photos)
    assert [(bad.key, bad.split) for bad in splits.bad] == [(key, "val") for key in sorted(held_out[:2])]
    assert keys(splits.val) == held_out[2:]  # and nothing else has moved


def test_a_tenth_may_be_bad_and_not_more(photos):
    victims = sorted(photos.glob("*/*.jpg"))[::9][:7]
    for path in victims[:6]:
        path.write_bytes(b"")
    assert len(open_data(photos).bad) == 6
    victims[6].write_bytes(b"")
    message = (
        r"At most 0\.1 of the files may be bad; in '.*' 0\.117 are: 7 zero-byte \(cat/0000\.jpg, .* and 2 more\)\. List"
    )
    with pytest.raises(DataError, match=message):
        open_data(photos)
    assert len(open_data(photos, max_bad=0.12).bad) == 7


def test_a_limit_sees_the_share_of_bad_files_too(photos):
    for path in sorted(photos.glob("*/*.jpg"))[::2]:
        path.write_bytes(jpeg()[:500])
    with pytest.raises(DataError, match="may be bad"):
        open_data(photos, SplitPlan(limit=10))


def test_a_limit_takes_in_turn_from_every_class(photos):
    splits = open_data(photos, SplitPlan(limit=6))
    assert Counter(labels(splits.train)) == Counter(labels(splits.val)) == {0: 2, 1: 2, 2: 2}
    whole = open_data(photos)
    assert set(keys(splits.train)) <= set(keys(whole.train))
    assert set(keys(splits.val)) <= set(keys(whole.val))
    assert len(open_data(photos, SplitPlan(limit=2)).train) == 2  # fewer than classes: no error about empty ones


def test_a_fraction_of_every_class_and_all_that_is_held_out(photos):
    whole, half, tenth = (open_data(photos, SplitPlan(train_fraction=part)) for part in (1.0, 0.5, 0.01))
    counts = Counter(labels(whole.train))
    assert Counter(labels(half.train)) == {label: round(count / 2) for label, count in counts.items()}
    assert Counter(labels(tenth.train)) == dict.fromkeys(counts, 1)
    assert set(keys(tenth.train)) < set(keys(half.train)) < set(keys(whole.train))
    assert keys(half.val) == keys(tenth.val) == keys(whole.val)
    assert set(keys(half.train)) != set(keys(open_data(photos, SplitPlan(train_fraction=0.5, seed=1)).train))
    digits = open_data("digits", SplitPlan(train_fraction=0.1))
    assert 130 < len(digits.train) < 160
    assert len(digits.val) == len(open_data("digits").val)


def test_a_limit_decodes_no_more_than_it_takes(photos):
    seen = []
    open_data(photos, SplitPlan(limit=6), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(12, 12)]


def test_a_class_of_one_is_learnt_not_held_out(photos):
    class_folders(photos, 1, ("yak",), first_seed=90)
    splits = open_data(photos)
    assert 3 in labels(splits.train)
    assert 3 not in labels(splits.val)


def test_a_class_whose_training_picture_is_bad_keeps_the_held_out_one(photos):
    class_folders(photos, 2, ("yak",), first_seed=90)
    learnt = next(key for key in keys(open_data(photos).train) if key.startswith("yak"))
    (photos / learnt).write_bytes(jpeg()[:500])
    splits = open_data(photos)
    assert 3 in labels(splits.train)
    assert 3 not in labels(splits.val)


def test_two_single_pictures_are_too_few(tmp_path):
    class_folders(tmp_path, 1)
    with pytest.raises(
        DataError, match=r"usable images in both splits; the validation set of '.*' has none \(2 for training, 0"
    ):
        open_data(tmp_path)


def test_a_held_out_folder_without_images(given):
    for path in (given / "val").glob("*/*.jpg"):
        path.unlink()
    with pytest.raises(
        DataError, match=r"usable images in both splits; val/ of '.*' has none \(12 for training, 0 held out"
    ):
        open_data(given)


def test_labels_follow_a_list_of_classes(photos):
    splits = open_data(photos, classes=["zebra", "owl", "dog", "cat"])
    assert splits.classes == ["zebra", "owl", "dog", "cat"]
    assert {key.split("/")[0]: label for key, label in zip(keys(splits.val), labels(splits.val), strict=True)} == {
        "cat": 3,
        "dog": 2,
        "owl": 1,
    }


def test_a_class_that_is_not_in_the_list_is_refused_by_name(photos):
    with pytest.raises(DataError, match=r"one of the 2 given classes \(cat, dog\); not among them: owl\. Rename"):
        open_data(photos, classes=["cat", "dog"])


def test_one_picture_is_enough_to_evaluate(tmp_path):
    class_folders(tmp_path, 1, ("cat",))
    splits = open_data(tmp_path, classes=["cat", "dog"])
    assert (keys(splits.train), keys(splits.val), splits.classes) == (["cat/0000.jpg"], [], ["cat", "dog"])


def test_ignored_and_passed_over_are_noted(photos):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "list.csv").write_text("x")
    (photos / "dog" / "list.csv").write_text("x")
    (photos / "dog" / "._x.jpg").write_bytes(b"x")
    notes = open_data(photos).notes
    assert "Ignored, not images by name or content: 2 .csv, 1 .txt." in notes
    assert any(re.match(r"Skipped: 1 hidden \(", note) for note in notes)


def test_conversions_are_noted(photos):
    Image.new("CMYK", (8, 8)).save(photos / "cat" / "ink.jpg")
    assert "Converted: 1 cmyk (CMYK, converted to RGB)." in open_data(photos).notes


def test_copies_that_flatter_are_noted(given):
    (given / "val" / "cat" / "again.jpg").write_bytes((given / "train" / "cat" / "0001.jpg").read_bytes())
    (given / "val" / "owl" / "again.jpg").write_bytes((given / "val" / "owl" / "0000.jpg").read_bytes())
    assert [note for note in open_data(given).notes if "byte-identical" in note] == [
        "1 validation image is byte-identical to a training image, "
        "which makes the validation accuracy too high: val/cat/again.jpg. To keep copies on one side: "
        "weft data review DATA --out DIR, then weft train DIR/corrected.csv --group group."
    ]


def test_copies_in_any_two_folds_are_noted(photos):
    for number in range(5):
        (photos / "cat" / f"again{number}.jpg").write_bytes((photos / "cat" / "0001.jpg").read_bytes())
    for fold in (1, 2, 3):
        (note,) = [note for note in open_data(photos, SplitPlan(folds=3, fold=fold)).notes if "byte-identical" in note]
        assert note.startswith("6 validation images are byte-identical to a training image, ")


def test_of_many_copies_a_few_are_named(photos):
    first = (photos / "cat" / "0000.jpg").read_bytes()
    for number in range(1, 20):
        (photos / "cat" / f"{number:04}.jpg").write_bytes(first)
    (photos / "dog" / "cat.jpg").write_bytes(first)
    (note,) = [note for note in open_data(photos).notes if "several classes" in note]
    assert note.endswith(": cat/0000.jpg = cat/0001.jpg = cat/0002.jpg = cat/0003.jpg = cat/0004.jpg = 16 more.")


def test_copies_under_two_names_are_noted(photos):
    for name in ("dog", "owl"):
        (photos / name / "cat.jpg").write_bytes((photos / "cat" / "0003.jpg").read_bytes())
    splits = open_data(photos, SplitPlan(val_fraction=0.05))
    assert not any("/cat.jpg" in key or "0003" in key for key in keys(splits.val))
    assert splits.notes[1:] == [
        "1 image is in several classes, byte-identical: cat/0003.jpg = dog/cat.jpg = owl/cat.jpg."
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 0.0}, r"val_fraction must be between 0 and 1, exclusive; got 0\.0"),
        ({"val_fraction": 1.0}, r"val_fraction must be between 0 and 1, exclusive; got 1\.0"),
        ({"max_bad": -0.1}, r"max_bad must be between 0 and 1; got -0\.1"),
        ({"max_bad": 1.5}, r"max_bad must be between 0 and 1; got 1\.5"),
        ({"train_fraction": 0.0}, r"train_fraction must be above 0 and at most 1; got 0\.0"),
        ({"train_fraction": 1.1}, r"train_fraction must be above 0 and at most 1; got 1\.1"),
        ({"limit": 0}, r"limit must be at least 1 image; got 0"),
    ],
)
def test_numbers_out_of_range(photos, options, message):
    with pytest.raises(UsageError, match=message):
        open_data(photos, **options) if "max_bad" in options else open_data(photos, SplitPlan(**options))


def test_a_picture_that_vanishes_is_named(photos):
    splits = open_data(photos)
    key = splits.train.read(5).key
    (photos / key).unlink()
    with pytest.raises(
        DataError, match=rf"{key} cannot be used: the file does not exist\. It could be read when the data was"
    ):
        splits.train.read(5)


def test_the_typical_size(photos):
    assert image_size_hint(open_data(photos).train) == (24, 32)


def test_the_typical_size_of_pictures_that_have_gone(photos):
    splits = open_data(photos)
    key = splits.train.read(0).key
    (photos / key).write_bytes(b"<html>")
    with pytest.raises(DataError, match=rf"{key} cannot be used: its content is none of .* It could be read when"):
        image_size_hint(splits.train)


def test_names_are_stable_whatever_lists_the_folder(photos, monkeypatch):
    expected = keys(open_data(photos).train)
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            self.entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return self.entries

        def __exit__(self, *_):
            return None

        def __iter__(self):
            return iter(self.entries)

    monkeypatch.setattr(os, "scandir", Backwards)
    assert keys(open_data(photos).train) == expected
