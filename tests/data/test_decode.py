"""Decoding one image: what is refused, for which reason, and at what price; the look and the whole agree."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from tests.data.pictures import bomb, encoded, jpeg, paged_tiff, photo, png, rle8, tagged_tiff, text_bomb
from weft.data import BadImage, image_size, open_image
from weft.data.decode import MAX_ASPECT, REASONS, image_info
from weft.data.formats import FORMATS, sniff
from weft.errors import DataError

PHOTO = Image.fromarray(photo())


def outcome(data: bytes) -> tuple[bytes, bool] | str:
    """Pixels, and whether an end marker is missing; or the reason of the refusal, on which all readers agree."""
    reasons = set()
    for reader in (open_image, image_info, lambda data: open_image(data, at_least=4)):
        try:
            reader(data)
            reasons.add("")
        except BadImage as error:
            reasons.add(error.reason)
    (reason,) = reasons
    return reason or (open_image(data).tobytes(), "no-end-marker" in image_info(data).notes)


@pytest.mark.parametrize("format", FORMATS)
def test_eight_formats_pass(format, monkeypatch):
    data = encoded(photo(), format)
    assert sniff(data[:32]) == format
    assert open_image(data).size == (32, 24)
    monkeypatch.delattr(ImageFile.ImageFile, "load")
    assert image_size(data) == (24, 32), "by its header alone"


@pytest.mark.parametrize("format", ["PPM", "TGA", "ICO", "PCX", "SGI", "JPEG2000", "PDF", "EPS", "DDS", "QOI"])
def test_no_other_does(format):
    assert outcome(encoded(photo(), format)) == "not-an-image"


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_images_of_phones_are_upright(format, tag):
    image = PHOTO.resize((64, 48))
    exif = Image.Exif()
    exif[0x0112] = tag
    data = encoded(image, format, exif=exif.tobytes(), quality=95)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(image, "PNG", exif=exif)))), int)
    for at_least in (None, 8):
        assert np.abs(np.asarray(open_image(data, at_least=at_least), int) - wanted).mean() < 12
    assert image_info(data).size == image_size(data) == wanted.shape[:2]


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_images_of_phones_that_end_too_early_are_refused(format):
    data = encoded(PHOTO.resize((64, 48)), format)
    found = [outcome(data[:length]) for length in range(33, len(data), 7)]
    assert set(found) <= {"truncated", "damaged"}
    assert found[-1] == "truncated"


def test_without_the_package_heic_is_refused_with_advice(monkeypatch):
    data = encoded(photo(), "HEIF")
    monkeypatch.setattr("weft.data.decode._has_heif", lambda: False)
    with pytest.raises(BadImage, match=r"pillow-heif: pip install pillow-heif"):
        open_image(data)


def test_first_bytes_are_told_apart():
    head = (24).to_bytes(4, "big") + b"ftyp%b\0\0\0\0%b%b"
    assert sniff(head % (b"mif1", b"mif1", b"avif")) == "AVIF"
    assert sniff(head % (b"mif1", b"mif1", b"heic")) == "HEIF"
    assert sniff(head % (b"isom", b"isom", b"mp41")) is None
    assert sniff(head % (b"mif1", b"mif1", b"mif1") + b"avif") is None  # outside the box
    assert sniff(b"BM and other abbreviations, explained.") is None


def test_a_path_a_string_and_bytes_are_one(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg())
    assert len({open_image(source).tobytes() for source in (path, str(path), jpeg())}) == 1


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
def test_what_is_no_image_is_named_also_in_another_process(tmp_path, make, reason):
    path = tmp_path / "b\nx.jpg"
    make(path)
    with pytest.raises(DataError, match=r"b\\nx\.jpg cannot be used: ") as caught:
        open_image(path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.reason, error.exit_code) == (reason, 3)
        assert REASONS[reason] in str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, r"begins like a PNG file, but its header cannot be read"),
        (jpeg()[:400], r"the file is truncated"),
        (encoded(np.zeros((4, 4), np.float32), "TIFF"), r"its pixels are floating point; save them as integers"),
        (encoded(Image.new("LAB", (4, 4)), "TIFF"), r"its colours are Lab; save them as RGB"),
        (encoded(PHOTO.convert("1"), "TIFF", compression="group4"), r"TIFF compression group4; supp"),
        (rle8(b"\x64\x05" * 100), r"its compression is not supported \(BMP compression 1; supported are 0, 3\)"),
        (encoded(np.zeros((4, 4), np.int32), "TIFF"), r"wide or signed integers, and the model stores no value range"),
        (text_bomb(), r"text metadata or its colour profile expands beyond the limit \(4 MiB each, 64 MiB together\)"),
        (bomb(12000), r"it has too many pixels \(144000000, the limit is 100000000\)"),
        ("a\0b.jpg", r"a\\x00b\.jpg cannot be used: the operating system refused to read it"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_refusals_say_why(data, message):
    with pytest.raises(BadImage, match=message):
        open_image(data)


@pytest.mark.parametrize("data", [jpeg(), jpeg()[:-2]], ids=["whole", "no end marker"])
def test_the_limit_of_pixels_is_exact(data):
    for reader in (open_image, image_info):
        with pytest.raises(BadImage, match=r"too many pixels \(768, the limit is 767\)"):
            reader(data, max_pixels=767)
    assert open_image(data, max_pixels=768).size == (32, 24)


def test_the_limit_may_exceed_pillows_own():
    assert image_size(bomb(14000), max_pixels=200_000_000) == (14000, 14000)
    image = open_image(bomb(3000))
    assert (image.size, image.getextrema()) == ((3000, 3000), ((0, 0),) * 3)


@pytest.mark.parametrize("size", [(1, MAX_ASPECT), (MAX_ASPECT, 1), (3, 3 * MAX_ASPECT), (200, 2)])
def test_thin_images_up_to_the_limit_are_unchanged(size):
    pixels = photo(*size)
    assert np.array_equal(np.asarray(open_image(encoded(pixels, "PNG"))), pixels)


@pytest.mark.parametrize("size", [(1, 1_000_000), (1_000_000, 1), (3, 3 * MAX_ASPECT + 1), (2, 10_000)])
def test_thinner_images_are_refused_with_their_size(size):
    height, width = size
    data = png(width, height, zlib.compress(bytes(height * (3 * width + 1))))
    with pytest.raises(BadImage, match=f"its longer side is more than {MAX_ASPECT} times .*it is {width} x {height}"):
        open_image(data)
    assert outcome(data) == "too-thin"


@pytest.mark.parametrize(
    ("kind", "value"),
    [(3, (1, 2, 3, 4)), (4, (7,)), (5, ((1, 0),)), (11, (1.5, 2.5)), (12, (0.5,)), (2, b"\xff\0")],
)
def test_malformed_xmp_is_judged_alike(kind, value):
    """Pillow reads a TIFF's XMP once, for the orientation; what it cannot read must not decide who asks first."""
    outcome(tagged_tiff({700: (kind, value)}))


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("weft.data.decode.open_regular", OSError(5, "a disk"), r"a\.bmp cannot be used: the operating system refused"),
        ("weft.data.decode.open_regular", MemoryError(), r"a\.bmp cannot be used: there is not enough memory"),
        ("PIL.ImageFile.ImageFile.load", MemoryError(), r"a\.bmp cannot be used: there is not enough memory to decode"),
    ],
)
def test_an_error_of_the_disk_or_of_the_memory_is_that_of_one_image(place, error, message, tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise error

    (tmp_path / "a.bmp").write_bytes(encoded(photo(), "BMP"))
    monkeypatch.setattr(place, fail)
    with pytest.raises(BadImage, match=message):
        open_image(tmp_path / "a.bmp")


def test_truncated_images_are_refused_whatever_the_program_allows(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(BadImage, match="the file is truncated"):
        open_image(jpeg()[:600])


@pytest.mark.parametrize(
    ("at_least", "size"), [(None, (640, 480)), (300, (640, 480)), (240, (320, 240)), (1, (80, 60))]
)
def test_only_a_jpeg_may_be_decoded_smaller(at_least, size):
    pixels = photo(480, 640)
    image = open_image(encoded(pixels, "JPEG", quality=95), at_least=at_least)
    assert image.size == size
    shrunk = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX), dtype=float)
    assert np.abs(np.asarray(image, dtype=float) - shrunk).mean() < 6
    assert open_image(encoded(pixels, "PNG"), at_least=at_least).size == (640, 480)


