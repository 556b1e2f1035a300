"""The gate: what is refused, in which words, and at what price."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from tests.data.pictures import bomb, encoded, jpeg, paged_tiff, photo, png, rle8, text_bomb
from weft.data import BadImage, image_size, open_image
from weft.data.decode import REASONS, image_info
from weft.data.formats import FORMATS, sniff
from weft.errors import DataError


@pytest.mark.parametrize("format", FORMATS)
def test_eight_formats_pass(format):
    data = encoded(photo(), format)
    assert sniff(data[:32]) == format
    assert open_image(data).size == (32, 24)


@pytest.mark.parametrize("format", ["PPM", "TGA", "ICO", "PCX", "SGI", "JPEG2000", "PDF", "EPS", "DDS", "QOI"])
def test_no_other_does(format):
    data = encoded(photo(), format)
    with pytest.raises(BadImage, match=r"its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF") as caught:
        open_image(data)
    assert caught.value.reason == "not-an-image"


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_pictures_of_phones_are_upright(format, tag):
    image = Image.fromarray(photo()).resize((64, 48))
    exif = Image.Exif()
    exif[0x0112] = tag
    data = encoded(image, format, exif=exif.tobytes(), quality=95)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(image, "PNG", exif=exif)))), int)
    for at_least in (None, 8):
        assert np.abs(np.asarray(open_image(data, at_least=at_least), int) - wanted).mean() < 12
    assert image_info(data).size == image_size(data) == wanted.shape[:2]


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_where_they_end_too_early(format):
    data = encoded(Image.fromarray(photo()).resize((64, 48)), format)
    for length in range(33, len(data), 7):
        with pytest.raises(BadImage) as caught:
            open_image(data[:length])
        assert caught.value.reason in ("truncated", "damaged")
    assert caught.value.reason == "truncated"


def test_without_the_package_heic_is_refused_with_advice(monkeypatch):
    data = encoded(photo(), "HEIF")
    monkeypatch.setattr("weft.data.decode._has_heif", lambda: False)
    with pytest.raises(BadImage, match=r"pillow-heif: pip install pillow-heif"):
        open_image(data)


def test_brands_of_iso_files_are_told_apart():
    head = (24).to_bytes(4, "big") + b"ftyp%b\0\0\0\0%b%b"
    assert sniff(head % (b"mif1", b"mif1", b"avif")) == "AVIF"
    assert sniff(head % (b"mif1", b"mif1", b"heic")) == "HEIF"
    assert sniff(head % (b"isom", b"isom", b"mp41")) is None
    assert sniff(head % (b"mif1", b"mif1", b"mif1") + b"avif") is None  # outside the box


def test_text_that_begins_like_a_bitmap_is_none():
    assert sniff(b"BM and other abbreviations, explained.") is None


def test_a_path_a_string_and_bytes_are_one(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg())
    seen = [np.asarray(open_image(source)) for source in (path, str(path), jpeg())]
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "missing"),
        (lambda path: path.mkdir(), "not-a-file"),
        (lambda path: os.mkfifo(path), "not-a-file"),
        (lambda path: path.symlink_to("/dev/zero"), "not-a-file"),
        (lambda path: path.write_bytes(b""), "zero-byte"),
        (lambda path: (path.touch(), os.truncate(path, (1 << 30) + 1)), "too-many-bytes"),
        (lambda path: path.write_bytes(b"hello"), "not-an-image"),
    ],
)
def test_what_is_no_picture_is_named(tmp_path, make, reason):
    path = tmp_path / "b\nx.jpg"
    make(path)
    with pytest.raises(DataError, match=r"b\\nx\.jpg cannot be used: ") as caught:
        open_image(path)
    assert caught.value.reason == reason
    assert REASONS[reason] in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_name_with_a_nul():
    with pytest.raises(BadImage, match=r"a\\x00b\.jpg cannot be used: the operating system refused to read it"):
        open_image("a\0b.jpg")


def test_claimed_pixels_are_refused_with_both_numbers():
    with pytest.raises(BadImage, match=r"it has too many pixels \(144000000, the limit is 100000000\)"):
        open_image(bomb(12000))
    with pytest.raises(BadImage, match=r"768, the limit is 767"):
        open_image(jpeg(), max_pixels=767)
    assert open_image(jpeg(), max_pixels=768).size == (32, 24)


def test_the_limit_can_be_raised_above_pillows_own():
    assert image_size(bomb(14000), max_pixels=200_000_000) == (14000, 14000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, r"begins like a PNG file, but its header cannot be read"),
        (jpeg()[:400], r"the file is truncated"),
        (encoded(np.zeros((4, 4), np.float32), "TIFF"), r"its pixels are floating point; save them as integers"),
        (encoded(Image.new("LAB", (4, 4)), "TIFF"), r"its colours are Lab; save them as RGB"),
        (
            encoded(Image.fromarray(photo()).convert("1"), "TIFF", compression="group4"),
            r"TIFF compression group4; supp",
        ),
        (rle8(b"\x64\x05" * 100), r"its compression is not supported \(BMP compression 1; supported are 0, 3\)"),
        (encoded(np.zeros((4, 4), np.int32), "TIFF"), r"wide or signed integers, and the model stores no value range"),
        (text_bomb(), r"text metadata or its colour profile expands beyond the limit \(4 MiB each, 64 MiB together\)"),
    ],
)
def test_refusals_say_why(data, message):
    with pytest.raises(BadImage, match=message):
        open_image(data)


def test_memory_that_is_not_there(monkeypatch):
    def exhausted(self):
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", exhausted)
    with pytest.raises(BadImage, match="there is not enough memory to decode it"):
        open_image(encoded(photo(), "BMP"))


def test_a_refusal_travels_between_processes():
    with pytest.raises(BadImage) as caught:
        open_image(b"hello")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.reason) == (str(caught.value), "not-an-image")


def test_truncated_pictures_are_refused_whatever_the_program_allows(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(BadImage, match="the file is truncated"):
        open_image(jpeg()[:600])


@pytest.mark.parametrize(
    ("at_least", "size"), [(None, (640, 480)), (300, (640, 480)), (240, (320, 240)), (1, (80, 60))]
)
def test_a_jpeg_may_be_decoded_smaller(at_least, size):
    pixels = photo(480, 640)
    image = open_image(encoded(pixels, "JPEG", quality=95), at_least=at_least)
    assert image.size == size
    shrunk = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX), dtype=float)
    assert np.abs(np.asarray(image, dtype=float) - shrunk).mean() < 6


def test_what_is_no_jpeg_keeps_its_size():
    data = encoded(photo(480, 640), "PNG")
    assert open_image(data, at_least=1).size == (640, 480)


def test_threads_with_different_limits_do_not_disturb_each_other():
    outcomes = {10: set(), 200_000_000: set()}
    data = bomb(9500)  # 90 megapixels: Pillow would warn

    def work(limit: int) -> None:
        for _ in range(200):
            try:
                outcomes[limit].add(image_size(data, max_pixels=limit))
            except BadImage as err:
                outcomes[limit].add(err.reason)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in (10, 200_000_000) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {10: {"too-many-pixels"}, 200_000_000: {(9500, 9500)}}


def test_image_size_reads_only_the_header(monkeypatch):
    def refuse(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert [image_size(encoded(photo(), format)) for format in FORMATS] == [(24, 32)] * len(FORMATS)


COST = """
import io, json, resource, sys
from weft.data.decode import BadImage, open_image
first = open(sys.argv[1], "rb").read()
open_image(first)  # what is imported late is imported now
rows = []
for path in sys.argv[2:]:
    before, calls = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        open_image(path)
        verdict = "good"
    except BadImage as err:
        verdict = err.reason
    sys.setprofile(None)
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rows.append((verdict, len(calls), megabytes))
print(json.dumps(rows))
"""


def test_bombs_cost_neither_time_nor_memory(tmp_path):
    gif = bytearray(encoded(photo(), "GIF"))
    at = gif.index(b"\x2c\0\0\0\0", 13)  # the first frame claims 65,535 pixels a side, and to be cleared afterwards
    gif[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    gif[at:at] = b"\x21\xf9\x04\x08\0\0\0\0"
    kinds = {
        "10001.png": (bomb(10001), "too-many-pixels"),
        "14000.png": (bomb(14000), "too-many-pixels"),
        "60000.png": (png(60000, 60000, b"x\x9c\x03\0\0\0\0\x01"), "too-many-pixels"),
        "frame.gif": (bytes(gif), "too-many-pixels"),
        "comment.png": (text_bomb(), "metadata-bomb"),
        "pages.tif": (paged_tiff(5000), "good"),
    }
    assert len(kinds["10001.png"][0]) < 13_000
    (tmp_path / "first.jpg").write_bytes(jpeg())
    for name, (data, _) in kinds.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in ("first.jpg", *kinds)]
    messages = subprocess.run(
        [sys.executable, "-W", "error", "-c", COST, *paths], capture_output=True, text=True, check=True
    )
    for (name, (_, expected)), (verdict, calls, megabytes) in zip(
        kinds.items(), json.loads(messages.stdout), strict=True
    ):
        assert (name, verdict) == (name, expected)
        assert calls <= 200_000, name
        assert megabytes <= 50, name


def test_a_valid_large_picture_still_opens():
    image = open_image(bomb(3000))
    assert image.size == (3000, 3000)
    assert image.getextrema() == ((0, 0),) * 3


def test_nothing_here_imports_torch():
    code = "import sys, weft.data.decode; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_files_are_closed_again(tmp_path):
    (tmp_path / "good.jpg").write_bytes(jpeg())
    (tmp_path / "bad.jpg").write_bytes(jpeg()[:400])
    (tmp_path / "page.jpg").write_bytes(b"hello")
    before = len(os.listdir("/proc/self/fd"))
    open_image(tmp_path / "good.jpg")
    for name in ("bad.jpg", "page.jpg"):
        with pytest.raises(BadImage, match=name):
            open_image(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(5, "Input/output error"), "unreadable"), (MemoryError(), "out-of-memory")]
)
def test_an_error_of_the_disk_is_that_of_one_image(error, reason, tmp_path, monkeypatch):
    def fail(path):
        raise error

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr("weft.data.decode.read_regular", fail)
    with pytest.raises(BadImage) as caught:
        open_image(tmp_path / "a.png")
    assert caught.value.reason == reason
