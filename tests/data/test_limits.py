"""Limits on images are the same in every verb, and what passes the check can be trained on."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import fuzz
from tests.data.pictures import encoded, photo, png, tagged_tiff
from weft.cli import main
from weft.data import ImageDataset, Inventory, eval_transform, make_loader, open_data, train_transform
from weft.data.decode import MAX_ASPECT, BadImage, image_info, open_image
from weft.data.inventory import check

HONEST = {
    "sequential": encoded(Image.fromarray(photo()), "JPEG"),
    "progressive": encoded(Image.fromarray(photo()), "JPEG", progressive=True),
    "optimised, with restarts": encoded(
        Image.fromarray(photo(64, 64)), "JPEG", optimize=True, restart_marker_blocks=1, progressive=True
    ),
    "one row per strip": encoded(Image.fromarray(photo(300, 20)), "TIFF", compression="tiff_lzw", strip_size=1),
    "animated": encoded(
        Image.fromarray(photo()), "GIF", save_all=True, append_images=[Image.fromarray(photo(seed=i)) for i in range(9)]
    ),
    **{name: encoded(Image.fromarray(photo()), "TIFF", compression=name) for name in (
        "raw", "tiff_lzw", "jpeg", "tiff_adobe_deflate", "tiff_deflate", "packbits"
    )},
}  # fmt: skip


@pytest.mark.parametrize("data", HONEST.values(), ids=HONEST)
def test_what_encoders_write_passes(data: bytes) -> None:
    assert open_image(data).size == image_info(data).size[::-1]


THIN = Image.fromarray(photo(1, MAX_ASPECT + 1))


def test_thin_images_are_refused_by_every_verb_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            (tmp_path / "photos" / name / f"{index}.png").write_bytes(
                encoded(Image.fromarray(photo(seed=index)), "PNG")
            )
    (tmp_path / "photos" / "cat" / "thin.png").write_bytes(encoded(THIN, "PNG"))
    assert main(["data", "check", str(tmp_path / "photos")]) == 3
    message = f"its longer side is more than {MAX_ASPECT} times its shorter side"
    assert f"cat/thin.png: too-thin ({message})" in capsys.readouterr().out
    splits = open_data(tmp_path / "photos", max_bad=0.2)
    assert [(bad.key, bad.reason) for bad in splits.bad] == [("cat/thin.png", "too-thin")]
    assert len(splits.train) + len(splits.val) == 8


@pytest.mark.parametrize("size", [(1, MAX_ASPECT), (MAX_ASPECT, 1), (3, 3 * MAX_ASPECT), (200, 2)])
def test_up_to_the_limit_nothing_changes(size: tuple[int, int]) -> None:
    pixels = photo(*size)
    assert np.array_equal(np.asarray(open_image(encoded(Image.fromarray(pixels), "PNG"))), pixels)


@pytest.mark.parametrize("size", [(1, 1_000_000), (1_000_000, 1), (3, 3 * MAX_ASPECT + 1), (2, 10_000)])
def test_beyond_it_the_size_is_told(size: tuple[int, int]) -> None:
    height, width = size
    with pytest.raises(BadImage, match=f"it is {width} x {height}"):
        open_image(png(width, height, zlib.compress(bytes(height * (3 * width + 1)))))


def test_malformed_xmp_is_judged_alike() -> None:
    """Pillow reads a TIFF's XMP once, for the orientation; what it cannot read must not decide who asks first."""
    for kind, value in ((3, (1, 2, 3, 4)), (4, (7,)), (5, ((1, 0),)), (11, (1.5, 2.5)), (12, (0.5,)), (2, b"\xff\0")):
        data = tagged_tiff({700: (kind, value)})
        answers = []
        for read in (image_info, open_image, lambda data: open_image(data, at_least=4)):
            try:
                read(data)
                answers.append("good")
            except BadImage as bad:
                answers.append(bad.reason)
        assert len(set(answers)) == 1, (kind, answers)


def test_what_is_found_good_one_epoch_reads(tmp_path: Path) -> None:
    """Damaged files of every kind: those that pass the check are trained and evaluated on without an error."""
    for index in range(600):
        folder = tmp_path / "zoo" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:03}.jpg").write_bytes(fuzz.mutant(index))
    splits = open_data(tmp_path / "zoo", max_bad=1.0)
    assert len(splits.train) > 100
    assert len(splits.bad) > 100
    cfg = dict(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
    varied = train_transform(16, (0.5,) * 3, (0.5,) * 3, rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.25)
    for source in (splits.train, splits.val):
        for transform, at_least in ((varied, 32), (varied, None), (eval_transform(cfg), None)):
            dataset = ImageDataset(source, transform, at_least=at_least, value_range=splits.value_range)
            count = sum(len(labels) for _, labels in make_loader(dataset, 16, shuffle=True))
            assert count == len(source)


def test_libraries_write_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """libtiff reports each damaged strip on the standard error of the process."""
    good = encoded(Image.fromarray(photo(64, 64)), "TIFF", compression="tiff_lzw")
    for place in range(0, len(good) - 8, 40):
        with contextlib.suppress(BadImage):
            open_image(good[:place] + b"\xff" * 8 + good[place + 8 :])
    assert capfd.readouterr() == ("", "")


def test_memory_per_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a dataset takes few bytes per image: 1.3 million images of ImageNet must fit next to the training."""
    data = encoded(Image.fromarray(photo(8, 8)), "PNG")

    def opened(number: int) -> int:
        listed = Inventory("many", lambda key: data + key.encode(), {"": ["0", "1"]})
        for i in range(number):
            listed.add(f"n{i % 2:08}/n{i % 2:08}_{i:07}.JPEG", str(i % 2))
        monkeypatch.setattr("weft.data.open.open_digits", lambda: listed)
        return len(open_data("digits").train)

    opened(100)  # imports
    tracemalloc.start()
    try:
        assert opened(10_000) == 8_000
        assert tracemalloc.get_traced_memory()[1] < 360 * 10_000
    finally:
        tracemalloc.stop()


def test_bad_images_take_no_memory() -> None:
    """An error keeps what it was raised with: the bytes of the file, and half of its pixels."""
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)), "PNG")
    inventory = Inventory("many", lambda key: whole[: len(whole) // 2] + key.encode(), {"": ["0"]})
    for i in range(200):
        inventory.add(f"{i}.png", "0")
    check(inventory, [0])  # imports
    tracemalloc.start()
    try:
        check(inventory, range(200))
        assert tracemalloc.get_traced_memory()[1] < 40 * len(whole)
    finally:
        tracemalloc.stop()
    assert len(inventory.bad) == 201
