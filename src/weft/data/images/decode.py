"""Decode an untrusted image file to upright 8-bit RGB, or raise `BadImage` with the reason.

Training, evaluation, prediction, serving and `weft data check` all use this code path: they get the same pixels and
agree on which images are usable. Only the decoders of eight formats are enabled (`FORMATS`). Size, aspect ratio and
structure are checked before any pixel is decoded. A changed byte inside compressed data cannot always be detected: such
an image decodes to wrong pixels.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import io
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from PIL import Image, ImageFile, UnidentifiedImageError, _imaging

from weft.data.images.colour import (
    Header,
    NoValueRange,
    ValueRange,
    Values,
    commented_values,
    describe,
    lower_bytes,
    read_header,
    to_rgb,
    upright_size,
    values_of,
)
from weft.data.images.limits import MAX_PIXELS
from weft.data.images.structure import StructureError, check_structure, scans_of
from weft.errors import DataError
from weft.text import one_line, printable

with contextlib.suppress(OSError, AttributeError):  # else libtiff prints every damaged strip on stderr
    ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)  # a library that Pillow's own module links

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF")
HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"}
ARCHIVES = {
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"Rar!": "a RAR archive",
    b"7z\xbc\xaf": "a 7z archive",
}  # first bytes of files that are not read, and often mistaken for data
TAR_MAGIC = slice(257, 262)
MAX_BYTES = 1 << 30
MAX_BOXES = 1_000  # of an AVIF or HEIF file; encoders write 3 or 4
MAX_ASPECT = 100  # ratio of longer to shorter side; resizing the shorter side to the model's size scales the longer
HEAD_BYTES = 32  # enough for `sniff`
WHITE = (255, 255, 255)
END_MARKER = b"\xff\xd9"  # of a JPEG
RESTART = re.compile(rb"\xff[\xd0-\xd7]")
MIN_PADDING = 4  # zero bytes at the end of a JPEG that are no pixels

Result = TypeVar("Result")
REASONS = {
    "missing": "the file does not exist",
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
    "too-complex": "it has far more parts than its format needs, and would be slow to decode",
    "compression": "its compression is not supported",
    "metadata-bomb": "its text metadata expands beyond the limit",
    "float-pixels": "its pixels are floating point; save them as integers of 8 or 16 bits",
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


class ImageInfo(NamedTuple):
    """Properties of a usable image.

    Attributes:
        size: (height, width) in pixels, after EXIF orientation.
        format: one of `FORMATS`.
        notes: conversions that decoding it applies, such as `cmyk` or `exif-rotated`: keys of
            `weft.data.images.colour.NOTES`.
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
    return _with_image(source, max_pixels, lambda image: _decoded(image, at_least, background, value_range)[0])[0]


def _with_image(
    source: str | Path | bytes, max_pixels: int, use: Callable[[Image.Image], Result]
) -> tuple[Result, bool]:
    """Return the result of a function of the opened image, and whether the file has its end marker."""
    name, data = _content(source)
    if sniff(data) != "JPEG" or data.endswith(END_MARKER) or scans_of(data)[1]:
        with _opened(name, data, max_pixels) as image:
            return use(image), True
    whole = _with_end_marker(data, max_pixels)
    with _opened(name, whole or data, max_pixels) as image:
        result = use(image)
        if whole is None:  # Pillow accepts some, such as those that are filled up with zeros
            raise BadImage(name, "truncated")
    return result, False


def _decoded(
    image: Image.Image,
    at_least: int | None,
    background: tuple[int, int, int],
    value_range: ValueRange | None,
    *,
    is_measured: bool = False,
) -> tuple[Image.Image, Header, Values | None]:
    """Decode to RGB and also return the header; shared by `open_image` and `image_info`, so that they agree.

    With `is_measured`, also return the values of an image of more than 8 bits, which is scaled by its own range.
    """
    header = read_header(image)  # before decoding: a TIFF's metadata is read once, and may raise
    if at_least is not None and image.format in ("JPEG", "MPO"):  # of HEIF it would take an embedded thumbnail
        image.draft(None, (at_least, at_least))
    low_bytes = None
    if header.is_deep and (is_measured or value_range is not None):
        file: Any = image  # `fp` is that of `_opened`
        low_bytes = lower_bytes(image, file.fp.getvalue())
    image.load()
    values = commented_values(image) if is_measured else None
    if is_measured and header.is_deep and (low_bytes is not None or image.mode[0] in "IF"):
        values = values_of(image, low_bytes)
        value_range = values.low, max(values.high, values.low + 1)
    return to_rgb(image, background, value_range, low_bytes), header, values