def test_threads_with_different_limits_do_not_disturb_each_other():
    outcomes = {10: set(), 200_000_000: set()}
    data = bomb(9500)  # 90 megapixels: Pillow would warn

    def work(limit: int) -> None:
        for _ in range(100):
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


COST = """
import io, json, resource, sys
from weft.data.decode import BadImage, open_image
open_image(sys.argv[1])  # what is imported late is imported now
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
assert "torch" not in sys.modules
print(json.dumps(rows))
"""


def test_bombs_cost_neither_calls_nor_memory_and_nothing_imports_torch(tmp_path):
    gif = bytearray(encoded(photo(), "GIF"))
    at = gif.index(b"\x2c\0\0\0\0", 13)  # the first frame claims 65,535 pixels a side, and to be cleared afterwards
    gif[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    gif[at:at] = b"\x21\xf9\x04\x08\0\0\0\0"
    kinds = {
        "first.jpg": (jpeg(), ""),
        "10001.png": (bomb(10001), "too-many-pixels"),
        "14000.png": (bomb(14000), "too-many-pixels"),
        "60000.png": (png(60000, 60000, b"x\x9c\x03\0\0\0\0\x01"), "too-many-pixels"),
        "frame.gif": (bytes(gif), "too-many-pixels"),
        "comment.png": (text_bomb(), "metadata-bomb"),
        "pages.tif": (paged_tiff(5000), "good"),
    }
    assert len(kinds["10001.png"][0]) < 13_000
    for name, (data, _) in kinds.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-W", "error", "-c", COST, *(str(tmp_path / name) for name in kinds)]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for (name, (_, expected)), (verdict, calls, megabytes) in zip(list(kinds.items())[1:], rows, strict=True):
        assert (name, verdict) == (name, expected)
        assert calls <= 200_000, name
        assert megabytes <= 50, name


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_files_are_closed_again(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for name, data in {"good.jpg": jpeg(), "bad.jpg": jpeg()[:400], "page.jpg": b"hello"}.items():
        (tmp_path / name).write_bytes(data)
        with contextlib.suppress(BadImage):
            open_image(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_libraries_write_nothing_to_the_terminal(capfd):
    """libtiff reports each damaged strip on the standard error of the process."""
    good = encoded(photo(64, 64), "TIFF", compression="tiff_lzw")
    for place in range(0, len(good) - 8, 40):
        with contextlib.suppress(BadImage):
            open_image(good[:place] + b"\xff" * 8 + good[place + 8 :])
    assert capfd.readouterr() == ("", "")
