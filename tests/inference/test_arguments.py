"""The image files that an argument means: the same under every verb, and the same as in a dataset."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from weft.data import BadImage, inspect, open_image
from weft.data.folder import check_outside
from weft.errors import UsageError
from weft.inference import predict, similar
from weft.inference.arguments import InferenceOptions, check_outside_images, image_files
from weft.study import compare
from weft.train import label, preview


def images(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg(number))
    return folder


@pytest.mark.parametrize("value", [True, False, "1_0", "2.0", "0x2", "\u0663", " 3", "x"])
@pytest.mark.parametrize("name", ["batch_size", "img_size", "workers", "limit", "max_pixels"])
def test_numbers_are_decimal_and_no_truth_values(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"^{name} must be a whole number .*; got {re.escape(repr(value))}") as error:
        InferenceOptions.of({name: value})
    assert "null" not in str(error.value)
    assert getattr(InferenceOptions.of({name: "16"}), name) == 16


NUMBERS: list[tuple[str, Callable[..., object], tuple[str, ...]]] = [  # of functions, where no recipe has the name
    ("top_k", predict, ("run", "x.png")),
    ("top_k", similar, ("run", "x.png", "y.png")),
    ("num", label, ("run", "x.png")),
    ("min_probability", label, ("run", "x.png")),
    *((name, compare, ("digits",)) for name in ("seeds", "jobs", "threads")),
]


@pytest.mark.parametrize(("name", "function", "words"), NUMBERS)
def test_numbers_of_python_are_no_truth_values(name: str, function: Callable[..., object], words: tuple[str]) -> None:
    with pytest.raises(UsageError, match=rf"^{name} must be a (whole )?number .*; got True\."):
        function(*words, **{name: True})


def test_a_folder_has_the_same_images_as_a_dataset(tmp_path: Path) -> None:
    """By name or content; hidden and system files are no images, and what cannot be read is reported."""
    names = ("cat/0d3b", "cat/1.jpg", "dog/a.b.c", "dog/photo.jpeg_large", "dog/.hidden.jpg", "__MACOSX/dog/1.jpg")
    images(tmp_path, *names)
    (tmp_path / "dog" / "notes").write_text("none")
    (tmp_path / "dog" / "text.png").write_text("none")
    (tmp_path / "dog" / "gone.jpg").symlink_to("nowhere")
    inventory = inspect(tmp_path)
    of_dataset = inventory.good + [bad.key for bad in inventory.bad]
    assert [os.path.relpath(name, tmp_path) for name in image_files(tmp_path)] == sorted(of_dataset)
    assert len(of_dataset) == 6


@pytest.mark.parametrize("folder", ["[2023] photos", "a[b", "100% [x]/[y]", "plain", "[!a]*"])
def test_patterns_in_folders_with_brackets(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images(tmp_path / folder, "cat/img[0].png", "cat/img[1].png", "dog/img[0].png")
    for start in (folder, f"./{folder}", str(tmp_path / folder)):
        path = Path(start)
        assert image_files(f"{start}/cat/*.png") == [str(path / "cat" / f"img[{i}].png") for i in range(2)]
        assert image_files(f"{start}/*/img[[]0].png") == [str(path / n / "img[0].png") for n in ("cat", "dog")]
        assert image_files(f"{start}/*/img[0].png") == [str(path / n / "img[0].png") for n in ("cat", "dog")]
        assert image_files(f"{start}/**/*.png") == image_files(start)
        assert image_files(f"{start}/cat/img[1].png") == [str(path / "cat" / "img[1].png")]
        assert image_files(f"{start}/*.gif") == [f"{start}/*.gif"]  # none: reported by its name
    images(tmp_path / "plain", "a1.png", "a2.png", "a3.png")
    assert [Path(name).name for name in image_files("plain/a[12].png")] == ["a1.png", "a2.png"]


@pytest.mark.parametrize(("form", "kind"), [("zip", "ZIP"), ("gztar", "gzip"), ("tar", "tar"), ("xztar", "xz")])
def test_an_archive_is_to_be_unpacked(form: str, kind: str, tmp_path: Path) -> None:
    images(tmp_path / "photos", "a.jpg")
    path = shutil.make_archive(str(tmp_path / "photos"), form, tmp_path / "photos")
    with pytest.raises(BadImage, match=rf"it is an? {kind} archive; unpack it"):
        open_image(path)


def test_next_to_the_folder_of_the_training_set_nothing_is_read(tmp_path: Path) -> None:
    data = images(tmp_path / "photos", "train/cat/1.jpg", "train/dog/1.jpg", "test/cat/2.jpg")
    check_outside(data / "runs" / "one", data)
    check_outside(tmp_path / "photos-2", data)
    (tmp_path / "link").symlink_to("photos")
    for place in ("train", "train/x", "test", ""):
        for out, read in ((data, data), (tmp_path / "link", data), (data, tmp_path / "link")):
            with pytest.raises(UsageError, match=r"The output must be outside the data folder, .* is in "):
                check_outside(out / place, read)
    with pytest.raises(UsageError, match="outside the data folder"):
        preview(data, "levit_nano_32", out=data / "train" / "x.png")
    with pytest.raises(UsageError, match="outside the data folder"):  # image files are read everywhere
        check_outside_images(data / "runs", data)
    other = images(tmp_path / "classes", "train/1.jpg", "cat/1.jpg")  # here, train is a class
    with pytest.raises(UsageError, match="outside the data folder"):
        check_outside(other / "runs", other)


def test_an_output_next_to_single_files_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(images(tmp_path, "1.jpg", "cat/2.jpg"))
    check_outside_images("new", "1.jpg", ["cat/2.jpg", "*.jpg", "cat/*.jpg", "missing/3.jpg"])
    for pattern in ("*/*.jpg", "**/*.jpg", "cat/**"):
        with pytest.raises(UsageError, match="outside the data folder"):
            check_outside_images("cat/new", pattern)
