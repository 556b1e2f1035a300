"""The image files that an argument means: the same under every verb, and the same as in a dataset."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from weft.data import BadImage, open_image
from weft.data.sources.open import inspect_data
from weft.inference.arguments import image_files


def images(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg(number))
    return folder


def test_a_folder_has_the_same_images_as_a_dataset(tmp_path: Path) -> None:
    """By name or content; hidden and system files are no images, and what cannot be read is reported."""
    names = ("cat/0d3b", "cat/1.jpg", "dog/a.b.c", "dog/photo.jpeg_large", "dog/.hidden.jpg", "__MACOSX/dog/1.jpg")
    images(tmp_path, *names)
    (tmp_path / "dog" / "notes").write_text("none")
    (tmp_path / "dog" / "text.png").write_text("none")
    (tmp_path / "dog" / "gone.jpg").symlink_to("nowhere")
    inventory = inspect_data(tmp_path)
    of_dataset = [entry.key for entry in inventory.good] + [bad.key for bad in inventory.bad]
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