def _with_end_marker(data: bytes, max_pixels: int) -> bytes | None:
    """Return a JPEG that lacks its end marker with one; None if pixels are also missing.

    A decoder reads no further than the last block. If no block is missing, the pixels do not depend on what follows;
    else the bits that follow become pixels.
    """
    cut = data.rstrip(b"\0")
    data = (cut if len(data) - len(cut) >= MIN_PADDING else data).rstrip(b"\xff")
    if not scans_of(data)[0]:
        return None
    restarts = RESTART.findall(data, data.rfind(b"\xff\xda"))  # the decoder looks for the next one, and skips the rest
    restart = bytes((0xFF, 0xD0 + (restarts[-1][1] + 1) % 8 if restarts else 0xD0))
    contents = set()
    try:
        for bits in (b"", b"\x00", b"\x55", b"\xfe"):
            following = 64 * bits + restart + 64 * bits if bits else b""
            with _opened("", data + following + END_MARKER, max_pixels) as image:
                image.load()
                contents.add(hashlib.sha256(image.tobytes()).digest())
    except BadImage:
        return None
    return data + END_MARKER if len(contents) == 1 else None


def image_info(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Check that `open_image` accepts an image, and return its properties.

    Takes about half the time of `open_image`: JPEGs are decoded at an eighth of their size.

    Raises:
        BadImage: as `open_image`, for the same reasons.
    """

    def info(image: Image.Image) -> ImageInfo:
        _, header, values = _decoded(image, max(min(image.size) // 8, 1), WHITE, None, is_measured=True)
        format = "JPEG" if image.format == "MPO" else str(image.format)  # MPO: a phone's JPEG with a second image
        return ImageInfo(upright_size(image, header), format, describe(image, header), values)

    result, is_ended = _with_image(source, max_pixels, info)
    return result if is_ended else result._replace(notes=(*result.notes, "no-end-marker"))


def image_values(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> Values | None:
    """Return the values of an image of more than 8 bits per channel; None of others, of which the header is read.

    Raises:
        BadImage: as `open_image`.
    """
    with _opened(*_content(source), max_pixels) as image:
        is_deep = read_header(image).is_deep
    return image_info(source, max_pixels=max_pixels).values if is_deep else None


def image_size(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation, read from the header.

    Raises:
        BadImage: the header cannot be read, or a limit is exceeded.
    """
    with _opened(*_content(source), max_pixels) as image:
        return upright_size(image, read_header(image))


def sniff(head: bytes) -> str | None:
    """Return the format (one of `FORMATS`) by the first `HEAD_BYTES` bytes of a file; None for any other."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if head[4:8] == b"ftyp":  # the major brand, the version, and compatible brands
        brands = {head[8:12], *(head[place : place + 4] for place in range(16, min(len(head), _box_size(head)), 4))}
        if brands & {b"avif", b"avis"}:
            return "AVIF"
        return "HEIF" if brands & HEIF_BRANDS else None
    # text may also begin with "BM"; the length of the second header identifies a bitmap
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in (12, 40, 52, 56, 64, 108, 124):
        return "BMP"
    return None


def archive_kind(path: str | Path) -> str:
    """Return `a ZIP archive` or the like by the first bytes of a file; empty for any other file."""
    try:
        with open(path, "rb") as file:
            return _archive_kind(file.read(TAR_MAGIC.stop))
    except OSError:
        return ""


def _archive_kind(data: bytes) -> str:
    if data[TAR_MAGIC] == b"ustar":
        return "a tar archive"
    return next((kind for start, kind in ARCHIVES.items() if data.startswith(start)), "")


def _box_size(head: bytes) -> int:
    return int.from_bytes(head[:4], "big")


@functools.cache
def _has_heif() -> bool:
    """Register the decoder of HEIF images; return whether it is installed."""
    try:
        pillow_heif = importlib.import_module("pillow_heif")
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


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


@contextlib.contextmanager
def _opened(name: str, data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image with its header read and its size checked; convert every exception raised inside to `BadImage`."""
    with io.BytesIO(data) as file, _pillow_limits(max_pixels):
        head = data[:HEAD_BYTES]
        format = sniff(head)
        if format is None:
            kind = _archive_kind(data)
            raise BadImage(name, "not-an-image", f"it is {kind}; unpack it" if kind else "")
        if format == "HEIF" and not _has_heif():
            raise BadImage(name, "no-decoder")
        try:
            check_structure(data, format)
            with Image.open(file, formats=(format,)) as image:
                _check_size(name, image.size, max_pixels)
                yield image
                _check_size(name, image.size, max_pixels)  # HEIF: the size that was decoded
        except BadImage:
            raise
        except StructureError as err:
            raise BadImage(name, err.reason, str(err)) from err
        except NoValueRange as err:
            raise BadImage(name, err.reason) from err
        except Image.DecompressionBombError as err:  # Pillow's own check comes first; its message has the number
            claimed = re.search(r"\d+", str(err))
            detail = f"{claimed[0] if claimed else 'more'}, the limit is {max_pixels}"
            raise BadImage(name, "too-many-pixels", detail) from err
        except MemoryError as err:
            raise BadImage(name, "out-of-memory") from err
        except UnidentifiedImageError as err:
            reason = _reason(err, head, file)
            article = "an" if format == "AVIF" else "a"
            detail = f"it begins like {article} {format} file, but its header cannot be read"
            raise BadImage(name, reason, detail if reason == "damaged" else "") from err
        except (
            Exception
        ) as err:  # Pillow raises many types for malformed bytes: SyntaxError, KeyError, struct.error, ...
            raise BadImage(name, _reason(err, head, file), printable(str(err))) from err


def _content(source: str | Path | bytes) -> tuple[str, bytes]:
    """Return the name of an image in messages, and its bytes: a decoder may treat a file on disk differently."""
    if isinstance(source, bytes):
        if not source:
            raise BadImage("The image", "zero-byte")
        return "The image", source
    name = printable(os.fspath(source))
    try:
        return name, read_regular(source)
    except MemoryError as err:
        raise BadImage(name, "out-of-memory") from err
    except OSError as err:  # of the disk or the network
        raise BadImage(name, "unreadable", err.strerror or str(err)) from err


def read_regular(path: str | Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        BadImage: as `open_regular`.
        OSError: a disk error.
    """
    with open_regular(path) as file:
        return file.read()


def _is_cut(file: BinaryIO) -> bool:
    """Return whether the last box of an AVIF or HEIF file is longer than the file."""
    end, place = file.seek(0, os.SEEK_END), 0
    for _ in range(MAX_BOXES):
        if place + 8 > end:
            break
        file.seek(place)
        head = file.read(16)
        size = _box_size(head)
        if size == 1:  # the size follows in 64 bits
            size = int.from_bytes(head[8:], "big")
        elif size == 0:  # to the end of the file
            return False
        place += max(size, 8)
    return place > end


def _check_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise BadImage(name, "too-many-pixels", f"{width * height}, the limit is {max_pixels}")
    if max(size) > MAX_ASPECT * min(size):
        raise BadImage(name, "too-thin", f"it is {width} x {height}")


def _reason(err: Exception, head: bytes, file: BinaryIO) -> str:
    text = str(err).lower()
    if "max_text" in text or "text chunks" in text:
        return "metadata-bomb"
    if sniff(head) == "WEBP":
        # libwebp gives no reason; the container states its length
        return "truncated" if file.seek(0, os.SEEK_END) < int.from_bytes(head[4:8], "little") + 8 else "damaged"
    if sniff(head) in ("AVIF", "HEIF") and _is_cut(file):
        return "truncated"
    return "truncated" if isinstance(err, EOFError) or "truncated" in text else "damaged"


_limits_lock = threading.Lock()
_limits_active: list[int] = []
_limits_saved = contextlib.ExitStack()


@contextlib.contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Set Pillow's process-wide limits while any thread decodes, and restore them after the last one.

    Pillow raises above twice `MAX_IMAGE_PIXELS` and warns below; it also limits its own allocations by this number, so
    it follows `max_pixels`. With several limits in several threads the largest applies here; `_check_size` checks the
    exact one.
    """
    with _limits_lock:
        if not _limits_active:
            _limits_saved.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _limits_saved.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            _limits_saved.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        _limits_active.append(max_pixels)
        Image.MAX_IMAGE_PIXELS = (max(_limits_active) + 1) // 2
    try:
        yield
    finally:
        with _limits_lock:
            _limits_active.remove(max_pixels)
            if _limits_active:
                Image.MAX_IMAGE_PIXELS = (max(_limits_active) + 1) // 2
            else:
                _limits_saved.close()
