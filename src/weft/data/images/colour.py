"""Convert decoded images to upright, opaque 8-bit sRGB: orientation, transparency, bit depth, colour profile."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image, ImageCms

NOTES = {  # conversions of usable images -> description
    "gray": "gray, converted to RGB",
    "palette": "palette, converted to RGB",
    "cmyk": "CMYK, converted to RGB",
    "lab": "Lab, converted to RGB",
    "16-bit": "more than 8 bits per channel, scaled to 8 by the value range of the dataset",
    "alpha": "transparent, composited on the background",
    "icc": "colour profile, converted to sRGB",
    "icc-unreadable": "colour profile that cannot be read or does not fit the channels, ignored",
    "exif-rotated": "rotated by its EXIF orientation",
    "animated": "animated, first frame used",
    "pages": "several pages, first page used",
    "no-end-marker": "JPEG without its end marker; no pixel is missing",
    "extension": "extension does not match the content; the content is used",
}
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {  # EXIF orientation -> operation that corrects it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
MODE_NOTES = {"1": "gray", "L": "gray", "LA": "gray", "La": "gray", "P": "palette", "PA": "palette", "CMYK": "cmyk"}
PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK", "Lab": "LAB"}  # ICC colour space -> Pillow's mode


GRAY_ALPHA = "LA;16B"  # raw mode of a PNG; read as RGBA, the lower byte of gray is green
MAX_TRANSFORMS = 16  # cached colour conversions; each has tables of up to 1 MiB
ROWS = 256  # rows of pixels scaled at a time
MAX_PROFILE = 4 << 20  # bytes of a colour profile; large printer profiles have 3 MiB


ValueRange = tuple[int, int]
"""Values of black and white in images of more than 8 bits per channel."""

MAX_16 = 0xFFFF  # largest value of 16 bits
DARK = 1 / 8  # of the value range: an image with almost all values below is nearly black
SHARE = 10  # a note on such images if they are more than one in so many
PEAK, PEAK_PIXELS = 0.99, 1 << 20  # share of the pixels that are at most as bright as the peak; pixels that measure it


class Values(NamedTuple):
    """Values of an image of more than 8 bits per channel: the smallest, the peak (99th percentile) and the largest."""

    low: int
    peak: int
    high: int


class NoValueRange(ValueError):
    """Pixels whose values of black and white are unknown. `reason` is `float-pixels` or `integer-pixels`."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    """Properties that Pillow reports only before it loads the pixels.

    Attributes:
        size: (height, width) as stored; of a TIFF after rotation, since Pillow rotates TIFFs while loading.
        is_deep: whether the file has more than 8 bits per channel, in any mode.
        is_turned: whether loading rotates the image (TIFF).
    """

    size: tuple[int, int]
    is_deep: bool
    is_turned: bool


def read_header(image: Image.Image) -> Header:
    """Return the header of an image; call it before `image.load()` and `image.draft()`."""
    # the raw mode of a tile is, for example, "RGB;16B"
    is_deep = image.mode[0] in "IF" or any(";16" in str(tile) for tile in getattr(image, "tile", []))
    # only TIFFs: a PNG's EXIF may follow its pixels, and Pillow would cache that there is none
    return Header((image.height, image.width), is_deep, image.format == "TIFF" and orientation(image) in UPRIGHT)


def lower_bytes(image: Any, data: bytes) -> Image.Image | None:
    """Return the lower bytes of red, green and blue of 16 bits each, of which Pillow decodes the upper ones.

    Args:
        image: with its header read, but not loaded.
        data: the file.

    Returns:
        A loaded image; None if `image` is gray or has other channels.
    """
    if image.mode not in ("RGB", "RGBA") or ";16" not in str(image.tile):
        return None
    other: Any = Image.open(io.BytesIO(data), formats=(str(image.format),))
    other.tile = [tile._replace(args=_swapped(tile.args)) for tile in other.tile]
    other.load()
    return Image.merge("RGB", [other.getchannel("G")] * 3) if GRAY_ALPHA in str(image.tile) else other


def _swapped(args: Any) -> Any:
    """Return the arguments of a decoder with the raw mode of the other byte order, which selects the lower bytes."""
    if isinstance(args, tuple):
        return tuple(_swapped(one) if isinstance(one, str) else one for one in args)
    for order, other in (("16B", "16L"), ("16L", "16B"), ("16N", "16B" if sys.byteorder == "little" else "16L")):
        if args in (f"RGB;{order}", f"RGBA;{order}", f"RGBX;{order}"):
            return args.replace(order, other)
    return "RGBA" if args == GRAY_ALPHA else args


def range_comment(value_range: ValueRange) -> bytes:
    """Return the comment of a JPEG file with 8 bits that was made of an image with more, by a value range."""
    return b"weft value_range %d %d" % value_range


def commented_values(image: Image.Image) -> Values | None:
    """Return the values of the image that a JPEG file was made of, by the comment that `range_comment` made."""
    match = re.fullmatch(rb"weft value_range (-?\d{1,10}) (\d{1,10})", image.info.get("comment") or b"")
    if match is None or not int(match[1]) < int(match[2]):
        return None
    return Values(int(match[1]), int(match[2]), int(match[2]))


def upright_size(image: Image.Image, header: Header) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation."""
    is_sideways = orientation(image) >= 5 and image.format != "TIFF"
    height, width = header.size
    return (width, height) if is_sideways else (height, width)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where it is absent or invalid."""
    try:
        # the base class's method: PNG's own decodes the whole image to find EXIF after the pixels
        value = Image.Image.getexif(image).get(ORIENTATION)
    except Exception:  # EXIF is an untrusted TIFF inside the file; without it the image is still usable
        return 1
    return value if value in UPRIGHT else 1


def to_rgb(
    image: Image.Image, background: tuple[int, int, int], value_range: ValueRange | None = None, low_bytes: Any = None
) -> Image.Image:
    """Convert a loaded image to upright, opaque 8-bit sRGB.

    Args:
        image: loaded, in any of Pillow's modes.
        background: RGB colour behind transparent pixels, 0 to 255 each.
        value_range: values of black and white in an image of more than 8 bits per channel; None: 0 and the largest
            value of its bit depth.
        low_bytes: of a colour image of 16 bits per channel, the result of `lower_bytes`; `image` has the upper bytes.

    Raises:
        NoValueRange: floating point pixels, or wide integers without a value range.
    """
    if low_bytes is not None and value_range is not None:
        image = _scaled_colours(image, low_bytes, value_range)
    colour, alpha = _split_alpha(image, value_range)
    colour = _to_srgb(colour, image.info.get("icc_profile"))
    if alpha is not None:
        below = Image.new("RGB", colour.size, background)
        below.paste(colour, mask=alpha)  # as Image.composite, without its copy of the background
        colour = below
    turn = UPRIGHT.get(orientation(image))
    return colour if turn is None else colour.transpose(turn)


def describe(image: Image.Image, header: Header) -> tuple[str, ...]:
    """Return the keys of `NOTES` that apply to a loaded image; the same for a JPEG decoded at a reduced size.

    Raises:
        NoValueRange: as `to_rgb`.
    """
    notes = []
    if image.mode in MODE_NOTES:
        notes.append(MODE_NOTES[image.mode])
    if image.mode == "LAB":
        notes.append("lab")
    if image.mode[0] in "IF":
        notes.append("gray")
    if header.is_deep:
        notes.append("16-bit")
    if image.has_transparency_data and _split_alpha(image, (0, MAX_16))[1] is not None:
        notes.append("alpha")
    if profile := image.info.get("icc_profile"):
        notes += {"sRGB": [], "other": ["icc"], "unreadable": ["icc-unreadable"]}[_profile_kind(profile, image)]
    if header.is_turned or orientation(image) in UPRIGHT:
        notes.append("exif-rotated")
    return (*notes, *_frames(image))


def _split_alpha(image: Image.Image, value_range: ValueRange | None) -> tuple[Image.Image, Image.Image | None]:
    """Split into colours in an 8-bit mode without alpha, and alpha (None if opaque)."""
    if image.mode[0] in "IF":
        return _to_eight_bits(image, value_range)
    if not image.has_transparency_data:
        return (image.convert("RGB") if image.mode in ("P", "YCbCr", "RGBX") else image), None
    is_gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("La", "RGBa"):  # premultiplied alpha
        image = image.convert("LA" if is_gray else "RGBA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    alpha = image.getchannel("A")
    colour = image.getchannel("R") if is_gray else image.convert("RGB")
    return colour, None if alpha.getextrema() == (255, 255) else alpha


def values_of(image: Image.Image, low_bytes: Any = None) -> Values:
    """Return the values of a loaded image of more than 8 bits per channel.

    Args:
        image: gray of more than 8 bits, or the upper bytes of a colour image of 16 bits per channel.
        low_bytes: the image of its lower bytes, as `lower_bytes` returns it.

    Raises:
        NoValueRange: floating point pixels.
    """
    values = _integers(image) if image.mode[0] in "IF" else _colours(image, low_bytes)
    sample = values.reshape(-1)[:: max(values.size // PEAK_PIXELS, 1)]
    place = int(PEAK * (len(sample) - 1))
    return Values(int(values.min()), int(np.partition(sample, place)[place]), int(values.max()))


def common_range(values: Iterable[Values]) -> ValueRange | None:
    """Return the value range of a dataset by the values of its images; None without images of more than 8 bits.

    Black is 0, and white the largest value of their number of bits: 4095 for 12 bits. For signed values, and for values
    with an offset, which use an eighth of that range at most, black and white are the smallest and the largest value.
    """
    ends = [(one.low, one.high) for one in values]
    if not ends:
        return None
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    white = 2 ** max(high.bit_length(), 1) - 1
    return (0, white) if low >= 0 and high - low >= DARK * white else (low, max(high, low + 1))


def range_note(values: Sequence[Values], value_range: ValueRange | None, advice: str) -> str:
    """Return a note if over a tenth of the images of more than 8 bits is nearly black or white; else an empty text.

    Args:
        values: of the images.
        value_range: black and white; None: 0 and the largest value of 16 bits.
        advice: what to do, one or more sentences.
    """
    low, high = value_range or (0, MAX_16)
    limit = low + DARK * (high - low)
    peaks = [one.peak for one in values]
    dark, bright = [peak for peak in peaks if peak < limit], [peak for peak in peaks if peak > high]
    of = f"of {len(peaks):,} images of more than 8 bits per channel"
    if SHARE * len(dark) > len(peaks):
        return (
            f"{len(dark):,} {of} become nearly black: 99 % of their values are at most {max(dark):,}, black is {low:,}"
            f" and white {high:,}. {advice}"
        )
    if SHARE * len(bright) > len(peaks):
        return (
            f"{len(bright):,} {of} lose their bright parts: they have values up to {max(bright):,}, and white is"
            f" {high:,}. {advice}"
        )
    return ""


def value_notes(values: Sequence[Values], value_range: ValueRange) -> list[str]:
    """Return notes on images of more than 8 bits per channel to train on; none without such images.

    Args:
        values: of the images.
        value_range: black and white.
    """
    if not values:
        return []
    low, high = value_range
    setting = "--set data.value_range=[BLACK,WHITE]"
    note = (
        f"Images of more than 8 bits per channel: {len(values):,}, with values from {min(one.low for one in values):,}"
        f" to {max(one.high for one in values):,}. Black is {low:,} and white is {high:,}, also in inference; another"
        f" range: {setting}."
    )
    return [note, *filter(None, [range_note(values, value_range, f"Check them, or choose another range: {setting}.")])]


def _integers(image: Image.Image) -> np.ndarray:
    """Return the values of a gray image of more than 8 bits, as integers."""
    if image.mode == "F":
        raise NoValueRange("float-pixels")
    values = np.asarray(image)
    if values.dtype.itemsize == 2:
        return values.astype(np.uint16, copy=False)  # of either byte order
    tags: Any = getattr(image, "tag_v2", {})
    is_unsigned = _number(tags.get(BITS_PER_SAMPLE), 0) == 32 and _number(tags.get(SAMPLE_FORMAT), 1) == 1
    return values.view(np.uint32) if is_unsigned else values


def _to_eight_bits(image: Image.Image, value_range: ValueRange | None) -> tuple[Image.Image, Image.Image | None]:
    """Scale gray pixels of more than 8 bits so that black becomes 0 and white 255; also return the alpha."""
    values = _integers(image)
    tags: Any = getattr(image, "tag_v2", {})
    if value_range is None:
        if values.dtype.itemsize > 2:
            raise NoValueRange("integer-pixels")
        value_range = 0, 2 ** _number(tags.get(BITS_PER_SAMPLE), 16) - 1
    is_inverted = tags.get(PHOTOMETRIC) == 0  # WhiteIsZero
    transparent = image.info.get("transparency")
    alpha = None
    if isinstance(transparent, int):
        alpha = Image.fromarray(np.where(values == transparent, np.uint8(0), np.uint8(255)))
    if values.dtype.itemsize == 2:
        table = _levels(np.arange(1 << 16), value_range, is_inverted)
        return Image.fromarray(table[values]), alpha
    levels = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), ROWS):  # in bands: all rows as 64-bit floats would take eight times the memory
        levels[row : row + ROWS] = _levels(values[row : row + ROWS], value_range, is_inverted)
    return Image.fromarray(levels), alpha


def _levels(values: np.ndarray, value_range: ValueRange, is_inverted: bool = False) -> np.ndarray:
    low, high = value_range
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    levels = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return 255 - levels if is_inverted else levels


def _colours(image: Image.Image, low_bytes: Any) -> np.ndarray:
    """Return the 16-bit red, green and blue of an image."""
    upper, lower = (np.asarray(half)[..., :3] for half in (image, low_bytes))
    return upper.astype(np.uint16) << 8 | lower


def _scaled_colours(image: Image.Image, low_bytes: Any, value_range: ValueRange) -> Image.Image:
    """Return the 8-bit image of a colour image of 16 bits per channel, in the same mode; its alpha is unchanged."""
    levels = np.array(image)
    table = _levels(np.arange(1 << 16), value_range)
    levels[..., :3] = table[_colours(image, low_bytes)]
    scaled = Image.fromarray(levels, image.mode)
    scaled.info = image.info
    return scaled


def _number(tag: Any, default: int) -> int:
    """Return the first value of a TIFF tag, which Pillow gives as a number or in a tuple."""
    values: Any = tag if isinstance(tag, tuple) else (tag,)
    return default if not values or values[0] is None else int(values[0])


def _to_srgb(image: Image.Image, profile: Any) -> Image.Image:
    """Convert to RGB, by the embedded profile if it fits the channels."""
    if image.mode == "LAB":
        return _apply(image, _lab_to_srgb())
    mode, transform = _transform(profile) if isinstance(profile, bytes) and profile else ("", None)
    if (
        transform is None
        or (mode == "CMYK") != (image.mode == "CMYK")
        or (mode == "L" and image.mode not in ("1", "L"))
    ):
        return image.convert("RGB")
    return _apply(image if image.mode == mode else image.convert(mode), transform)


def _profile_kind(profile: Any, image: Image.Image) -> str:
    """Return `sRGB` (no conversion needed), `other`, or `unreadable` (also: profile for other channels)."""
    mode, transform = _transform(profile) if isinstance(profile, bytes) else ("", None)
    is_gray = image.mode in ("1", "L", "LA", "La") or image.mode[0] in "IF"
    if not mode or (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and not is_gray):
        return "unreadable"
    return "sRGB" if transform is None else "other"


def _apply(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # None is for inPlace=True only
    return converted


def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return the cached (input mode, conversion): no conversion for sRGB, an empty mode for an unreadable profile."""
    if len(profile) > MAX_PROFILE:
        return "", None
    key = hashlib.sha256(profile).digest()  # hash as key, so that a service does not retain uploaded profiles
    with _transforms_lock:
        if key in _transforms:
            _transforms.move_to_end(key)
            return _transforms[key]
    transform = _build_transform(profile)
    with _transforms_lock:
        _transforms[key] = transform
        while len(_transforms) > MAX_TRANSFORMS:
            _transforms.popitem(last=False)
    return transform


