"""Image files by their bytes: the formats that are accepted, and whether a file has its end."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

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
MAX_PIXELS = 100_000_000  # height x width, judged by the header; another value: the setting data.max_pixels
MAX_BOXES = 1_000  # of an AVIF or HEIF file; encoders write 3 or 4
HEAD_BYTES = 32  # enough for `sniff`
_END_MARKER = b"\xff\xd9"
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_MIN_PADDING = 4  # zero bytes at the end of a file that are no pixels
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # a marker that ends compressed data


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
            return archive_kind_of(file.read(TAR_MAGIC.stop))
    except OSError:
        return ""


def archive_kind_of(data: bytes) -> str:
    """Return `archive_kind` of the first bytes of a file."""
    if data[TAR_MAGIC] == b"ustar":
        return "a tar archive"
    return next((kind for start, kind in ARCHIVES.items() if data.startswith(start)), "")


def is_cut(data: bytes, format: str) -> bool:
    """Return whether a container is shorter than it states; the decoders of these formats give no reason."""
    if format == "WEBP":
        return len(data) < int.from_bytes(data[4:8], "little") + 8
    place = 0
    for _ in range(MAX_BOXES if format in ("AVIF", "HEIF") else 0):
        if place + 8 > len(data):
            break
        size = _box_size(data[place : place + 4]) or len(data) - place  # 0: to the end of the file
        place += max(int.from_bytes(data[place + 8 : place + 16], "big") if size == 1 else size, 8)
    return place > len(data)


def is_ended(data: bytes) -> bool:
    """Return whether a JPEG has its end marker; other bytes may follow it."""
    return data.endswith(_END_MARKER) or _scans_of(data)[1]


def with_end_marker(data: bytes, pixels_of: Callable[[bytes], bytes | None]) -> bytes | None:
    """Return a JPEG that lacks its end marker with one; None if pixels are also missing.

    A decoder reads no further than the last block. If no block is missing, the pixels do not depend on what follows;
    else the bits that follow become pixels.

    Args:
        data: the file.
        pixels_of: returns the pixels of a file; None if it cannot be decoded.
    """
    cut = data.rstrip(b"\0")
    data = (cut if len(data) - len(cut) >= _MIN_PADDING else data).rstrip(b"\xff")
    if not _scans_of(data)[0]:
        return None
    restarts = _RESTART.findall(data, data.rfind(b"\xff\xda"))  # the decoder looks for the next one, and skips the rest
    restart = bytes((0xFF, 0xD0 + (restarts[-1][1] + 1) % 8 if restarts else 0xD0))
    contents = set()
    for bits in (b"", b"\x00", b"\x55", b"\xfe"):
        following = 64 * bits + restart + 64 * bits if bits else b""
        pixels = pixels_of(data + following + _END_MARKER)
        if pixels is None:
            return None
        contents.add(hashlib.sha256(pixels).digest())
    return data + _END_MARKER if len(contents) == 1 else None


def _scans_of(data: bytes) -> tuple[bool, bool]:
    """Return whether the scans of a JPEG have all coefficients of all components to their last bit, and whether its end
    marker follows them."""
    place, components, missing = 2, b"", set[tuple[int, int]]()
    while match := _AFTER_SCAN.search(data, place):  # between segments, only bytes that mean nothing are skipped
        place, marker = match.start(), data[match.start() + 1]
        if marker == 0xD9:
            return bool(components) and not missing, True
        length = 0 if marker in (0x01, 0xD8) else int.from_bytes(data[place + 2 : place + 4], "big")
        content = data[place + 4 : place + 2 + length]
        place += 2 + length
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and len(content) > 5:
            components = content[6 : 6 + 3 * content[5] : 3]
            missing = {(component, number) for component in components for number in range(64)}
        if marker == 0xDA and content and len(content) >= (end := 1 + 2 * content[0]) + 3:
            first, last, bits = content[end : end + 3]
            if not bits & 15:  # the lowest bit is in this scan
                missing -= {(component, number) for component in content[1:end:2] for number in range(first, last + 1)}
    return bool(components) and not missing, False


def _box_size(head: bytes) -> int:
    return int.from_bytes(head[:4], "big")
