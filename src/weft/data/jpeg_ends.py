"""JPEG files without their end marker: whether all pixels are there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

END_MARKER = b"\xff\xd9"
RESTART = re.compile(rb"\xff[\xd0-\xd7]")
MIN_PADDING = 4  # zero bytes at the end of a file that are no pixels
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # a marker that ends compressed data


def is_ended(data: bytes) -> bool:
    """Return whether a JPEG has its end marker; other bytes may follow it."""
    return data.endswith(END_MARKER) or _scans_of(data)[1]


def with_end_marker(data: bytes, pixels_of: Callable[[bytes], bytes | None]) -> bytes | None:
    """Return a JPEG that lacks its end marker with one; None if pixels are also missing.

    A decoder reads no further than the last block. If no block is missing, the pixels do not depend on what follows;
    else the bits that follow become pixels.

    Args:
        data: the file.
        pixels_of: returns the pixels of a file; None if it cannot be decoded.
    """
    cut = data.rstrip(b"\0")
    data = (cut if len(data) - len(cut) >= MIN_PADDING else data).rstrip(b"\xff")
    if not _scans_of(data)[0]:
        return None
    restarts = RESTART.findall(data, data.rfind(b"\xff\xda"))  # the decoder looks for the next one, and skips the rest
    restart = bytes((0xFF, 0xD0 + (restarts[-1][1] + 1) % 8 if restarts else 0xD0))
    contents = set()
    for bits in (b"", b"\x00", b"\x55", b"\xfe"):
        following = 64 * bits + restart + 64 * bits if bits else b""
        pixels = pixels_of(data + following + END_MARKER)
        if pixels is None:
            return None
        contents.add(hashlib.sha256(pixels).digest())
    return data + END_MARKER if len(contents) == 1 else None


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
