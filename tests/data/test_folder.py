"""Folders as they come: which are classes, which are a split, what is noted, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from tests.data.pictures import jpeg, tar
from weft.data import SplitPlan, image_size_hint, open_data
from weft.data.open import inspect, problem_of
from weft.data.split_names import split_folders, split_of
from weft.errors import DataError, UsageError
from weft.runs.directory import check_run_dir

UNREAD_TEST = "Not read: test/. After training: weft evaluate RUN DATA --split test."


def make(root: Path, folders: str) -> Path:
    """Write three different images to each of some folders; `cat:5` has five, `cat:2!` two bad files."""
    root.mkdir(parents=True, exist_ok=True)
    for place, word in enumerate(folders.split()):
        path, _, number = word.partition(":")
        (root / path).mkdir(parents=True, exist_ok=True)
        for i in range(int(number.strip("!") or 3)):
            (root / path / f"{i:04}.jpg").write_bytes(b"" if "!" in number else jpeg(100 * place + i))
    return root


def add(root: Path, key: str, data: bytes) -> None:
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    (root / key).write_bytes(data)


def counts(source) -> dict[str, int]:
    """Number of images of each class."""
    return dict(Counter(source.classes[label] for label in source.labels))


def every(number: int) -> dict[str, int]:
    return dict.fromkeys(("cat", "dog", "owl"), number)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 images in each of three classes."""
    return make(tmp_path, "cat:20 dog:20 owl:20")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A split that came with the data."""
    return make(tmp_path, "train/cat:4 train/dog:4 train/owl:4 val/cat:2 val/dog:2 val/owl:2")


REFUSED = [  # folders, words of the message
    ("caf\u00e9 cafe\u0301 tea", r"the Unicode form of a letter; 'cafe\\u0301' and 'caf\\xe9' are both 'café'"),
    ("train/a train/b train/c val/b val/c val/d", r"also be in train/; only in val/: d\. Add images of it"),
    ("cat:20 dog:20 ant:0 bee:2!", r"at least one usable image; empty: ant, bee\."),
    ("train/cat:0 train/dog train/owl val/cat val/dog", r"at least one usable image in train/; empty: cat\."),
    ("cat", r"at least two classes; '.*' has one, 'cat'\. Add a folder"),
    ("", r"must contain images; '.*' contains none\. Put one folder"),
    (".:1", r"one folder per class; '.*' has 1 image and no folder\. Sort the images"),
    ("a:1 b:1", r"both splits; the validation set of '.*' has none \(2 for training, 0 held out"),
    ("train/a:4 train/b:4 val/a:0 val/b:0", r"both splits; val/ of '.*' has none \(8 for training, 0 held out"),
    (
        "january/cat january/dog june/Cat june/dog june/owl",
        r"all have the same ones: january/ \(cat, dog\), june/ \(Cat, dog, owl\)\. If january, june are a split, name",
    ),
    ("dataset/cat dataset/dog", r"in 2 folders: cat, dog\. Did you mean .*/dataset\?"),
    ("x/train/cat x/train/dog x/test/cat x/test/dog", r"in 2 folders: test, train\. Did you mean .*/x\?"),
    ("train/images/cat train/images/dog", r"in 2 folders: cat, dog\. Move the folders in images/ one level up"),
]


@pytest.mark.parametrize(("folders", "message"), REFUSED)
def test_folders_without_a_clear_meaning_are_refused_in_training_and_by_the_check(folders, message, tmp_path):
    data = make(tmp_path, folders)
    with pytest.raises(DataError, match=message) as caught:
        open_data(data)
    assert problem_of(inspect(data)) == str(caught.value)
    if "january" in folders:
        classes = ["january", "june"]
        assert open_data(data, classes=classes, evaluate_only=True).classes == classes, "the model's own classes"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, r"must exist; '.*/photos' does not\. Pass a folder .* or the name digits"),
        (lambda path: path.write_bytes(b"x"), r"must be a directory; '.*photos' is not\. Pass a folder"),
        (lambda path: path.symlink_to("nowhere"), r"must be a directory; '.*photos' is not"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), r"must be a directory; '.*photos' is a ZIP archive\. Unpack it"),
        (
            lambda path: add(path, "inside/photos.tar", b"PK"),
            r"none \(but 1 \.tar\)\. Unpack the archives, and pass",
        ),
        (lambda path: add(path, "cats/a.cr3", b"\0\0\0\x18ftypcrx "), r"contains none \(but 1 \.cr3\)"),
    ],
)
def test_data_that_are_no_folder_of_images_are_refused(write, message, tmp_path):
    write(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "photos")


def test_without_a_split_one_is_made_and_said(photos):
    splits = open_data(str(photos))
    assert splits.classes == splits.train.classes == splits.val.classes == ["cat", "dog", "owl"]
    assert (counts(splits.train), counts(splits.val), splits.is_given) == (every(16), every(4), False)
    assert splits.notes == [
        "48 images in 3 classes for training, 12 held out: a stratified split of 20 % made with seed 0, "
        "because the dataset has none."
    ]
    assert image_size_hint(splits.train) == (24, 32)


PAIRS = [
    ("Training", "Testing"), ("Train", "Test"), ("TRAIN", "VAL"), ("training", "validation"), ("train", "dev"),
    ("images_train", "images_test"), ("seg_train", "seg_test"), ("train_images", "test_images"), ("train", "valid"),
    ("trainset", "valset"), ("train2017", "val2017"), ("flowers_train", "flowers_test"),
    ("TrainImages", "ValidImages"), ("train_set", "eval"),
]  # fmt: skip


@pytest.mark.parametrize(("train", "held_out"), PAIRS)
def test_the_usual_names_of_splits_are_read_in_any_form(train, held_out, tmp_path):
    make(tmp_path, f"{train}/cat:5 {train}/dog:5 {held_out}/cat:2 {held_out}/dog:2")
    splits = open_data(tmp_path)
    assert (splits.classes, splits.is_given) == (["cat", "dog"], True)
    assert {key.split("/")[0] for key in splits.train.keys} == {train}
    assert {key.split("/")[0] for key in splits.val.keys} == {held_out}
    assert splits.notes == [
        f"10 images in 2 classes for training, 4 held out: the dataset's own split, {train}/ and {held_out}/."
    ]
    with pytest.raises(UsageError, match="The output must be outside the data folder"):
        check_run_dir(tmp_path / held_out / "run", str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["latest", "contest", "restaurant", "strain", "devil", "training_validation", "train-test", "invalid", "bus"],
)
def test_other_words_are_no_splits(name):
    assert split_of(name) == ""
    assert split_folders([f"{name}_station", "train_station"]) == {}


@pytest.mark.parametrize("name", ["train", "test", "val", "Testing"])
def test_a_class_may_have_the_name_of_a_split(name, tmp_path):
    assert open_data(make(tmp_path / "flat", f"bus:5 {name}:5")).classes == sorted(["bus", name])
    splits = open_data(make(tmp_path / "split", f"train/bus:5 train/{name}:5 val/bus:2 val/{name}:2"))
    assert splits.classes == sorted(["bus", name])
    assert (len(splits.train), len(splits.val)) == (10, 4)


def test_of_several_folders_of_a_side_one_is_read_and_the_others_are_named(tmp_path):
    sides = ("train", "train_images", "val", "validation", "test", "extra")
    make(tmp_path, " ".join(f"{side}/{name}" for side in sides for name in ("cat", "dog")))
    make(tmp_path / "test", "yak")  # no class of training, but not read
    splits = open_data(tmp_path)
    assert {key.split("/")[0] for key in splits.train.keys} == {"train"}
    assert {key.split("/")[0] for key in splits.val.keys} == {"val"}
    assert {"Not read, because train/ exists: extra/, train_images/, validation/.", UNREAD_TEST} <= {*splits.notes}
    shutil.rmtree(tmp_path / "test" / "yak")
    assert {key.split("/")[0] for key in open_data(tmp_path, test=True).val.keys} == {"test"}


ACCEPTED = [  # folders, options, training and held-out images of each class, a note
    ("train/cat:5 train/dog:5 test:1", {}, [4, 4], [1, 1], "Not read, because train/ exists: test/."),
    ("train/a:2 train/b:2 train/c:2 val/b:2 val/c:2", {}, [2, 2, 2], [0, 2, 2], "No validation image of 1 class: a."),
    ("ant:0 cat:5 dog:5", {"evaluate_only": True}, [0, 4, 4], [0, 1, 1], "No validation image of 1 class: ant."),
    ("cat:1", {"classes": ["cat", "dog"]}, [1, 0], [0, 0], "No validation image of 2 classes: cat, dog."),
    ("cat/images:5 dog/images:5", {}, [4, 4], [1, 1], ""),
    ("10:5 9:5 two:5", {}, [4, 4, 4], [1, 1, 1], ""),  # one that is no number makes the order alphabetical
]


@pytest.mark.parametrize(("folders", "options", "train", "val", "note"), ACCEPTED)
def test_the_classes_of_a_folder_keep_their_order_and_indices(folders, options, train, val, note, tmp_path):
    splits = open_data(make(tmp_path, folders), **options)
    assert splits.train.classes == splits.val.classes == splits.classes
    for source, expected in ((splits.train, train), (splits.val, val)):
        assert [source.labels.count(label) for label in range(len(splits.classes))] == expected
        for key, label in zip(source.keys, source.labels, strict=True):
            assert splits.classes[label] in key.split("/")
    words = {part for word in folders.split() for part in word.partition(":")[0].split("/")}
    assert splits.classes == options.get("classes", sorted(words - {"train", "val", "test", "images"}))
    assert any(note in found for found in splits.notes)
    if "test:1" in folders:
        with pytest.raises(DataError, match="--split test needs a dataset with a test split; this one has train"):
            open_data(tmp_path, test=True)


def test_classes_with_other_subfolders_are_named(tmp_path):
    make(tmp_path, "cat/persian cat/siamese dog/poodle dog/pug")
    note = (
        "No class folder has an image of its own, the images are in further folders: cat/ (persian, siamese), dog/"
        " (poodle, pug)."
    )
    assert note in open_data(tmp_path).notes
    assert note in inspect(tmp_path).remarks
    (tmp_path / "cat" / "own.jpg").write_bytes(jpeg(99))
    assert note not in open_data(tmp_path).notes


def test_labels_follow_a_list_of_classes_in_any_unicode_form(tmp_path):
    make(tmp_path, "cafe\u0301 tea")
    splits = open_data(tmp_path, classes=["tea", "yak", "caf\u00e9"])
    assert splits.classes == ["tea", "yak", "caf\u00e9"]
    assert set(zip((key[0] for key in splits.train.keys), splits.train.labels, strict=True)) == {("c", 2), ("t", 0)}
    with pytest.raises(DataError, match=r"one of the 2 given classes \(tea, yak\); not among them: cafe.*\. Rename"):
        open_data(tmp_path, classes=["tea", "yak"])


@pytest.mark.parametrize(("fraction", "held_out"), [(0.5, 10), (0.001, 1), (0.999, 19)])
def test_a_fraction_is_kept_for_every_class(fraction, held_out, photos):
    splits = open_data(photos, SplitPlan(val_fraction=fraction))
    assert (counts(splits.val), counts(splits.train)) == (every(held_out), every(20 - held_out))


def test_a_limit_takes_in_turn_from_every_class_and_decodes_no_more(photos):
    seen, whole = [], open_data(photos)
    few = open_data(photos, SplitPlan(limit=6), progress=lambda done, total: seen.append((done, total)))
    assert counts(few.train) == counts(few.val) == every(2)
    assert set(few.train.keys) <= set(whole.train.keys)
    assert set(few.val.keys) <= set(whole.val.keys)
    assert seen == [(12, 12)]
    assert len(open_data(photos, SplitPlan(limit=2)).train) == 2  # fewer than classes: no error about empty ones


def test_a_part_of_the_training_images_leaves_all_that_are_held_out(photos):
    whole, half, least = (open_data(photos, SplitPlan(train_fraction=part)) for part in (1.0, 0.5, 0.01))
    assert [counts(splits.train) for splits in (whole, half, least)] == [every(16), every(8), every(1)]
    assert set(least.train.keys) < set(half.train.keys) < set(whole.train.keys)
    assert half.val.keys == least.val.keys == whole.val.keys
    assert set(half.train.keys) != set(open_data(photos, SplitPlan(train_fraction=0.5, seed=1)).train.keys)


def test_a_class_of_one_is_learnt_not_held_out(photos):
    make(photos, "yak:1")
    assert "yak/0000.jpg" in open_data(photos).train.keys
    (photos / "yak" / "0001.jpg").write_bytes(jpeg(999))
    (learnt,) = (key for key in open_data(photos).train.keys if key.startswith("yak"))
    (photos / learnt).write_bytes(jpeg()[:500])  # its training image is bad: the held-out one takes its place
    splits = open_data(photos)
    assert (counts(splits.train)["yak"], "yak" in counts(splits.val)) == (1, False)


@pytest.mark.parametrize("form", ["", "train/"])
def test_a_bad_image_is_on_the_side_that_it_would_be_on_and_moves_no_other(form, tmp_path):
    make(tmp_path, f"{form}cat:5 {form}dog:5")
    train, held_out = open_data(tmp_path).train.keys, open_data(tmp_path).val.keys
    assert len(held_out) == 2
    for key in [*train, *held_out]:
        data = (tmp_path / key).read_bytes()
        (tmp_path / key).write_bytes(data[:100])
        splits = open_data(tmp_path, max_bad=0.2)
        assert [(bad.key, bad.split) for bad in splits.bad] == [(key, "val" if key in held_out else "train")]
        rest = set(splits.train.keys) | set(splits.val.keys)
        assert rest == {*train, *held_out} - {key}
        assert key in held_out or splits.val.keys == held_out
        (tmp_path / key).write_bytes(data)


def test_a_tenth_may_be_bad_and_not_more(photos):
    for path in sorted(photos.glob("*/*.jpg"))[:54:9]:
        path.write_bytes(b"")
    splits = open_data(photos)
    assert len(splits.train) + len(splits.val) == 54
    assert any(note.startswith("6 bad files excluded: 6 zero-byte (cat/0000.jpg, ") for note in splits.notes)
    (photos / "owl" / "0019.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"At most 0\.1 .* 0\.117 are: 7 zero-byte \(cat/0000\.jpg, .* and 2 more\)"):
        open_data(photos)
    assert len(open_data(photos, max_bad=0.12).bad) == 7
    for path in sorted(photos.glob("*/*.jpg"))[::2]:
        path.write_bytes(b"")
    with pytest.raises(DataError, match="may be bad"):  # also of the few that a limit decodes
        open_data(photos, SplitPlan(limit=10))


def test_bad_images_outside_the_classes_are_no_problem(tmp_path):
    """`data check` refuses what training refuses, and nothing else."""
    make(tmp_path, "cat:5 dog:5")
    for i in range(30):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i)[:200])
    assert problem_of(inspect(tmp_path)) == ""
    assert len(open_data(tmp_path).train) == 8


def test_what_is_not_used_or_converted_is_noted(photos):
    (photos / "cover.jpg").write_bytes(jpeg(99))
    for name in ("cat/notes.txt", "cat/list.csv", "dog/list.csv", "dog/._x.jpg"):
        (photos / name).write_text("x")
    Image.new("CMYK", (8, 8)).save(photos / "cat" / "ink.jpg")
    splits = open_data(photos)
    assert len(splits.train) + len(splits.val) == 61
    assert {
        "Not used, because outside all class folders: 1 image.",
        "Ignored, not images by name or content: 2 .csv, 1 .txt.",
        "Converted: 1 cmyk (CMYK, converted to RGB).",
    } <= set(splits.notes)
    assert any(note.startswith("Skipped: 1 hidden (") for note in splits.notes)


def test_images_next_to_what_is_read_are_counted(given, tmp_path):
    (given / "loose.jpg").write_bytes(jpeg(1000))
    members = [(f"{name}/{i}.jpg", jpeg(10 * len(name) + i)) for name in ("cat", "mouse") for i in range(3)]
    (tar(tmp_path / "shards" / "photos.tar", members).parent / "loose.png").write_bytes(jpeg(2))
    for data in (given, tmp_path / "shards"):
        assert any("Skipped: 1 beside" in note for note in open_data(data).notes), data


def copy(root: Path, source: str, *targets: str) -> None:
    for target in targets:
        shutil.copy(root / source, root / target)


def copies_noted(data: Path, words: str = "byte-identical", **plan: int) -> str:
    (note,) = (note for note in open_data(data, SplitPlan(**plan)).notes if words in note)
    return note


def test_copies_that_flatter_are_noted(given):
    copy(given, "train/cat/0001.jpg", "val/cat/again.jpg")
    copy(given, "val/owl/0000.jpg", "val/owl/again.jpg")
    assert copies_noted(given) == (
        "1 validation image is byte-identical to a training image, "
        "which makes the validation accuracy too high: val/cat/again.jpg. To keep copies on one side: "
        "weft data review DATA --out DIR, then weft train DIR/corrected.csv --group group."
    )


@pytest.mark.parametrize("fold", [1, 2, 3])
def test_copies_in_any_two_folds_are_noted(fold, photos):
    copy(photos, "cat/0001.jpg", *(f"cat/again{number}.jpg" for number in range(5)))
    note = copies_noted(photos, folds=3, fold=fold)
    assert note.startswith("6 validation images are byte-identical to a training image, ")


def test_copies_under_two_names_are_noted_and_never_held_out(photos):
    copy(photos, "cat/0003.jpg", "dog/cat.jpg", "owl/cat.jpg")
    splits = open_data(photos, SplitPlan(val_fraction=0.05))
    assert not any("/cat.jpg" in key or "0003" in key for key in splits.val.keys)
    assert splits.notes[1:] == [
        "1 image is in several classes, byte-identical: cat/0003.jpg = dog/cat.jpg = owl/cat.jpg."
    ]
    copy(photos, "cat/0003.jpg", *(f"cat/{number:04}.jpg" for number in range(20) if number != 3))
    some = "cat/0000.jpg = cat/0001.jpg = cat/0002.jpg = cat/0003.jpg = cat/0004.jpg = 17 more."
    assert copies_noted(photos, words="several classes").endswith(f": {some}")