_transforms: OrderedDict[bytes, tuple[str, ImageCms.ImageCmsTransform | None]] = OrderedDict()
_transforms_lock = threading.Lock()


def _build_transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    try:
        parsed = ImageCms.getOpenProfile(io.BytesIO(profile))
        mode = PROFILE_MODES[cast(Any, parsed.profile).xcolor_space.strip()]
        transform = ImageCms.buildTransform(parsed, ImageCms.createProfile("sRGB"), mode, "RGB")
        ramp = _probe(mode)
        is_srgb = mode in ("L", "RGB") and _distance(_apply(ramp, transform), ramp.convert("RGB")) <= 1
    except Exception:  # untrusted bytes: Pillow raises OSError, PyCMSError, KeyError, ...
        return "", None
    return mode, None if is_srgb else transform


@lru_cache(maxsize=1)
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")


def _probe(mode: str) -> Image.Image:
    """Return an image of colours over the RGB cube in steps of 16, to recognise sRGB profiles of any name."""
    steps = np.append(np.arange(0, 255, 16), 255).astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(len(steps), -1, 3)
    return Image.fromarray(cube).convert(mode)


def _distance(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other)).max())


def _frames(image: Image.Image) -> tuple[str, ...]:
    """Return `animated` or `pages` if there is a second frame. Counting all frames would read the whole file."""
    if image.format in ("PNG", "WEBP"):  # stated in the header
        return ("animated",) if getattr(image, "n_frames", 1) > 1 else ()
    if image.format not in ("GIF", "TIFF"):
        return ()
    try:
        image.seek(1)
    except Exception:  # EOFError if there is none; any other error is in a frame that is not used
        return ()
    return ("animated",) if image.format == "GIF" else ("pages",)
