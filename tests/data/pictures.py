"""Small pictures and files made by hand, byte by byte where the point lies in a byte."""

from __future__ import annotations

import functools
import io
import struct
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin
from pillow_heif import register_heif_opener

from weft.data.colour import Picture
from weft.data.crops import Crop

BLACK_TO_WHITE = np.linspace(0, 65535, 256).round().astype(np.uint16)


class Whole:
    """A transform that keeps all pixels of an image."""

    mean = std = (0.5, 0.5, 0.5)

    def draw(self, image: Picture) -> Crop:
        return Crop(image.whole())


def photo(height: int = 24, width: int = 32, seed: int = 0) -> np.ndarray:
    """A smooth picture in uint8 (height, width, 3), different for every seed, and different from all its turns."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x * rng.uniform(0.1, 0.3) + y * rng.uniform(0.05, 0.2) + rng.uniform(0, 6)) for _ in range(3)]
    return np.rint(127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def encoded(pixels: np.ndarray | Image.Image, format: str, **options: Any) -> bytes:
    """The bytes of a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    if format == "HEIF":
        register_heif_opener()
    image.save(file, format, **options)
    return file.getvalue()


def variants(seed: int = 0) -> list[bytes]:
    """Files of all formats, modes and ways of packing, as encoders write them."""
    colour = photo(16 + seed, 24 - seed, seed)
    image, gray = Image.fromarray(colour), Image.fromarray(colour[..., 0])
    alpha = Image.fromarray(np.dstack([colour, colour[..., 0]]))
    several: Any = {
        "save_all": True,
        "append_images": [Image.fromarray(photo(16 + seed, 24 - seed, i)) for i in range(3)],
    }
    profile = icc_profile(np.eye(3) * 0.9, 2.0)
    compressions = ("raw", "tiff_lzw", "tiff_deflate", "jpeg", "packbits", "tiff_adobe_deflate")
    return [
        *(encoded(image, name) for name in ("BMP", "AVIF", "HEIF", "WEBP")),
        *(encoded(alpha, name) for name in ("PNG", "AVIF")),
        *(encoded(image, "TIFF", compression=name) for name in compressions),
        *(encoded(image.convert("CMYK"), name) for name in ("JPEG", "TIFF")),
        *(encoded(image, name, **several) for name in ("WEBP", "GIF")),
        encoded(image, "JPEG", quality=60 + 4 * seed),
        encoded(image, "JPEG", progressive=True, icc_profile=profile),
        encoded(image, "JPEG", optimize=True, restart_marker_blocks=1, progressive=True),
        encoded(image, "JPEG", subsampling=seed % 3, restart_marker_blocks=2),
        encoded(image, "PNG", icc_profile=profile),
        encoded(image.quantize(7), "PNG", bits=4, transparency=1),
        encoded(np.asarray(gray).astype(np.uint16) * 257, "PNG"),
        encoded(image, "WEBP", lossless=True),
        encoded(alpha, "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
        encoded(image.quantize(16), "BMP"),
        encoded(image, "TIFF", compression="tiff_lzw", strip_size=1),
        encoded(gray.convert("1"), "TIFF", compression=("tiff_lzw", "packbits")[seed % 2]),
        encoded(image, "GIF", interlace=seed % 2),
        encoded(image, "GIF", **several, disposal=seed % 4, transparency=0),
    ]


@functools.cache
def jpeg(seed: int = 0, **options: Any) -> bytes:
    """A JPEG of `photo`."""
    return encoded(photo(seed=seed), "JPEG", **({"quality": 90} | options))


def tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar archive of files with these names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=tarfile.GNU_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def chunk(name: bytes, body: bytes) -> bytes:
    """One chunk of a PNG file."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, pixels: bytes, *, depth: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    """A PNG file: `pixels` is the zlib stream, `extra` chunks that go before it."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bomb(side: int) -> bytes:
    """A whole, valid PNG of side x side black pixels, one bit each: small as a file, large when decoded."""
    row = b"\0" * ((side + 7) // 8 + 1)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return png(side, side, packed, depth=1, colour=0)


def text_bomb(num_bytes: int = 1 << 28) -> bytes:
    """A PNG of one pixel with a comment that unpacks to `num_bytes`."""
    packer = zlib.compressobj(9)
    block = b"\0" * (1 << 20)
    packed = b"".join(packer.compress(block) for _ in range(num_bytes >> 20)) + packer.flush()
    return png(1, 1, zlib.compress(b"\0\xff\0\0"), extra=chunk(b"zTXt", b"Comment\0\0" + packed))


def progressive(scans: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated; each costs a pass over all coefficients."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 30)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, end = data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9")
    own = data.count(b"\xff\xda")
    return data[:end] + data[last:end] * (scans - own) + data[end:]


def rle8(pixels: bytes) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, 100, 100, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(pixels), 0, 0, 1078) + header + bytes(1024) + pixels


def tiff(pixels: np.ndarray, tags: dict[int, Any] | None = None, **options: Any) -> bytes:
    """A TIFF file with extra tags: float values as DOUBLE, int values as SHORT."""
    info = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in (tags or {}).items():
        info.tagtype[tag] = 12 if isinstance(value, float) else 3
        info[tag] = value
    return encoded(pixels, "TIFF", tiffinfo=info, **options)


def tiff_of_fields(strip: bytes, fields: dict[int, tuple[int, Any]], order: str = "<") -> bytes:
    """An uncompressed TIFF with one strip, written field by field: {tag: (type, values)}, values a tuple or bytes."""
    packing = {1: "B", 2: "c", 3: "H", 4: "I", 5: "II", 7: "B", 9: "i", 11: "f", 12: "d"}
    strip += b"\0" * (len(strip) % 2)
    start = 8 + len(strip)
    entries, beside, place = b"", b"", start + 2 + 12 * len(fields) + 4
    for tag, (kind, values) in sorted(fields.items()):
        parts = [values] if isinstance(values, bytes) else []
        parts = parts or [struct.pack(order + packing[kind], *np.atleast_1d(value)) for value in values]
        packed = b"".join(parts)
        entries += struct.pack(f"{order}HHI", tag, kind, len(values))
        if len(packed) <= 4:
            entries += packed.ljust(4, b"\0")
        else:
            entries += struct.pack(f"{order}I", place + len(beside))
            beside += packed
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    return head + strip + struct.pack(f"{order}H", len(fields)) + entries + bytes(4) + beside


def raw_tiff(values: np.ndarray, bits: int, *, photometric: int, order: str = "<", sample_format: int = 1) -> bytes:
    """A gray TIFF file; `values` are packed as `bits` say."""
    height, width = values.shape
    if bits == 12:
        even, odd = values.reshape(-1, 2).astype(int).T
        strip = np.stack([even >> 4, (even & 15) << 4 | odd >> 8, odd & 255], axis=-1).astype(np.uint8).tobytes()
    else:
        strip = values.astype(values.dtype.newbyteorder(order)).tobytes()
    longs = {256: width, 257: height, 273: 8, 278: height, 279: len(strip)}
    shorts = {258: bits, 259: 1, 262: photometric, 277: 1, 339: sample_format}
    fields = {tag: (kind, (value,)) for kind, of_kind in ((3, shorts), (4, longs)) for tag, value in of_kind.items()}
    return tiff_of_fields(strip, fields, order)


def tagged_tiff(tags: dict[int, tuple[int, Any]]) -> bytes:
    """A TIFF of 8x8 pixels with further tags."""
    fields = {256: (4, (8,)), 257: (4, (8,)), 258: (3, (8, 8, 8)), 259: (3, (1,)), 262: (3, (2,)), 273: (4, (8,))}
    return tiff_of_fields(bytes(range(192)), {**fields, 277: (3, (3,)), 278: (4, (8,)), 279: (4, (192,)), **tags})


def paged_tiff(num_pages: int) -> bytes:
    """A TIFF file of so many pages of 4 x 4 pixels, chained by hand (Pillow would take a second per thousand)."""
    pages, offset = [], 8
    for page in range(num_pages):
        single = raw_tiff(np.full((4, 4), page % 256, np.uint8), 8, photometric=1)
        strip, directory = single[8:24], bytearray(single[24:])
        struct.pack_into("<I", directory, 2 + 5 * 12 + 8, offset)  # entry 5 is tag 273, where the strip begins
        offset += len(strip) + len(directory)
        following = offset + len(strip) if page + 1 < num_pages else 0
        struct.pack_into("<I", directory, len(directory) - 4, following)
        pages.append(strip + bytes(directory))
    return b"II*\0" + struct.pack("<I", 8 + 16) + b"".join(pages)


def icc_profile(primaries: np.ndarray, gamma: float) -> bytes:
    """An ICC v2 display profile: `primaries` are the XYZ (D50) of full red, green and blue, one per row."""

    def fixed(value: float) -> bytes:
        return struct.pack(">i", round(value * 65536))

    def xyz(values: np.ndarray) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(fixed(value) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    text = b"made by hand\0"
    bodies = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + b"\0" * (12 + 67),
        b"cprt": b"text\0\0\0\0" + text,
        b"wtpt": xyz(np.array([0.9642, 1.0, 0.8249])),
        b"rXYZ": xyz(primaries[0]),
        b"gXYZ": xyz(primaries[1]),
        b"bXYZ": xyz(primaries[2]),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
    }
    table, data, offset = struct.pack(">I", len(bodies)), b"", 128 + 4 + 12 * len(bodies)
    for name, body in bodies.items():
        body += b"\0" * (-len(body) % 4)
        table += name + struct.pack(">II", offset + len(data), len(body))
        data += body
    header = struct.pack(">I4sI4s4s4s", 128 + len(table) + len(data), b"\0" * 4, 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    header += b"\0" * 12 + b"acsp" + b"\0" * 28 + b"".join(fixed(value) for value in (0.9642, 1.0, 0.8249))
    return header.ljust(128, b"\0") + table + data


SRGB_PRIMARIES = np.array([[0.4360, 0.2225, 0.0139], [0.3851, 0.7169, 0.0971], [0.1431, 0.0606, 0.7139]])
"""XYZ under D50 of sRGB's red, green and blue."""
