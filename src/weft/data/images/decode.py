"""From a file or bytes to the RGB picture a person sees, or to one exception that says why not.

Training, evaluation, prediction, serving and the checks of data all read images here, by one code path, so that they
see the same pixels and agree on which images can be used. Six formats pass the gate (`FORMATS`): every other decoder of
Pillow, and its security record, stays out of reach. Size, shape and structure are judged before any pixel is decoded.
What no decoder can see is a changed byte inside compressed data: such an image opens, with wrong pixels.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image, ImageFile, UnidentifiedImageError, _imaging

from weft.data.images.colour import Header, NoRange, describe, read_header, to_rgb, upright_size
from weft.data.images.structure import Excess, check_structure
from weft.errors import DataError
from weft.text import one_line, printable

with contextlib.suppress(OSError, AttributeError):  # libtiff would report every damaged strip on standard error
    ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)  # it's among the libraries that Pillow's own one needs

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
MAX_PIXELS = 100_000_000
MAX_BYTES = 1 << 30
MAX_ASPECT = 100  # longer side over the shorter; resizing the shorter side to the model's size multiplies the longer
HEAD_BYTES = 32  # enough for `sniff`
WHITE = (255, 255, 255)

NO_RANGE = "it declares no range (TIFF tags SMinSampleValue, SMaxSampleValue)"
REASONS = {
    "missing": "there is no such file",
    "not-a-file": "a regular file is needed, not a folder, pipe, socket or device",
    "unreadable": "the system does not let it be read",
    "zero-byte": "it is empty (0 bytes)",
    "too-many-bytes": f"it is larger than {MAX_BYTES >> 20} MiB",
    "not-an-image": f"its content is none of {', '.join(FORMATS)}, whatever its name says",
    "truncated": "it ends too early",
    "damaged": "its content does not decode",
    "too-many-pixels": "it claims too many pixels",
    "too-thin": f"its longer side is more than {MAX_ASPECT} times its shorter side",
    "too-complex": "it has far more parts than an image of its kind needs, and would take long to read",
    "compression": "its compression is not one that weft opens",
    "metadata-bomb": "its text unpacks to far more than it should",
    "float-pixels": f"its pixels are floating point and {NO_RANGE}",
    "integer-pixels": f"its pixels are wide or signed integers and {NO_RANGE}",
    "no-class": "nothing says what it shows",
    "out-of-memory": "there is not enough memory to decode it",
    "too-slow": "it takes too long to decode",
    "crashed": "its decoder ended without an answer",
}


class BadImage(DataError):
    """A picture that cannot be used. `reason` is a key of `REASONS`, `detail` says more; the text names the file."""

    def __init__(self, name: str, reason: str, detail: str = ""):
        super().__init__(name, reason, detail)  # all three, so that it travels between processes
        self.name, self.reason, self.detail = name, reason, detail

    def __str__(self) -> str:
        return one_line(
            f"{self.name} cannot be used: {REASONS[self.reason]}{f' ({self.detail})' if self.detail else ''}."
        )


class Look(NamedTuple):
    """What `look` found in a good picture.

    Attributes:
        size: (height, width) in pixels, after EXIF orientation.
        format: one of `FORMATS`.
        notes: kinds of conversion that opening it takes, such as `cmyk` or `exif-rotated`; see
            `weft.data.images.colour`.
    """

    size: tuple[int, int]
    format: str
    notes: tuple[str, ...]


def open_image(
    source: str | Path | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = WHITE,
    at_least: int | None = None,
) -> Image.Image:
    """The picture as a person sees it, in mode RGB.

    EXIF orientation is applied, transparency composited on `background`, 16-bit grey scaled by its bit depth,
    embedded ICC profiles converted to sRGB; of an animation the first frame is taken.

    Args:
        source: a path, or the bytes of a file.
        max_pixels: a picture that claims more (height x width) is refused from its header.
        background: what shows through transparent pixels, 0 to 255 each.
        at_least: a JPEG is decoded at a half, a quarter or an eighth of its size as long as both sides keep this many
            pixels, which is several times as fast; None for its own size.

    Raises:
        BadImage: the picture cannot be used, for one of `REASONS`.
    """
    with _opened(source, max_pixels) as image:
        return _decoded(image, at_least, background)[0]


def _decoded(image: Image.Image, at_least: int | None, background: tuple[int, int, int]) -> tuple[Image.Image, Header]:
    """The RGB image, and what its header said. The only way to pixels: what passes here once passes always."""
    header = read_header(image)  # before the pixels: a TIFF's metadata is read once, and may raise
    if at_least is not None:
        image.draft(None, (at_least, at_least))
    image.load()
    return to_rgb(image, background), header


def look(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> Look:
    """Whether `open_image` would take it, for about half the time: JPEGs are decoded at an eighth of their size.

    Raises:
        BadImage: as `open_image`, for the same reasons.
    """
    with _opened(source, max_pixels) as image:
        _, header = _decoded(image, max(min(image.size) // 8, 1), WHITE)
        format = "JPEG" if image.format == "MPO" else str(image.format)  # MPO: a phone's JPEG with a second picture
        return Look(upright_size(image, header), format, describe(image, header))


def image_size(source: str | Path | bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(height, width) in pixels as seen, from the header alone.

    Raises:
        BadImage: the header cannot be used.
    """
    with _opened(source, max_pixels) as image:
        return upright_size(image, read_header(image))


