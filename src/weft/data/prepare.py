"""Resize a dataset once and pack it into tar shards, for faster reading and decoding during training."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from weft.data.bit_depth import ValueRange, range_comment
from weft.data.decode import image_values, open_image
from weft.data.folder import check_outside
from weft.data.open import open_data
from weft.data.source import KeyedSource
from weft.errors import UsageError
from weft.files import check_output, new_directory
from weft.progress import Work, obeys_quiet, say

SHARD_BYTES = 256 << 20
QUALITY = 92  # of JPEG; higher values grow files faster than they improve images


@obeys_quiet
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
) -> dict[str, int]:
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

    Returns:
        Number of images by split (`train`, `val`), of `shards`, and of `bytes_before` and `bytes_after`.

    Raises:
        UsageError: `out` exists, or `size` is too small.
        DataError: the data cannot be used.
        StorageError: the disk is full or cannot be written.
    """
    out = Path(out)
    if size < 8:
        raise UsageError(f"size must be at least 8 pixels; got {size}.")
    check_outside(out, data)
    shards = [file.name for file in out.glob("*.tar")]
    check_output(out, shards, force=force)
    with Work("reading") as work:
        splits = open_data(data, image=image, label=label, check="decode", max_pixels=max_pixels, progress=work.update)
    for text in splits.notes:
        say(text)
    before, total = 0, len(splits.train) + len(splits.val)
    with (
        new_directory(out, shards, force=force) as folder,
        Work("packing", total) as work,
    ):
        for side, source in (("train", splits.train), ("val", splits.val)):
            for num_bytes in _pack(folder, side, source, size, splits.value_range):
                before += num_bytes
                work.advance(1)
    after = [file.stat().st_size for file in out.iterdir()]
    counts = {"train": len(splits.train), "val": len(splits.val), "shards": len(after)}
    return counts | {"bytes_before": before, "bytes_after": sum(after)}


def _pack(folder: Path, side: str, source: KeyedSource, size: int, value_range: ValueRange | None) -> Iterator[int]:
    """Write the shards of one split; yield the original size of every image in bytes."""
    i = 0
    for number in itertools.count():
        if i == len(source):
            return
        with tarfile.open(folder / f"{side}-{number:06}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            while i < len(source) and archive.offset <= SHARD_BYTES:
                sample = source.read(i)
                image = _smaller(sample.data, size, source.max_pixels, value_range)
                for ending, data in (("jpg", image), ("cls", source.classes[sample.label].encode())):
                    member = tarfile.TarInfo(f"{i:08}.{ending}")  # no time, no owner: equal data gives an equal file
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                yield len(sample.data)
                i += 1


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
