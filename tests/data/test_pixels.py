"""Golden pixels, worked out by hand or in NumPy from the definitions, to one level in 255."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from tests.data.pictures import (
    BLACK_TO_WHITE,
    SRGB_PRIMARIES,
    chunk,
    encoded,
    icc_profile,
    photo,
    png,
    raw_tiff,
    tagged_tiff,
    tiff,
)
from weft.data import image_size, open_image
from weft.data.bit_depth import PEAK, PEAK_PIXELS, Values, common_range, range_note, values_of
from weft.data.decode import BadImage, image_info, image_values

LEVELS = np.arange(256).reshape(16, 16)
RAMP_16 = BLACK_TO_WHITE.reshape(16, 16)  # level k is exactly 257 k
COLOURS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [120, 60, 200]], np.uint8)
ROTATED = SRGB_PRIMARIES[[1, 2, 0]]  # what it calls red is green


def shows(data: bytes, expected: np.ndarray, notes: tuple[str, ...] | None = None, **options: Any) -> None:
    """Asserts that a person sees `expected`, gray (h, w) or RGB (h, w, 3), to one level, and the notes."""
    seen = np.asarray(open_image(data, **options)).astype(int)
    if expected.ndim == 2:
        expected = np.repeat(expected[..., None], 3, axis=-1)
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).max() <= 1
    assert notes is None or image_info(data).notes == notes


def lossless(format: str) -> dict[str, Any]:
    return {"lossless": True, "exact": True} if format == "WEBP" else {}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw_tiff(65535 - RAMP_16, 16, photometric=0), id="white-is-zero"),
        pytest.param(raw_tiff(RAMP_16 >> 4, 12, photometric=1), id="12-bit"),
        pytest.param(raw_tiff((255 - LEVELS).astype(np.uint8), 8, photometric=0), id="8-bit-white-is-zero"),
    ],
)
def test_gray_of_a_tiff_is_scaled_by_its_fields(data):
    shows(data, LEVELS)


def test_float_pixels_are_refused_whatever_range_they_declare():
    with pytest.raises(ValueError, match="floating point"):
        open_image(tiff(np.zeros((2, 2), np.float32), {340: 0.0, 341: 1.0}), value_range=(0, 1))


def deep_files(values: np.ndarray) -> dict[str, bytes]:
    """Return files of different kinds with the same gray values, below 65,536."""
    values = values.astype(np.uint16)
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in values)
    alpha = b"".join(b"\0" + np.stack([row, row * 0 + 65535], 1).astype(">u2").tobytes() for row in values)
    height, width = values.shape
    return {
        "png": encoded(values, "PNG"),
        "tiff": encoded(values, "TIFF"),
        "tiff-big-endian": raw_tiff(values, 16, photometric=1, order=">"),
        "tiff-deflate": encoded(values, "TIFF", compression="tiff_deflate"),
        "int32": encoded(values.astype(np.int32), "TIFF"),
        "uint32": raw_tiff(values.astype(np.uint32), 32, photometric=1),
        "rgb-png": png(width, height, zlib.compress(rows), depth=16),
        "gray-alpha-png": png(width, height, zlib.compress(alpha), depth=16, colour=4),
    }


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("kind", deep_files(RAMP_16))
def test_a_scene_has_the_same_pixels_at_any_bit_depth(bits, kind):
    data = deep_files(RAMP_16 >> (16 - bits))[kind]
    value_range = common_range([image_values(data)])
    assert value_range == (0, 2**bits - 1)
    shows(data, LEVELS, value_range=value_range)
    if bits == 16 and "int" not in kind:  # without a range, by the bit depth
        shows(data, LEVELS)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([(0, 9, 4095), (3, 9, 4000)], (0, 4095), id="12-bit"),
        pytest.param([(100, 900, 1000), (0, 1, 3)], (0, 1023), id="a-dark-image-uses-the-range-of-the-others"),
        pytest.param([(0, 0, 0)], (0, 1), id="black"),
        pytest.param([(-1024, 9, 3071)], (-1024, 3071), id="signed"),
        pytest.param([(31744, 9, 35000), (32000, 9, 34815)], (31744, 35000), id="offset"),
        pytest.param([(20000, 9, 50000)], (0, 65535), id="low-contrast"),
        pytest.param([(0, 9, 4_000_000_000)], (0, 2**32 - 1), id="uint32"),
        pytest.param([(7000, 7000, 7000)], (7000, 7001), id="constant"),
        pytest.param([], None, id="8-bit"),
    ],
)
def test_the_value_range_is_that_of_the_dataset(values, expected):
    assert common_range([Values(*one) for one in values]) == expected


@pytest.mark.parametrize("count", [1, 1_000, PEAK_PIXELS, 2 * PEAK_PIXELS + 1])
def test_the_peak_is_a_quantile_of_all_values(count):
    """Also of a large image, of which a part is looked at."""
    values = np.linspace(0, 60_000, count).round().astype(np.uint16)[None]
    found = values_of(Image.new("I;16", (count, 1)), values)
    assert (found.low, found.high) == (values[0, 0], values[0, -1])
    assert found.peak == pytest.approx(np.quantile(values, PEAK), abs=60_000 / min(count, PEAK_PIXELS) + 1)


@pytest.mark.parametrize(
    ("values", "sample_format"),
    [
        ((RAMP_16 >> 4).astype(np.int16) - 1024, 2),
        ((RAMP_16 >> 4).astype(np.int32) - 1024, 2),
        ((RAMP_16 >> 4) + np.uint16(31744), 1),
        (RAMP_16.astype(np.uint32) * 65537, 1),  # above 2 ** 31
    ],
    ids=["int16", "int32", "offset", "uint32"],
)
def test_signed_values_offsets_and_large_values_use_all_levels(values, sample_format):
    data = raw_tiff(values, 8 * values.dtype.itemsize, photometric=1, sample_format=sample_format)
    shows(data, LEVELS, value_range=common_range([image_values(data)]))


def test_values_out_of_the_range_are_black_and_white():
    shows(encoded(np.array([[0, 10, 20, 65535]], np.uint16), "PNG"), np.array([[0, 0, 255, 255]]), value_range=(10, 20))


@pytest.mark.parametrize(
    ("peak", "value_range", "message"),
    [
        (4095, None, "become nearly black: 99 % of their values are at most 4,095, black is 0 and white 65,535. Do."),
        (4095, (0, 65535), "nearly black"),
        (32000, (31744, 65535), "nearly black"),
        (39064, (0, 4095), "lose their bright parts: they have values up to 39,064, and white is 4,095. Do."),
        (4095, (0, 4095), ""),
        (30000, None, ""),
    ],
)
def test_a_range_that_does_not_fit_has_a_note(peak, value_range, message):
    fitting = Values(0, *(value_range or (0, 60000))[1:], 65535)
    assert range_note([], value_range, "Do.") == ""
    for num_other, num_fitting in ((3, 1), (2, 8)):  # two of ten: such as one class
        note = range_note([Values(0, peak, 65535)] * num_other + [fitting] * num_fitting, value_range, "Do.")
        assert note.partition(" images")[0] == (f"{num_other} of {num_other + num_fitting}" if message else "")
        assert message in note


def test_a_comment_of_a_png_is_no_value_range():
    """Pillow gives it as text; that of a JPEG, in which a value range is kept, as bytes."""
    comment = PngImagePlugin.PngInfo()
    comment.add_text("comment", "weft value_range 0 4095")
    data = encoded(photo(), "PNG", pnginfo=comment)
    assert image_info(data).values is image_values(data) is None


def test_deep_colour():
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in photo(4, 6).astype(np.uint16) * 257)
    shows(png(6, 4, zlib.compress(rows), depth=16), photo(4, 6), notes=("16-bit",))


def test_cmyk():
    inks = np.array([[0, 0, 0, 0], [255, 0, 0, 0], [0, 255, 0, 0], [0, 0, 255, 0], [0, 0, 0, 255], [51, 102, 0, 51]])
    expected = (255 - inks[:, :3]) * (255 - inks[:, 3:]) / 255
    shows(encoded(Image.fromarray(inks[None].astype(np.uint8), "CMYK"), "TIFF"), np.rint(expected[None]).astype(int))
    paper = Image.new("CMYK", (16, 16), (0, 0, 0, 0))  # inverted in a JPEG, as Adobe does
    shows(encoded(paper, "JPEG", quality=95), np.full((16, 16), 255))


def test_ycbcr():
    flat = Image.new("YCbCr", (8, 8), (76, 85, 255))  # ITU-R 601: full red
    shows(encoded(flat, "TIFF"), np.broadcast_to([254, 0, 0], (8, 8, 3)))


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 90)])
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composited_on_the_background(format, background):
    colour, alpha = photo(8, 8), LEVELS[:8, ::2].astype(np.uint8)
    weight = alpha[..., None] / 255
    expected = np.rint(colour * weight + np.array(background) * (1 - weight)).astype(int)
    shows(encoded(np.dstack([colour, alpha]), format, **lossless(format)), expected, background=background)
    gray = Image.merge("LA", [Image.fromarray(colour[..., 0]), Image.fromarray(alpha)])
    if format == "PNG":
        expected = colour[..., :1] * weight + np.array(background) * (1 - weight)
        shows(encoded(gray, "PNG"), np.rint(expected).astype(int), background=background)


def test_gray_multiplied_by_its_alpha():
    """Associated alpha of TIFF: what is stored shows on black."""
    fields = {258: (3, (8, 8)), 262: (3, (1,)), 277: (3, (2,)), 279: (4, (128,)), 338: (3, (1,))}
    data = tagged_tiff(fields)  # 0 of 1, 2 of 3, 4 of 5 ...
    shows(data, np.arange(0, 128, 2).reshape(8, 8), background=(0, 0, 0))
    shows(data, np.full((8, 8), 254))


@pytest.mark.parametrize(
    ("format", "transparency", "green", "blue"),
    [
        ("PNG", bytes([255, 0, 128]), [255, 255, 255], [127, 127, 255]),
        ("PNG", 1, [255, 255, 255], [0, 0, 255]),
        ("GIF", 1, [255, 255, 255], [0, 0, 255]),
    ],
)
def test_palette_with_transparent_entries(format, transparency, green, blue):
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    shows(encoded(image, format, transparency=transparency), np.array([[[255, 0, 0], green, blue]]))


def test_transparent_colour_key():
    colours = COLOURS.copy()
    colours[3] = 255  # blue is the key
    shows(encoded(COLOURS[None], "PNG", transparency=(0, 0, 255)), colours[None])
    gray = np.array([[0, 100, 200]], np.uint8)
    shows(encoded(gray, "PNG", transparency=100), np.array([[0, 255, 200]]))
    shows(encoded(gray.astype(np.uint16) * 257, "PNG", transparency=100 * 257), np.array([[0, 255, 200]]))
    shows(encoded(Image.fromarray(gray > 50), "PNG", transparency=0), np.array([[255, 255, 255]]))


STORED = {  # EXIF: the visual side of row 0 and of column 0, as what is stored of an upright image
    1: lambda upright: upright,  # top, left
    2: lambda upright: upright[:, ::-1],  # top, right
    3: lambda upright: upright[::-1, ::-1],  # bottom, right
    4: lambda upright: upright[::-1],  # bottom, left
    5: lambda upright: upright.swapaxes(0, 1),  # left, top
    6: lambda upright: upright[:, ::-1].swapaxes(0, 1),  # right, top
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),  # right, bottom
    8: lambda upright: upright[::-1].swapaxes(0, 1),  # left, bottom
}


def oriented(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation(format, orientation):
    upright = photo(8, 24)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    stored = np.ascontiguousarray(STORED[orientation](upright))
    data = encoded(stored, format, exif=oriented(orientation), **options)
    if format == "JPEG":  # lossy: turned back, the same as without the tag
        plain = open_image(encoded(stored, format, **options))
        np.testing.assert_array_equal(STORED[orientation](np.asarray(open_image(data))), np.asarray(plain))
    else:
        shows(data, upright.astype(int))
    assert image_size(data) == image_info(data).size == (8, 24)
    assert image_info(data).notes == (("exif-rotated",) if orientation > 1 else ())


@pytest.mark.parametrize("exif", [oriented(0), oriented(9), oriented(65535), b"Exif\0\0II*\0\xff\xff\xff\x7f"])
def test_a_senseless_orientation_is_none(exif):
    shows(encoded(photo(), "PNG", exif=exif), photo().astype(int))


def test_exif_behind_the_pixels():
    plain = encoded(photo(8, 24), "PNG")
    end = plain.index(b"IEND") - 4
    data = plain[:end] + chunk(b"eXIf", oriented(6).tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    shows(data, photo(8, 24).swapaxes(0, 1)[:, ::-1].astype(int))
    assert image_info(data).size == (24, 8)


def expected_srgb(levels: np.ndarray, primaries: np.ndarray, gamma: float) -> np.ndarray:
    """Linear light through XYZ under D50, then IEC 61966-2-1; levels outside the gamut are cut off."""
    light = (levels / 255) ** gamma @ primaries @ np.linalg.inv(SRGB_PRIMARIES)
    light = light.clip(0, 1)
    levels = 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.rint(levels).astype(int)


@pytest.mark.parametrize("gamma", [1.0, 1.8, 2.2])
def test_colour_profiles_are_converted_to_srgb(gamma):
    data = encoded(photo(16, 16), "PNG", icc_profile=icc_profile(ROTATED, gamma))
    shows(data, expected_srgb(photo(16, 16), ROTATED, gamma), notes=("icc",))


def test_a_profile_goes_with_palette_alpha_and_gray():
    profile = icc_profile(ROTATED, 1.8)
    colours = expected_srgb(COLOURS, ROTATED, 1.8)[None]
    palette = Image.fromarray(np.arange(len(COLOURS), dtype=np.uint8)[None], "P")
    palette.putpalette(COLOURS.tobytes())
    shows(encoded(palette, "PNG", icc_profile=profile), colours)
    clear = np.dstack([COLOURS[None], np.array([[255, 255, 255, 255, 255, 0]], np.uint8)])
    shows(encoded(clear, "PNG", icc_profile=profile), np.where(clear[..., 3:] == 0, 255, colours))
    grays = np.array([[0, 64, 128, 255]], np.uint8)
    expected = expected_srgb(np.repeat(grays[..., None], 3, axis=-1), ROTATED, 1.8)
    for values in (grays, grays.astype(np.uint16) * 257):
        shows(encoded(values, "PNG", icc_profile=profile), expected)


@pytest.mark.parametrize(
    ("profile", "notes"),
    [
        (ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), ()),
        (b"no profile", ("icc-unreadable",)),
        (icc_profile(SRGB_PRIMARIES, 2.2)[:200], ("icc-unreadable",)),
    ],
    ids=["sRGB", "text", "cut"],
)
def test_srgb_by_any_name_and_an_unreadable_profile_change_nothing(profile, notes):
    data = encoded(photo(), "PNG", icc_profile=profile)
    np.testing.assert_array_equal(np.asarray(open_image(data)), photo())
    assert image_info(data).notes == notes


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_a_profile_larger_than_that_of_any_printer_is_not_read(format):
    """A service keeps the conversions of several; the profiles of large printers have 3 MiB."""
    profile = bytearray(icc_profile(ROTATED, 2.2))
    for mebibytes in (3, 5):
        profile += bytes((mebibytes << 20) - len(profile))
        profile[:4] = len(profile).to_bytes(4, "big")
        data = encoded(photo(8, 8), format, icc_profile=bytes(profile))
        if (format, mebibytes) == ("PNG", 5):  # Pillow reads it with the header
            with pytest.raises(BadImage, match=r"or its colour profile expands beyond the limit \(4 MiB each"):
                image_info(data)
        else:
            assert image_info(data).notes == (("icc",) if mebibytes == 3 else ("icc-unreadable",))


def test_a_profile_for_other_channels_is_ignored_and_noted():
    data = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF", icc_profile=icc_profile(SRGB_PRIMARIES, 2.2))
    shows(data, np.broadcast_to([255, 0, 0], (8, 8, 3)), notes=("cmyk", "icc-unreadable"))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first(format):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **lossless(format))
    shows(data, np.broadcast_to([250, 0, 0], (8, 8, 3)))
    assert image_info(data).notes[-1] == ("pages" if format == "TIFF" else "animated")


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF"])
def test_plain_pixels_are_untouched(format):
    np.testing.assert_array_equal(np.asarray(open_image(encoded(photo(), format, **lossless(format)))), photo())