def sniff(head: bytes) -> str | None:
    """The format, one of `FORMATS`, that the first `HEAD_BYTES` of a file belong to; None for anything else."""
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
    # "BM" alone also opens plain text; the length of the second header tells them apart
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in (12, 40, 52, 56, 64, 108, 124):
        return "BMP"
    return None


def open_regular(path: str | Path) -> io.BufferedReader:
    """Opens a regular file for reading; never waits for the other end of a pipe, and never touches a device.

    Raises:
        BadImage: missing, not a regular file, empty, too large, or not readable.
    """
    name = printable(os.fspath(path))
    # O_NONBLOCK: a pipe that takes the file's place after its mode was read must not hang the run
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        status = os.stat(path)
        file = os.fdopen(os.open(path, flags), "rb") if stat.S_ISREG(status.st_mode) and status.st_size else None
    except (FileNotFoundError, NotADirectoryError) as err:
        raise BadImage(name, "missing") from err
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
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
def _opened(source: str | Path | bytes, max_pixels: int) -> Iterator[Image.Image]:
    """The picture, its header read and within `max_pixels`; whatever is raised inside comes out as `BadImage`."""
    name = "The image" if isinstance(source, bytes) else printable(os.fspath(source))
    if source == b"":
        raise BadImage(name, "zero-byte")
    # always from bytes: a decoder may do otherwise with a file of its own
    data = source if isinstance(source, bytes) else _bytes_of(source)
    with io.BytesIO(data) as file, _pillow_limits(max_pixels):
        head = data[:HEAD_BYTES]
        format = sniff(head)
        if format is None:
            raise BadImage(name, "not-an-image")
        try:
            check_structure(data, format)
            with Image.open(file, formats=FORMATS) as image:
                _check_size(name, image.size, max_pixels)
                yield image
        except BadImage:
            raise
        except Excess as err:
            raise BadImage(name, err.reason, str(err)) from err
        except NoRange as err:
            raise BadImage(name, err.reason) from err
        except Image.DecompressionBombError as err:  # Pillow's own test comes first; its text has the number
            claimed = re.search(r"\d+", str(err))
            detail = f"{claimed[0] if claimed else 'more'} claimed, the limit is {max_pixels}"
            raise BadImage(name, "too-many-pixels", detail) from err
        except MemoryError as err:
            raise BadImage(name, "out-of-memory") from err
        except UnidentifiedImageError as err:
            raise BadImage(name, "damaged", f"it begins like a {sniff(head)}, but its header cannot be read") from err
        except Exception as err:  # hostile bytes leave Pillow in a dozen ways: SyntaxError, KeyError, struct.error, ...
            raise BadImage(name, _reason(err, head, file), printable(str(err))) from err


def _bytes_of(source: str | Path) -> bytes:
    with open_regular(source) as file:
        return file.read()


def _check_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise BadImage(name, "too-many-pixels", f"{width * height} claimed, the limit is {max_pixels}")
    if max(size) > MAX_ASPECT * min(size):
        raise BadImage(name, "too-thin", f"it is {width} x {height}")


def _reason(err: Exception, head: bytes, file: BinaryIO) -> str:
    text = str(err).lower()
    if "max_text" in text or "text chunks" in text:
        return "metadata-bomb"
    if sniff(head) == "WEBP":
        # libwebp only says that it failed; the container's own length tells
        return "truncated" if file.seek(0, os.SEEK_END) < int.from_bytes(head[4:8], "little") + 8 else "damaged"
    return "truncated" if isinstance(err, EOFError) or "truncated" in text else "damaged"


_limits_lock = threading.Lock()
_limits_held: list[int] = []
_limits_saved = contextlib.ExitStack()


@contextlib.contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Holds Pillow's process-wide switches while any thread decodes, and gives them back after the last one.

    Pillow raises above twice `MAX_IMAGE_PIXELS`, and warns below; it guards allocations of its own with the same
    number, so the switch follows `max_pixels`. Under threads with several limits the largest holds here; the exact
    test is in `_opened`.
    """
    with _limits_lock:
        if not _limits_held:
            _limits_saved.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\.")
            _limits_saved.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            _limits_saved.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        _limits_held.append(max_pixels)
        Image.MAX_IMAGE_PIXELS = (max(_limits_held) + 1) // 2
    try:
        yield
    finally:
        with _limits_lock:
            _limits_held.remove(max_pixels)
            if _limits_held:
                Image.MAX_IMAGE_PIXELS = (max(_limits_held) + 1) // 2
            else:
                _limits_saved.close()
