"""Limit the structure of an image file before Pillow parses it.

A few bytes can cause much work: every scan of a progressive JPEG is a pass over all its coefficients, and Pillow reads
markers, chunks, blocks and tables in Python, one at a time. The functions here count them in the bytes of the file, in
time linear in its size, and refuse a file far beyond what encoders write. `TIFF_COMPRESSIONS` and `BMP_COMPRESSIONS`
list the supported compressions.
"""

from __future__ import annotations

import re
import struct

MAX_SCANS = 64  # of a JPEG; encoders write 1 to 20
MAX_MARKERS = 4096  # of a JPEG, outside its compressed data
MAX_FILL = 1 << 16  # bytes of padding between the markers of a JPEG
MAX_CHUNKS = 10_000  # of a PNG, without pixel data
MAX_DATA_CHUNKS = 200_000  # of a PNG's pixels; encoders write 8 KiB or more in each
MAX_BLOCKS = 100_000  # of a GIF, up to its second frame
MAX_STRIPS = 1 << 16  # strips or tiles of a TIFF
TIFF_COMPRESSIONS = {1: "none", 5: "LZW", 7: "JPEG", 8: "Deflate", 32773: "PackBits", 32946: "Deflate"}
BMP_COMPRESSIONS = {0: "none", 3: "bit fields", 6: "bit fields"}

_TAG_COMPRESSION, _TAGS_OFFSETS = 259, (273, 324)  # TIFF: offsets of strips, and of tiles
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # a marker that ends compressed data


class StructureError(Exception):
    """A limit that is exceeded, or an unsupported compression. `reason` is `too-complex` or `compression`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def check_structure(data: bytes, format: str) -> None:
    """Check the bytes of a file against the limits of its format.

    Args:
        data: content of the file.
        format: as `weft.data.images.decode.sniff` returns it.

    Raises:
        StructureError: a limit is exceeded, or a compression is not supported. Other damage
            passes: the decoder reports it.
    """
    check = {"JPEG": _check_jpeg, "PNG": _check_png, "GIF": _check_gif, "TIFF": _check_tiff, "BMP": _check_bmp}
    if format in check:
        check[format](data)


def scans_of(data: bytes) -> tuple[bool, bool]:
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


def _bounded(count: int, most: int, what: str) -> None:
    if count > most:
        raise StructureError("too-complex", f"more than {most:,} {what}")


def _check_jpeg(data: bytes) -> None:
    place, markers, fill, scans = 2, 0, 0, 0
    components = 0
    while place + 1 < len(data):
        if data[place] != 0xFF:  # no marker: a decoder skips to the next one
            next_marker = data.find(b"\xff", place)
            skipped = (next_marker if next_marker >= 0 else len(data)) - place
            fill, place = fill + skipped, place + skipped
        elif data[place + 1] == 0xFF:
            run = _run_of_ff(data, place)
            fill, place = fill + run - 1, place + run - 1
        else:
            marker, markers = data[place + 1], markers + 1
            _bounded(markers, MAX_MARKERS, "markers")
            if marker == 0xD9:  # end of image
                return
            if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:  # without a length
                place += 2
                continue
            length = int.from_bytes(data[place + 2 : place + 4], "big")
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                components = data[place + 9] if place + 9 < len(data) else 0
                is_progressive = marker in (0xC2, 0xC6, 0xCA, 0xCE)
                components = -1 if is_progressive else components
            if marker == 0xDA:
                scans += 1
                _bounded(scans, MAX_SCANS, "scans")
                if place + 4 < len(data) and data[place + 4] == components:
                    return  # the one scan of a sequential image holds all components: decoders stop after it
                ahead = _AFTER_SCAN.search(data, place + 2 + length)
                if ahead is None:
                    return
                place = ahead.start()
                continue
            place += 2 + max(length, 2)
        _bounded(fill, MAX_FILL, "bytes between markers")


def _run_of_ff(data: bytes, place: int) -> int:
    """Return the length of the run of 0xFF bytes at `place`, counted at most until it exceeds the limit."""
    piece = data[place : place + 2 * MAX_FILL]
    return len(piece) - len(piece.lstrip(b"\xff"))


def _check_png(data: bytes) -> None:
    place, chunks, pixels = 8, 0, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind in (b"IDAT", b"fdAT"):
            pixels += 1
        else:
            chunks += 1
        _bounded(chunks, MAX_CHUNKS, "chunks")
        _bounded(pixels, MAX_DATA_CHUNKS, "chunks of pixels")
        if kind == b"IEND":
            return
        place += 12 + length


def _check_gif(data: bytes) -> None:
    if len(data) < 13:
        return
    place, blocks, frames = 13 + _palette(data[10]), 0, 0
    while place < len(data):
        introducer, blocks = data[place], blocks + 1
        _bounded(blocks, MAX_BLOCKS, "blocks")
        if introducer == 0x3B:  # trailer
            return
        if introducer == 0x21:
            place += 2
        elif introducer == 0x2C:
            frames += 1
            if frames == 2 or place + 9 >= len(data):
                return
            place += 11 + _palette(data[place + 9])
        else:
            place += 1
            continue
        while place < len(data) and data[place]:
            blocks += 1
            _bounded(blocks, MAX_BLOCKS, "blocks")
            place += 1 + data[place]
        place += 1


def _palette(packed: int) -> int:
    """Return the size in bytes of the colour table that the flags of a GIF declare."""
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _check_tiff(data: bytes) -> None:
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    try:
        (place,) = struct.unpack_from(f"{order}Q" if is_big else f"{order}I", data, 8 if is_big else 4)
        count_form, entry_form = (f"{order}Q", f"{order}HHQ8s") if is_big else (f"{order}H", f"{order}HHI4s")
        (count,) = struct.unpack_from(count_form, data, place)
        _bounded(count, MAX_MARKERS, "tags")
        place += struct.calcsize(count_form)
        for number in range(count):
            tag, kind, values, value = struct.unpack_from(
                entry_form, data, place + number * struct.calcsize(entry_form)
            )
            if tag in _TAGS_OFFSETS:
                _bounded(values, MAX_STRIPS, "strips")
            if tag == _TAG_COMPRESSION:
                (compression,) = struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", value)
                if compression not in TIFF_COMPRESSIONS:
                    known = ", ".join(dict.fromkeys(TIFF_COMPRESSIONS.values()))
                    raise StructureError("compression", f"TIFF compression {compression}; supported are {known}")
    except struct.error:  # truncated within its tables: the decoder reports it
        return


def _check_bmp(data: bytes) -> None:
    if len(data) >= 34 and int.from_bytes(data[14:18], "little") >= 40:
        compression = int.from_bytes(data[30:34], "little")
        if compression not in BMP_COMPRESSIONS:
            raise StructureError("compression", f"BMP compression {compression}; supported are none and bit fields")
