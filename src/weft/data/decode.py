"""Decode an untrusted image file to upright 8-bit RGB, or raise `BadImage` with the reason.

Training, evaluation, prediction, serving and `weft data check` all use this code path: they get the same pixels and
agree on which images are usable. Only the decoders of eight formats are enabled (`FORMATS`). Size and aspect ratio are
checked before any pixel is decoded. A changed byte inside compressed data cannot always be detected: such an image
decodes to wrong pixels.

Importing this module turns off the warnings of Pillow, and sets its limit on compressed metadata of a PNG. Decoding
raises Pillow's limit on pixels to that of weft, and turns off `LOAD_TRUNCATED_IMAGES`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import importlib.metadata
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError, _imaging

from weft.data import bit_depth
from weft.data.bit_depth import ValueRange, Values
from weft.data.colour import (
    MAX_PROFILE,
    MODE_NOTES,
    UPRIGHT,
    VIEWS,
    Picture,
    conversion_of,
    frames_note,
    orientation,
    to_rgb,
)
from weft.data.formats import (
    FORMATS,
    HEAD_BYTES,
    MAX_PIXELS,
    archive_kind_of,
    is_cut,
    is_ended,
    sniff,
    with_end_marker,
)
from weft.errors import DataError
from weft.lazy import LazyModule
from weft.text import one_line, printable

with contextlib.suppress(OSError, AttributeError):  # else libtiff prints every damaged strip on stderr
    ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)  # a library that Pillow's own module links
PngImagePlugin.MAX_TEXT_CHUNK = MAX_PROFILE  # also limits colour profiles; Pillow's 1 MiB refuses large ones
warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged metadata, for example: the image is usable or it is not

simplejpeg: Any = LazyModule("simplejpeg")

COMPRESSIONS = {  # format -> supported compressions, as Pillow names them
    "TIFF": ("raw", "tiff_lzw", "jpeg", "tiff_adobe_deflate", "tiff_deflate", "packbits"),
    "BMP": (0, 3),  # none, bit fields
}
UNSUPPORTED_MODES = {"F": "float-pixels", "LAB": "lab-pixels"}
MAX_BYTES = 1 << 30
MAX_ASPECT = 100  # ratio of longer to shorter side; resizing the shorter side to the model's size scales the longer
WHITE = (255, 255, 255)

REASONS = {
    "missing": "the file does not exist",
    "not-utf-8": "its name must be UTF-8; rename it",
    "not-a-file": "it must be a regular file, not a folder, pipe, socket or device",
    "unreadable": "the operating system refused to read it",
    "zero-byte": "it is empty (0 bytes)",
    "too-many-bytes": f"it is larger than {MAX_BYTES >> 20} MiB",
    "not-an-image": f"its content is none of {', '.join(FORMATS)}",
    "no-decoder": "HEIC and HEIF images need the package pillow-heif: pip install pillow-heif",
    "truncated": "the file is truncated",
    "damaged": "its content cannot be decoded",
    "too-many-pixels": "it has too many pixels",
    "too-thin": f"its longer side is more than {MAX_ASPECT} times its shorter side",
    "compression": "its compression is not supported",
    "metadata-bomb": "its text metadata or its colour profile expands beyond the limit",
    "float-pixels": "its pixels are floating point; save them as integers of 8 or 16 bits",
    "lab-pixels": "its colours are Lab; save them as RGB",
    "integer-pixels": "its pixels are wide or signed integers, and the model stores no value range to scale them by",
    "no-class": "it has no label",
    "out-of-memory": "there is not enough memory to decode it",
    "too-slow": "it takes too long to decode",
    "crashed": "its decoder process crashed",
}


class BadImage(DataError):
    """An image that cannot be used.

    Attributes:
        name: the file, as shown in the message.
        reason: a key of `REASONS`.
        detail: more about the reason; may be empty.
    """

    def __init__(self, name: str, reason: str, detail: str = ""):
        super().__init__(name, reason, detail)  # all three, so that it can be pickled
        self.name, self.reason, self.detail = name, reason, detail

    def __str__(self) -> str:
        return one_line(
            f"{self.name} cannot be used: {REASONS[self.reason]}{f' ({self.detail})' if self.detail else ''}."
        )


def as_bad(err: BadImage | OSError) -> BadImage:
    """Return the error of an image without a name, and without what its traceback holds: the bytes of the file."""
    if isinstance(err, BadImage):
        return BadImage("", err.reason, err.detail)
    return BadImage("", "unreadable", err.strerror or "")  # of the disk


class ImageInfo(NamedTuple):
    """Properties of a usable image.

    Attributes:
        size: (height, width) in pixels, after EXIF orientation.
        format: one of `FORMATS`.
        notes: conversions that decoding it applies, such as `cmyk` or `exif-rotated`: keys of
            `weft.data.colour.NOTES`.
        values: of an image of more than 8 bits per channel, and of one that `weft data prepare` made of such an image;
            None of others.
    """

    size: tuple[int, int]
    format: str
    notes: tuple[str, ...]
    values: Values | None = None


def open_image(
    source: str | Path | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = WHITE,
    at_least: int | None = None,
    value_range: ValueRange | None = None,
) -> Image.Image:
    """Decode an image to RGB as a viewer shows it.

    EXIF orientation is applied, transparency is composited on `background`, more than 8 bits per channel are scaled by
    `value_range`, and embedded ICC profiles are converted to sRGB. Of an animation the first frame is decoded.

    Args:
        source: a path, or the bytes of a file.
        max_pixels: limit on height x width, checked against the header before decoding.
        background: RGB colour behind transparent pixels, 0 to 255 each.
        at_least: decode a JPEG at 1/2, 1/4 or 1/8 of its size where both sides keep at least this many pixels, which
            is several times as fast; None decodes at full size.
        value_range: values of black and white of images of more than 8 bits per channel, those of the dataset that a
            model was trained on; None: 0 and the largest value of the bit depth of the file.

    Raises:
        BadImage: the image cannot be used; its `reason` is a key of `REASONS`.
    """
    with _opened(source, max_pixels) as (image, data, _):
        if at_least is not None:
            _draft(image, at_least)
        return _rgb(image, data, background, value_range)


def open_picture(
    source: str | Path | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    at_least: int | None = None,
    value_range: ValueRange | None = None,
) -> Picture:
    """Decode an image for training: `open_image`, but a JPEG takes less time, above all if only a part of it is used.

    Arguments and errors are those of `open_image`.
    """
    with _opened(source, max_pixels) as (image, data, notes):
        if at_least is not None:
            _draft(image, at_least)
        is_common = image.format in ("JPEG", "MPO") and image.mode == "RGB" and not notes
        pixels = _jpeg_pixels(data, image.height, image.width) if is_common else None
        if pixels is None:
            return Picture(np.array(_rgb(image, data, WHITE, value_range)))
        view = VIEWS.get(orientation(image))
        return Picture(pixels if view is None else view(pixels), conversion_of(image))


def _jpeg_pixels(data: bytes, height: int, width: int) -> np.ndarray | None:
    """Return the pixels (h w 3) of a JPEG by libjpeg, as Pillow has it, at the scale that gives these sides; None of a
    file with any irregularity, of which Pillow decides whether it can be used."""
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, 3) else None


def _rgb(
    image: Image.Image, data: bytes, background: tuple[int, int, int], value_range: ValueRange | None
) -> Image.Image:
    """Load an image, and return its upright sRGB."""
    values = bit_depth.load(image, data if value_range is not None else None)
    if image.mode == "I" and value_range is None:
        raise BadImage("", "integer-pixels")
    return to_rgb(bit_depth.scaled(image, values, value_range), background)[0]


def image_info(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Check that `open_image` accepts an image, and return its properties.

    Takes about half the time of `open_image`: JPEGs are decoded at an eighth of their size.

    Raises:
        BadImage: as `open_image`, for the same reasons.
    """
    with _opened(source, max_pixels) as (image, data, file_notes):
        deep, stored = bit_depth.is_deep(image), image.size
        _draft(image, max(min(image.size) // 8, 1))
        values = bit_depth.load(image, data)
        shown = bit_depth.scaled(image, values, None)
        notes = [MODE_NOTES[shown.mode]] if shown.mode in MODE_NOTES else []
        notes += ["16-bit"] * deep + to_rgb(shown, WHITE)[1] + file_notes + frames_note(image)
        size, format = _upright_size(image, stored), str(sniff(data))
        return ImageInfo(size, format, tuple(notes), bit_depth.values_of(image, values))


def image_header(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Check the header of an image, and return its properties without the conversions. Damage of its pixels is not
    found; an image of more than 8 bits per channel is decoded, since its values are needed.

    Raises:
        BadImage: as `open_image`.
    """
    if not isinstance(source, bytes):  # reads the first blocks of the file alone
        with contextlib.suppress(Exception), open_regular(source) as file:  # the reason of an error is found below
            format = str(sniff(file.read(HEAD_BYTES)))
            with Image.open(file, formats=(format,)) as image:
                _check(image, max_pixels)
                if not bit_depth.is_deep(image):
                    return _header_of(image, format)
    with _opened(source, max_pixels, only_header=True) as (image, data, _):
        if not bit_depth.is_deep(image):
            return _header_of(image, str(sniff(data[:HEAD_BYTES])))
    return image_info(source, max_pixels=max_pixels)


def _header_of(image: Image.Image, format: str) -> ImageInfo:
    return ImageInfo(_upright_size(image, image.size), format, (), bit_depth.values_of(image, None))


def image_values(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> Values | None:
    """Return the values of an image of more than 8 bits per channel; None of others, of which the header is read.

    Raises:
        BadImage: as `open_image`.
    """
    with _opened(source, max_pixels, only_header=True) as (image, *_):
        deep = bit_depth.is_deep(image)
    return image_info(source, max_pixels=max_pixels).values if deep else None


def image_to_show(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image for a person; more than 8 bits per channel are scaled by the values of the image.

    Raises:
        BadImage: as `open_image`.
    """
    values = image_values(path, max_pixels=max_pixels)
    return open_image(path, max_pixels=max_pixels, value_range=values and bit_depth.common_range([values]))


def image_size(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation, read from the header.

    Raises:
        BadImage: the header cannot be read, or a limit is exceeded.
    """
    with _opened(source, max_pixels, only_header=True) as (image, *_):
        return _upright_size(image, image.size)


def _draft(image: Image.Image, at_least: int) -> None:
    """Let a JPEG be decoded at the smallest scale whose sides are at least so long; HEIF would show its thumbnail."""
    if image.format in ("JPEG", "MPO"):  # MPO: a phone's JPEG with a second image
        image.draft(None, (at_least, at_least))


@functools.cache
def _has_heif() -> bool:
    """Register the decoder of HEIF images; return whether it is installed."""
    try:
        pillow_heif = importlib.import_module("pillow_heif")
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def heif_version() -> str:
    """Return the version of the decoder of HEIF images; empty if it is not installed."""
    try:
        return importlib.metadata.version("pillow-heif")
    except importlib.metadata.PackageNotFoundError:
        return ""


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading; never block on a pipe, never open a device.

    Raises:
        BadImage: missing, not a regular file, empty, too large, or not readable.
    """
    name = printable(os.fspath(path))
    # O_NONBLOCK: a pipe that replaces the file after its mode was read must not block
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        status = os.stat(path)
        file = os.fdopen(os.open(path, flags), "rb") if stat.S_ISREG(status.st_mode) and status.st_size else None
    except (FileNotFoundError, NotADirectoryError) as err:
        raise BadImage(name, "missing") from err
    except (OSError, ValueError) as err:  # ValueError: NUL byte in the name
        is_loop = getattr(err, "errno", None) == errno.ELOOP
        detail = getattr(err, "strerror", None) or str(err)
        raise BadImage(name, "missing" if is_loop else "unreadable", detail) from err
    if file is None:
        raise BadImage(name, "zero-byte" if stat.S_ISREG(status.st_mode) else "not-a-file")
    if status.st_size > MAX_BYTES:
        file.close()
        raise BadImage(name, "too-many-bytes")
    return file


def read_regular(path: str | Path) -> bytes:
    """Return the bytes of a regular file: a decoder may treat a file on disk differently.

    Raises:
        BadImage: as `open_regular`, or the disk or the memory fails.
    """
    name = printable(os.fspath(path))
    try:
        with open_regular(path) as file:
            return file.read()
    except MemoryError as err:
        raise BadImage(name, "out-of-memory") from err
    except OSError as err:  # of the disk or the network
        raise BadImage(name, "unreadable", err.strerror or str(err)) from err


@contextlib.contextmanager
def _opened(
    source: str | Path | bytes, max_pixels: int, *, only_header: bool = False
) -> Iterator[tuple[Image.Image, bytes, list[str]]]:
    """Open an image with its header read and checked; convert every exception raised inside to `BadImage`.

    Yields:
        The image, the bytes of the file, and the notes that only a file that is not loaded yet shows.
    """
    is_path = not isinstance(source, bytes)
    name, data = (printable(os.fspath(source)), read_regular(source)) if is_path else ("The image", source)
    if not data:
        raise BadImage(name, "zero-byte")
    format = sniff(data[:HEAD_BYTES])
    if format is None:
        kind = archive_kind_of(data)
        raise BadImage(name, "not-an-image", f"it is {kind}; unpack it" if kind else "")
    if format == "HEIF" and not _has_heif():
        raise BadImage(name, "no-decoder")
    is_whole = only_header or format != "JPEG" or is_ended(data)
    whole = data if is_whole else with_end_marker(data, functools.partial(_pixels, max_pixels=max_pixels))
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # True: missing pixels are gray
    # Pillow raises above twice its limit, and also limits its own allocations by it; `_check` has the exact limit
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    try:
        with Image.open(io.BytesIO(whole or data), formats=(format,)) as image:
            _check(image, max_pixels)
            is_turned = format == "TIFF" and orientation(image) in UPRIGHT  # by Pillow, while it loads
            yield image, data, ["exif-rotated"] * is_turned + ["no-end-marker"] * (not is_whole)
            _check(image, max_pixels)  # HEIF: the size that was decoded
            if whole is None:  # Pillow accepts some, such as those that are filled up with zeros
                raise BadImage("", "truncated")
    except Exception as err:  # Pillow raises many types for malformed bytes: SyntaxError, KeyError, struct.error, ...
        raise BadImage(name, *_reason(err, whole or data, format, max_pixels)) from err


def _pixels(data: bytes, max_pixels: int) -> bytes | None:
    """Return the pixels of a file; None if it cannot be decoded."""
    try:
        with _opened(data, max_pixels, only_header=True) as (image, *_):
            return image.tobytes()
    except BadImage:
        return None


def _check(image: Image.Image, max_pixels: int) -> None:
    """Raise a `BadImage` without a name if the header exceeds a limit or states what is not supported."""
    (width, height), compression = image.size, image.info.get("compression")
    if width * height > max_pixels:
        raise BadImage("", "too-many-pixels", f"{width * height}, the limit is {max_pixels}")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise BadImage("", "too-thin", f"it is {width} x {height}")
    if image.format in COMPRESSIONS and compression not in (None, *COMPRESSIONS[image.format]):
        known = ", ".join(map(str, COMPRESSIONS[image.format]))
        raise BadImage("", "compression", f"{image.format} compression {compression}; supported are {known}")
    if image.mode in UNSUPPORTED_MODES:
        raise BadImage("", UNSUPPORTED_MODES[image.mode])


def _reason(err: Exception, data: bytes, format: str, max_pixels: int) -> tuple[str, str]:
    """Return the reason and the detail of an image that cannot be used."""
    text = str(err).lower()
    if isinstance(err, BadImage):
        return err.reason, err.detail
    if isinstance(err, Image.DecompressionBombError):
        claimed = re.search(r"\d+", text)
        return "too-many-pixels", f"{claimed[0] if claimed else 'more'}, the limit is {max_pixels}"
    if isinstance(err, MemoryError):
        return "out-of-memory", ""
    if "max_text" in text or "text chunks" in text:
        return "metadata-bomb", f"{MAX_PROFILE >> 20} MiB each, {PngImagePlugin.MAX_TEXT_MEMORY >> 20} MiB together"
    is_truncated = is_cut(data, format) or isinstance(err, EOFError) or "truncated" in text
    if not isinstance(err, UnidentifiedImageError):
        return "truncated" if is_truncated else "damaged", printable(str(err))
    article = "an" if format == "AVIF" else "a"
    detail = f"it begins like {article} {format} file, but its header cannot be read"
    return ("truncated", "") if is_truncated else ("damaged", detail)


def _upright_size(image: Image.Image, stored: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation; `stored` is the size before decoding."""
    is_sideways = orientation(image) >= 5 and image.format != "TIFF"  # Pillow rotates TIFFs, and their sizes
    return stored if is_sideways else (stored[1], stored[0])
