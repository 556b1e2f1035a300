"""Images of more than 8 bits per channel: their values, and the range of a dataset that becomes 0 to 255."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

ValueRange = tuple[int, int]
"""Values of black and white in images of more than 8 bits per channel."""

BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
GRAY_ALPHA = "LA;16B"  # raw mode of a PNG; read as RGBA, the lower byte of gray is green
_OTHER = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}  # byte orders
LOWER = {GRAY_ALPHA: "RGBA"} | {
    f"{mode};16{order}": f"{mode};16{other}" for mode in ("RGB", "RGBA", "RGBX") for order, other in _OTHER.items()
}  # raw mode of 16-bit colours -> the one that reads their lower bytes
ROWS = 256  # rows of pixels scaled at a time
MAX_16 = 0xFFFF  # largest value of 16 bits
DARK = 1 / 8  # of the value range: an image with almost all values below is nearly black
SHARE = 10  # a note on such images if they are more than one in so many
PEAK, PEAK_PIXELS = 0.99, 1 << 20  # share of the pixels that are at most as bright as the peak; pixels that measure it


class Values(NamedTuple):
    """Values of an image of more than 8 bits per channel: the smallest, the peak (99th percentile) and the largest."""

    low: int
    peak: int
    high: int


def is_deep(image: Image.Image) -> bool:
    """Return whether an image that is not loaded yet has more than 8 bits per channel, in any mode."""
    # the raw mode of a tile is, for example, "RGB;16B"
    return image.mode.startswith("I") or any(";16" in str(tile) for tile in getattr(image, "tile", []))


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
    decoder_args = [tile.args if isinstance(tile.args, tuple) else (tile.args,) for tile in other.tile]
    other.tile = [
        tile._replace(args=tuple(LOWER.get(one, one) for one in args))
        for tile, args in zip(other.tile, decoder_args, strict=True)
    ]
    other.load()
    return Image.merge("RGB", [other.getchannel("G")] * 3) if GRAY_ALPHA in str(image.tile) else other


def values_of(image: Image.Image, low_bytes: Image.Image | None = None) -> Values:
    """Return the values of a loaded image of more than 8 bits per channel.

    Args:
        image: gray of more than 8 bits, or the upper bytes of a colour image of 16 bits per channel.
        low_bytes: the image of its lower bytes, as `lower_bytes` returns it.
    """
    values = _gray(image) if low_bytes is None else _colours(image, low_bytes)
    sample = values.reshape(-1)[:: max(values.size // PEAK_PIXELS, 1)]
    place = int(PEAK * (len(sample) - 1))
    return Values(int(values.min()), int(np.partition(sample, place)[place]), int(values.max()))


def scaled_gray(image: Image.Image, value_range: ValueRange | None) -> Image.Image:
    """Return a gray image of 8 bits, of which black and white are the value range; None: those of its bit depth."""
    values, tags = _gray(image), getattr(image, "tag_v2", {})
    low, high = value_range or (0, 2 ** _number(tags.get(BITS_PER_SAMPLE), 16) - 1)
    if tags.get(PHOTOMETRIC) == 0:  # WhiteIsZero
        low, high = high, low
    if values.dtype.itemsize == 2:
        return Image.fromarray(_levels(np.arange(1 << 16), low, high)[values])
    levels = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), ROWS):  # in bands: all rows as 64-bit floats would take eight times the memory
        levels[row : row + ROWS] = _levels(values[row : row + ROWS], low, high)
    return Image.fromarray(levels)


def scaled_colours(image: Image.Image, low_bytes: Image.Image, value_range: ValueRange) -> Image.Image:
    """Return the 8-bit image of a colour image of 16 bits per channel, in the same mode; its alpha is unchanged."""
    levels = np.array(image)
    levels[..., :3] = _levels(np.arange(1 << 16), *value_range)[_colours(image, low_bytes)]
    scaled = Image.fromarray(levels, image.mode)
    scaled.info = image.info
    return scaled


def transparent_value(image: Image.Image) -> Image.Image | None:
    """Return the alpha of a gray image of more than 8 bits with one transparent value; None without such a value."""
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return None
    return Image.fromarray(np.where(_gray(image) == transparent, np.uint8(0), np.uint8(255)))


def _gray(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    if values.dtype.itemsize == 2:
        return values.astype(np.uint16, copy=False)  # of either byte order
    tags: Any = getattr(image, "tag_v2", {})
    is_unsigned = _number(tags.get(BITS_PER_SAMPLE), 0) == 32 and _number(tags.get(SAMPLE_FORMAT), 1) == 1
    return values.view(np.uint32) if is_unsigned else values


def _colours(image: Image.Image, low_bytes: Image.Image) -> np.ndarray:
    upper, lower = (np.asarray(half)[..., :3] for half in (image, low_bytes))
    return upper.astype(np.uint16) << 8 | lower


def _levels(values: np.ndarray, black: int, white: int) -> np.ndarray:
    return np.rint(((values.astype(np.float64) - black) * (255 / (white - black))).clip(0, 255)).astype(np.uint8)


def _number(tag: Any, default: int) -> int:
    """Return the first value of a TIFF tag, which Pillow gives as a number or in a tuple."""
    values: Any = tag if isinstance(tag, tuple) else (tag,)
    return default if not values or values[0] is None else int(values[0])


def range_comment(value_range: ValueRange) -> bytes:
    """Return the comment of a JPEG file with 8 bits that was made of an image with more, by a value range."""
    return b"weft value_range %d %d" % value_range


def commented_values(image: Image.Image) -> Values | None:
    """Return the values of the image that a JPEG file was made of, by the comment that `range_comment` made."""
    match = re.fullmatch(rb"weft value_range (-?\d{1,10}) (\d{1,10})", image.info.get("comment") or b"")
    if match is None or not int(match[1]) < int(match[2]):
        return None
    return Values(int(match[1]), int(match[2]), int(match[2]))


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
