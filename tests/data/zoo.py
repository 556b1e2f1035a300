"""Every kind of file that turns up in data directories, each with the one verdict that is right for it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from tests.data.pictures import (
    BLACK_TO_WHITE,
    SRGB_PRIMARIES,
    bomb,
    encoded,
    icc_profile,
    jpeg,
    paged_tiff,
    photo,
    png,
    raw_tiff,
    text_bomb,
)

GRAY = photo()[..., 0]
RAMP_16 = BLACK_TO_WHITE.reshape(16, 16)
ALPHA = np.dstack([photo(), GRAY])
FRAMES = [Image.fromarray(photo(seed=seed)) for seed in range(3)]


class Animal(NamedTuple):
    """One file.

    Attributes:
        name: below the zoo's class folder.
        content: its bytes, or what makes the file at a path.
        fate: `bad`, `good`, `ignored` or `skipped`.
        what: the reason, the notes, the extension, or the kind.
    """

    name: str
    content: bytes | Callable[[Path], None]
    fate: str
    what: str | tuple[str, ...]


def _truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def _damaged(data: bytes) -> bytes:
    """Changed in the middle of its compressed pixels."""
    middle = len(data) * 3 // 4
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as plug:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address is at most 107 bytes long
        try:
            plug.bind(path.name)
        finally:
            os.chdir(here)


def _unreadable(path: Path) -> None:
    path.write_bytes(jpeg())
    path.chmod(0)


def _linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _palette(**options: object) -> bytes:
    return encoded(Image.fromarray(photo()).quantize(16), "PNG", **options)


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo(), "JPEG", exif=exif)


BAD = [
    Animal("truncated.jpg", _truncated(jpeg()), "bad", "truncated"),
    Animal("truncated.png", _truncated(encoded(photo(), "PNG")), "bad", "truncated"),
    Animal("truncated.webp", _truncated(encoded(photo(), "WEBP")), "bad", "truncated"),
    Animal("truncated.bmp", _truncated(encoded(photo(), "BMP")), "bad", "truncated"),
    Animal("truncated.tif", raw_tiff(GRAY, 8, photometric=1)[:-60], "bad", "damaged"),  # its directory comes last
    Animal("truncated.gif", encoded(photo(), "GIF")[:900], "bad", "truncated"),
    Animal("header-only.jpg", jpeg()[:12], "bad", "truncated"),
    Animal("bad-checksum.png", _damaged(encoded(photo(), "PNG")), "bad", "damaged"),
    Animal("empty.jpg", b"", "bad", "zero-byte"),
    Animal("page.jpg", b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "bad", "not-an-image"),
    Animal("document.png", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", "bad", "not-an-image"),
    Animal("phone.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "bad", "damaged"),
    Animal("lab.tif", encoded(Image.frombytes("LAB", (2, 2), bytes(range(60, 72))), "TIFF"), "bad", "lab-pixels"),
    Animal("float.tif", encoded((GRAY / 255).astype(np.float32), "TIFF"), "bad", "float-pixels"),
    Animal("bomb-10001.png", bomb(10001), "bad", "too-many-pixels"),
    Animal("bomb-14000.png", bomb(14000), "bad", "too-many-pixels"),
    Animal("bomb-60000.png", png(60000, 60000, b"x\x9c\x03\0\0\0\0\x01"), "bad", "too-many-pixels"),
    Animal("comment-bomb.png", text_bomb(), "bad", "metadata-bomb"),
    Animal("unreadable.jpg", _unreadable, "bad", "unreadable"),
    Animal("pipe.png", lambda path: os.mkfifo(path), "bad", "not-a-file"),
    Animal("socket.jpg", _socket, "bad", "not-a-file"),
    Animal("nowhere.jpg", _linked("no/such/file.jpg"), "bad", "missing"),
    Animal("itself.jpg", _linked("itself.jpg"), "bad", "missing"),
]

GOOD = [
    Animal("plain.jpg", jpeg(), "good", ()),
    Animal("damaged-inside.jpg", _damaged(jpeg()), "good", ()),  # no decoder can tell
    Animal("no-end.jpg", jpeg(9)[:-2], "good", ("no-end-marker",)),
    Animal("progressive.jpeg", jpeg(progressive=True), "good", ()),
    Animal("plain.jfif", jpeg(1), "good", ()),
    Animal("plain.webp", encoded(photo(), "WEBP"), "good", ()),
    Animal("plain.avif", encoded(photo(), "AVIF"), "good", ()),
    Animal("plain.heic", encoded(photo(), "HEIF"), "good", ()),
    Animal("plain.bmp", encoded(photo(), "BMP"), "good", ()),
    Animal("plain.tiff", encoded(photo(), "TIFF", compression="tiff_lzw"), "good", ()),
    Animal("no-suffix", jpeg(2), "good", ()),
    Animal("really-a-png.jpg", encoded(photo(), "PNG"), "good", ("extension",)),
    Animal("really-a-jpeg.webp", jpeg(3), "good", ("extension",)),
    Animal("gray.jpg", encoded(GRAY, "JPEG"), "good", ("gray",)),
    Animal("one-bit.png", encoded(Image.fromarray(GRAY).convert("1"), "PNG"), "good", ("gray",)),
    Animal("cmyk.jpg", encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG"), "good", ("cmyk",)),
    Animal("alpha.png", encoded(ALPHA, "PNG"), "good", ("alpha",)),
    Animal("opaque-alpha.png", encoded(np.dstack([photo(), np.full_like(GRAY, 255)]), "PNG"), "good", ()),
    Animal("gray-alpha.png", encoded(Image.fromarray(ALPHA).convert("LA"), "PNG"), "good", ("gray", "alpha")),
    Animal("palette.png", _palette(), "good", ("palette",)),
    Animal("palette-alpha.png", _palette(transparency=b"\0\x80"), "good", ("palette", "alpha")),
    Animal("deep-gray.png", encoded(RAMP_16, "PNG"), "good", ("gray", "16-bit")),
    Animal("deep-gray.tif", raw_tiff(RAMP_16, 16, photometric=1, order=">"), "good", ("gray", "16-bit")),
    Animal("deep-gray-12.tif", raw_tiff(RAMP_16 >> 4, 12, photometric=1), "good", ("gray", "16-bit")),
    Animal("rotated.jpg", _rotated(), "good", ("exif-rotated",)),
    Animal(
        "moving.gif",
        encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        "good",
        ("palette", "animated"),
    ),
    Animal("moving.webp", encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "good", ("animated",)),
    Animal("moving.png", encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "good", ("animated",)),
    Animal("pages.tif", paged_tiff(1000), "good", ("gray", "pages")),
    Animal("wide-gamut.jpg", jpeg(icc_profile=icc_profile(SRGB_PRIMARIES[[1, 2, 0]], 2.2)), "good", ("icc",)),
    Animal("broken-profile.jpg", jpeg(icc_profile=b"no profile"), "good", ("icc-unreadable",)),
    Animal("two\nlines.jpg", jpeg(5), "good", ()),
    Animal("spaces and $(quotes)'\".jpg", jpeg(6), "good", ()),
    Animal("right-to-left-\u202egpj.exe.jpg", jpeg(7), "good", ()),
    Animal("x" * 251 + ".jpg", jpeg(8), "good", ()),
]

ELSE = [
    Animal("notes.txt", b"hello", "ignored", "txt"),
    Animal("BMW.txt", b"BMW and Audi, a list of cars, long enough for a header", "ignored", "txt"),
    Animal("empty.csv", b"", "ignored", "csv"),
    Animal("camera.cr3", b"\0\0\0\x18ftypcrx \0\0\0\0crx isom", "ignored", "cr3"),
    Animal("drawing.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "ignored", "svg"),
    Animal("README", b"see notes", "ignored", ""),
    Animal("._plain.jpg", b"\0\x05\x16\x07", "skipped", "hidden"),
    Animal(".DS_Store", b"\0\0\0\1Bud1", "skipped", "hidden"),
    Animal("Thumbs.db", b"\xd0\xcf\x11\xe0", "skipped", "hidden"),
    Animal("pipe", lambda path: os.mkfifo(path), "skipped", "special"),
    Animal("dangling", _linked("no/such/thing"), "skipped", "broken-link"),
    Animal("again.jpg", _linked("plain.jpg"), "skipped", "link-to-listed"),
    Animal("loop", _linked("."), "skipped", "link-to-listed"),
    Animal("up", _linked(".."), "skipped", "link-to-listed"),
    Animal("away", _linked("/usr"), "skipped", "link-out"),
]

ANIMALS = BAD + GOOD + ELSE


def settle(folder: Path, animals: list[Animal]) -> None:
    """Puts them into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for animal in animals:
        path = folder / animal.name
        if callable(animal.content):
            animal.content(path)
        else:
            path.write_bytes(animal.content)


def class_folders(root: Path, per_class: int = 5, classes: tuple[str, ...] = ("a", "b"), first_seed: int = 0) -> Path:
    """An ordinary data directory: class folders of small JPEGs, no two alike."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            (root / name / f"{i:04d}.jpg").write_bytes(jpeg(first_seed + number * per_class + i))
    return root


def digest(root: Path) -> str:
    """sha256 over every name, kind, mode, time of change and content below `root`."""
    state = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files, "."]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            state.update(
                f"{path} {status.st_mode} {status.st_mtime_ns} {status.st_size}".encode(errors="surrogateescape")
            )
            if os.path.isfile(path) and not os.path.islink(path) and os.access(path, os.R_OK):
                with open(path, "rb") as file:
                    state.update(file.read())
    return state.hexdigest()
