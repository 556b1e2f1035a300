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
from weft.data.prepare import prepare_data
from weft.errors import UsageError
from weft.inference import embed, evaluate, predict, similar
from weft.inference.arguments import InferenceOptions, check_outside_images, image_files
from weft.inference.explain_files import explain_run
from weft.inference.exports import export_run
from weft.study import compare
from weft.train import label, preview
from weft.train.data_review import review


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


def test_numbers_of_python_are_no_truth_values() -> None:
    """Also where no setting of a recipe has the name."""
    calls: list[tuple[str, Callable[[], object]]] = [
        ("top_k", lambda: predict("run", "x.png", top_k=True)),
        ("top_k", lambda: similar("run", "x.png", "y.png", top_k=True)),
        ("num", lambda: label("run", "x.png", num=True)),
        ("min_probability", lambda: label("run", "x.png", min_probability=True)),
        ("seeds", lambda: compare("digits", seeds=True)),
        ("jobs", lambda: compare("digits", jobs=True)),
        ("threads", lambda: compare("digits", threads=True)),
    ]
    for name, call in calls:
        with pytest.raises(UsageError, match=rf"^{name} must be a (whole )?number .*; got True\."):
            call()


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


def test_brackets_are_still_a_pattern(tmp_path: Path) -> None:
    images(tmp_path, "a1.png", "a2.png", "a3.png")
    assert [Path(name).name for name in image_files(f"{tmp_path}/a[12].png")] == ["a1.png", "a2.png"]


@pytest.mark.parametrize(("form", "kind"), [("zip", "ZIP"), ("gztar", "gzip"), ("tar", "tar"), ("xztar", "xz")])
def test_an_archive_is_to_be_unpacked(form: str, kind: str, tmp_path: Path) -> None:
    images(tmp_path / "photos", "a.jpg")
    path = shutil.make_archive(str(tmp_path / "photos"), form, tmp_path / "photos")
    with pytest.raises(BadImage, match=rf"it is an? {kind} archive; unpack it"):
        open_image(path)


WRITERS = {
    "embed": lambda data, out: embed("run", data, out=out / "x.npy"),
    "explain": lambda data, out: explain_run("run", data, out, force=True),
    "label": lambda data, out: label("run", data, out=out),
    "evaluate": lambda data, out: evaluate("run", data, out=out),
    "review": lambda data, out: review(data, out=out, force=True),
    "prepare": lambda data, out: prepare_data(data, out, 16),
    "preview": lambda data, out: preview(data, "levit_nano_32", out=out / "x.png"),
    "export": lambda data, out: export_run("run", out, data=data),
}


@pytest.mark.parametrize("verb", WRITERS)
@pytest.mark.parametrize("place", ["", "new", "cat", "cat/new/deeper"])
def test_no_verb_writes_into_the_images_that_it_reads(verb: str, place: str, tmp_path: Path) -> None:
    images(tmp_path / "photos", "cat/1.jpg", "dog/1.jpg")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to("photos")
    for data, out in (("photos", "photos"), ("photos", "link"), ("link", "photos")):
        with pytest.raises(UsageError, match=r"The output must be outside the data folder, .* is in "):
            WRITERS[verb](tmp_path / data, tmp_path / out / place)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_next_to_the_folder_of_the_training_set_nothing_is_read(tmp_path: Path) -> None:
    data = images(tmp_path / "photos", "train/cat/1.jpg", "train/dog/1.jpg", "test/cat/2.jpg")
    check_outside(data / "runs" / "one", data)
    check_outside(tmp_path / "photos-2", data)
    for place in ("train/x", "test", ""):
        with pytest.raises(UsageError, match="outside the data folder"):
            check_outside(data / place, data)
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
