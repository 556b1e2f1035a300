"""Resize a dataset once and pack it into tar shards, for faster reading and decoding during training."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from weft.data.images.colour import ValueRange, range_comment
from weft.data.images.decode import image_values, open_image
from weft.data.index.source import Source, pixel_limit
from weft.data.sources.folder import check_outside
from weft.data.sources.open import open_data
from weft.errors import UsageError
from weft.files import flush_file, refuse_nameless, remove, swap, sweep, writing
from weft.progress import counting, reading, say

SHARD_BYTES = 256 << 20
QUALITY = 92  # of JPEG; higher values grow files faster than they improve images


class Prepared(NamedTuple):
    """Summary of written shards: images by split, number of shards, bytes before and after."""

    train: int
    val: int
    shards: int
    bytes_before: int
    bytes_after: int


def prepare_data(
    data: str | Path,
    out: str | Path,
    size: int,
    *,
    image: str | None = None,
    label: str | None = None,
    max_pixels: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Prepared:
    """Write every usable image as upright RGB JPEG to `train-000000.tar` ... and `val-000000.tar` ...

    Images of more than 8 bits per channel are scaled by the value range of the dataset, which a comment of each file
    records: a model that is trained on them stores it, and inference scales the original images by it.

    Args:
        data: any dataset that `open_data` opens.
        out: folder to write, atomically.
        size: length of the short side in pixels; smaller images keep their size. 256 is enough to evaluate at 224;
            training benefits from more, since its random crops zoom in.
        image, label: columns of a table, as in `open_data`.
        max_pixels: as in `open_data`.
        force: replace a folder of shards.
        quiet: print no progress.

    Raises:
        UsageError: `out` exists, or `size` is too small.
        DataError: the data cannot be used.
        StorageError: the disk is full or cannot be written.
    """
    out = Path(out)
    if size < 8:
        raise UsageError(f"size must be at least 8 pixels; got {size}.")
    refuse_nameless(out)
    check_outside(out, data)
    with writing(out):
        sweep(out.parent, remove, out.name)  # of a process that was killed
    _check_place(out, force)
    with reading(quiet=quiet) as progress:
        splits = open_data(data, image=image, label=label, max_pixels=max_pixels, progress=progress)
    if not quiet:
        for text in splits.notes:
            say(text)
    partial = out.with_name(f".{out.name}.{os.getpid()}.part")
    before = 0
    total = len(splits.train) + len(splits.val)
    with writing(out), counting(total, quiet=quiet, task_name="packing") as advance:
        try:
            partial.mkdir(parents=True)
            for side, source in (("train", splits.train), ("val", splits.val)):
                for num_bytes in _pack(partial, side, source, size, splits.value_range):
                    before += num_bytes
                    advance(1)
            shards = sorted(partial.glob("*.tar"))
            after = sum(shard.stat().st_size for shard in shards)
            swap(partial, out, out.with_name(f".{out.name}.{os.getpid()}.old"))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Prepared(len(splits.train), len(splits.val), len(shards), before, after)


def _check_place(out: Path, force: bool) -> None:
    entries = list(out.iterdir()) if out.is_dir() else [out] if out.exists() else []
    if entries and not force:
        raise UsageError(f"The prepared data needs a new folder; {out} exists already. Pass --force, or another path.")
    if foreign := sorted(entry.name for entry in entries if entry.suffix != ".tar"):
        raise UsageError(f"--force replaces only a folder of .tar files; {out} also contains '{foreign[0]}'.")


def _pack(folder: Path, side: str, source: Source, size: int, value_range: ValueRange | None) -> Iterator[int]:
    """Write the shards of one split; yield the original size of every image in bytes."""
    number, archive = 0, None

    def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)  # without time and owner, so that equal data gives an equal file
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))

    for i in range(len(source)):
        sample = source.read(i)
        data = _smaller(sample.data, size, pixel_limit(source), value_range)
        if archive is None or archive.offset > SHARD_BYTES:
            if archive is not None:
                _finish(archive)
            archive = tarfile.open(folder / f"{side}-{number:06}.tar", "w", format=tarfile.PAX_FORMAT)
            number += 1
        add(archive, f"{i:08}.jpg", data)
        add(archive, f"{i:08}.cls", source.classes[sample.label].encode())
        yield len(sample.data)
    if archive is not None:
        _finish(archive)


def _finish(archive: tarfile.TarFile) -> None:
    archive.close()
    flush_file(Path(str(archive.name)))


def _smaller(data: bytes, size: int, max_pixels: int, value_range: ValueRange | None) -> bytes:
    image = open_image(data, max_pixels=max_pixels, value_range=value_range)
    short = min(image.size)
    if short > size:
        width, height = (max(round(side * size / short), size) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    file = io.BytesIO()
    comment = b""
    if value_range is not None and image_values(data, max_pixels=max_pixels) is not None:
        comment = range_comment(value_range)
    image.save(file, "JPEG", quality=QUALITY, subsampling=0, comment=comment)
    return file.getvalue()
