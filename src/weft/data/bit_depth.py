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
BAND = 1 << 20  # pixels scaled at a time: as 64-bit floats they take eight times the memory
MAX_16 = 0xFFFF  # largest value of 16 bits
DARK = 1 / 8  # of the value range: an image with almost all values below is nearly black
SHARE = 10  # a note on such images if they are more than one in so many
PEAK, PEAK_PIXELS = 0.99, 1 << 20  # share of the pixels that are at most as bright as the peak; pixels that measure it
COMMENT = re.compile(rb"weft value_range (-?\d{1,10}) (\d{1,10})")


class Values(NamedTuple):
    """Values of an image of more than 8 bits per channel: the smallest, the peak (99th percentile) and the largest."""

    low: int
    peak: int
    high: int


def is_deep(image: Image.Image) -> bool:
    """Return whether an image that is not loaded yet has more than 8 bits per channel, in any mode."""
    # the raw mode of a tile is, for example, "RGB;16B"
    return image.mode.startswith("I") or any(";16" in str(tile) for tile in getattr(image, "tile", []))


def load(image: Any, data: bytes | None) -> np.ndarray | None:
    """Load an image; return its values if it has more than 8 bits per channel.

    Of colours of 16 bits per channel, Pillow decodes the upper bytes. The lower bytes are decoded as a second image.

    Args:
        image: with its header read, but not loaded.
        data: the file; None if the values of colours are not needed.

    Returns:
        Values of gray (h w), or of red, green and blue (h w 3); None of an image of 8 bits, or with other channels.
    """
    if data is not None and image.mode in ("RGB", "RGBA") and ";16" in str(image.tile):
        green_only = GRAY_ALPHA in str(image.tile)
        lower: Any = Image.open(io.BytesIO(data), formats=(str(image.format),))
        for number, tile in enumerate(lower.tile):
            decoder_args = tile.args if isinstance(tile.args, tuple) else (tile.args,)
            lower.tile[number] = tile._replace(args=tuple(LOWER.get(one, one) for one in decoder_args))
        lower.load()
        image.load()
        lower_bytes = np.asarray(lower)[..., 1:2] if green_only else np.asarray(lower)[..., :3]
        return np.asarray(image)[..., :3].astype(np.uint16) << 8 | lower_bytes
    image.load()
    if not image.mode.startswith("I"):
        return None
    values = np.asarray(image)
    if values.dtype.itemsize == 2:
        return values.astype(np.uint16, copy=False)  # of either byte order
    return values.view(np.uint32) if _tag(image, SAMPLE_FORMAT, 1) == 1 else values


def values_of(image: Image.Image, values: np.ndarray | None) -> Values | None:
    """Return the smallest, peak and largest of the values that `load` returned; None of an image of 8 bits, if it was
    made of none with more (see `range_comment`)."""
    if values is None:
        comment = image.info.get("comment")
        match = COMMENT.fullmatch(comment) if isinstance(comment, bytes) else None  # PNG has comments of text
        is_range = match is not None and int(match[1]) < int(match[2])
        return Values(int(match[1]), int(match[2]), int(match[2])) if match and is_range else None
    sample = values.reshape(-1)[:: max(values.size // PEAK_PIXELS, 1)]
    place = int(PEAK * (len(sample) - 1))
    return Values(int(values.min()), int(np.partition(sample, place)[place]), int(values.max()))


def range_comment(value_range: ValueRange) -> bytes:
    """Return the comment of a JPEG file with 8 bits that was made of an image with more, by a value range."""
    return b"weft value_range %d %d" % value_range


def scaled(image: Image.Image, values: np.ndarray | None, value_range: ValueRange | None) -> Image.Image:
    """Return a loaded image with 8 bits per channel; one that has no more is returned itself.

    Args:
        image: loaded by `load`.
        values: of `load`.
        value_range: black and white; None: those of the bit depth of a gray image, the upper bytes of colours.
    """
    if values is None or (values.ndim == 3 and value_range is None):
        return image
    low, high = value_range or (0, 2 ** _tag(image, BITS_PER_SAMPLE, 16) - 1)
    if values.ndim == 3:
        levels = np.array(image)
        levels[..., :3] = _levels(values, low, high)
        result = Image.fromarray(levels, image.mode)
    else:
        is_white_zero = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
        result = Image.fromarray(_levels(values, high, low) if is_white_zero else _levels(values, low, high))
        transparent = image.info.pop("transparency", None)
        if transparent is not None:
            result.putalpha(Image.fromarray(np.where(values == transparent, np.uint8(0), np.uint8(255))))
    result.info = image.info
    return result


def _levels(values: np.ndarray, black: int, white: int) -> np.ndarray:
    if values.dtype == np.uint16:
        return _levels(np.arange(1 << 16), black, white)[values]
    levels, values = np.empty(values.shape, np.uint8), values.reshape(-1)
    for start in range(0, values.size, BAND):
        band = (values[start : start + BAND].astype(np.float64) - black) * (255 / (white - black))
        levels.reshape(-1)[start : start + BAND] = np.rint(band.clip(0, 255))
    return levels


def _tag(image: Image.Image, tag: int, default: int) -> int:
    """Return the first value of a TIFF tag, which Pillow gives as a number or in a tuple."""
    return int(np.ravel(getattr(image, "tag_v2", {}).get(tag, default))[0])


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
    dark, bright = [one.peak for one in values if one.peak < limit], [one.peak for one in values if one.peak > high]
    of = f"of {len(values):,} images of more than 8 bits per channel"
    if SHARE * len(dark) > len(values):
        return (
            f"{len(dark):,} {of} become nearly black: 99 % of their values are at most {max(dark):,}, black is {low:,}"
            f" and white {high:,}. {advice}"
        )
    if SHARE * len(bright) > len(values):
        return (
            f"{len(bright):,} {of} lose their bright parts: they have values up to {max(bright):,}, and white is"
            f" {high:,}. {advice}"
        )
    return ""


def value_notes(values: Sequence[Values], value_range: ValueRange | None) -> list[str]:
    """Return notes on images of more than 8 bits per channel, and on black and white of them; none without images."""
    if not values or value_range is None:
        return []
    setting = "--set data.value_range=[BLACK,WHITE]"
    note = (
        f"Images of more than 8 bits per channel: {len(values):,}, with values from {min(one.low for one in values):,}"
        f" to {max(one.high for one in values):,}. Black is {value_range[0]:,} and white is {value_range[1]:,}, also in"
        f" inference; another range: {setting}."
    )
    return [note, *filter(None, [range_note(values, value_range, f"Check them, or choose another range: {setting}.")])]
