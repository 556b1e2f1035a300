"""Which image files are accepted: formats, recognised by the first bytes, and number of pixels."""

from __future__ import annotations

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


def _box_size(head: bytes) -> int:
    return int.from_bytes(head[:4], "big")
