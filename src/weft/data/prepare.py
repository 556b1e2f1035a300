"""Resize a dataset once and pack it into tar shards, for faster reading and decoding during training."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from weft.data.bit_depth import ValueRange, range_comment
from weft.data.decode import BadImage, as_bad, image_values, open_image
from weft.data.folder import check_outside
from weft.data.open import open_data
from weft.data.source import BadFile, KeyedSource, bad_file
from weft.data.split import SplitPlan, rank
from weft.errors import DataError, UsageError, WeftError, is_installed
from weft.files import check_output, new_directory
from weft.machine.processor import available_cores
from weft.progress import Work, loading, obeys_quiet, say
from weft.text import first_few, printable, reason_of

SHARD_BYTES = 256 << 20
QUALITY = 92  # of JPEG; higher values grow files faster than they improve images
MAX_BAD = 0.1  # largest accepted fraction of bad files
FEW = 500  # images that take less time than the start of processes
AHEAD = 16  # resized images per process that wait at most to be written


@obeys_quiet
def prepare_data(
    data: str | Path,
    out: str | Path,
    size: int,
    *,
    image: str | None = None,
    label: str | None = None,
    group: str | None = None,
    max_pixels: int | None = None,
    workers: int | Literal["auto"] = "auto",
    force: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write every usable image as upright RGB JPEG to `train-000000.tar` ... and `val-000000.tar` ...

    Images of more than 8 bits per channel are scaled by the value range of the dataset, which a comment of each file
    records: a model that is trained on them stores it, and inference scales the original images by it.

    Args:
        data: any dataset that `open_data` opens.
        out: folder to write, atomically.
        size: length of the short side in pixels; smaller images keep their size. 256 is enough to evaluate at 224;
            training benefits from more, since its random crops zoom in.
        image, label: columns of a table, as in `open_data`.
        group: images of one group are on one side of the split, as in `SplitPlan`.
        max_pixels: as in `open_data`.
        workers: number of processes that resize; 0 resizes in this one. auto: one per core, for more than 500 images
            and where processes are forked. The files are byte-identical with any number.
        force: replace a folder of shards.
        quiet: print no progress.

    Returns:
        Number of images by split (`train`, `val`), of `shards`, and of `bytes_before` and `bytes_after`; `unreadable`:
        images that turned out to be damaged, which are left out, as `{"image": ..., "error": ...}`.

    Raises:
        UsageError: `out` exists, or `size` or `workers` is too small.
        DataError: the data cannot be used, or too many images are damaged.
        StorageError: the disk is full or cannot be written.
    """
    out = Path(out)
    if size < 8:
        raise UsageError(f"size must be at least 8 pixels; got {size}.")
    check_outside(out, data)
    if workers != "auto" and workers < 0:
        raise UsageError(f"workers must be auto or at least 0; got {workers}.")
    shards = [file.name for file in out.glob("*.tar")]
    check_output(out, shards, force=force)
    plan = SplitPlan(group=group)
    with Work("reading") as work:
        splits = open_data(
            data, plan, image=image, label=label, check="header", max_pixels=max_pixels, progress=work.update
        )
    for text in splits.notes:
        say(text)
    if not splits.is_given and splits.groups is None:
        say(
            "The shards keep this random split. For images in series: weft data check DATA --series FILE, then --group"
            " FILE."
        )
    sides, damaged, before = {"train": splits.train, "val": splits.val}, list[BadFile](), 0
    total = sum(map(len, sides.values()))
    if workers == "auto":
        workers = _processes() if total > FEW else 0
    with new_directory(out, shards, force=force) as folder, Work("packing", total) as work:
        for side, source in sides.items():
            place, images = -1, _Resized(source, size, splits.value_range)
            try:
                for place, result in enumerate(_pack(folder, side, images, workers)):
                    if isinstance(result, BadImage):
                        damaged.append(bad_file(source.keys[images.order[place]], result, side))
                        _check_number([*splits.bad, *damaged], total + len(splits.bad))
                    else:
                        before += result
                    work.advance(1)
            except DataError as error:  # torch has put the message of a process at the end of its own
                raise DataError(str(error).rstrip().rsplit("DataError: ", 1)[-1]) from None
            except RuntimeError as error:
                error.__traceback__ = None  # its frames hold the processes, which then take seconds to end
                key = printable(source.keys[images.order[place + 1]])
                raise WeftError(
                    f"The processes must run until the end; one did not, at {key} or an image soon after it"
                    f" ({reason_of(error)}). Lower --workers if the memory does not suffice."
                ) from None
            _check_classes(side, source, damaged)
    after = [file.stat().st_size for file in out.iterdir()]
    counts = {side: len(source) - sum(bad.split == side for bad in damaged) for side, source in sides.items()}
    unreadable = [{"image": printable(bad.key), "error": bad.message} for bad in damaged]
    sizes = {"shards": len(after), "bytes_before": before, "bytes_after": sum(after)}
    return {**counts, **sizes, "unreadable": unreadable}


class _Resized:
    """Images of one split as smaller JPEG files, in random order."""

    def __init__(self, source: KeyedSource, size: int, value_range: ValueRange | None) -> None:
        self.source, self.size, self.value_range = source, size, value_range
        # each shard then has images of all classes: training from a server shuffles those of some shards at a time
        self.order = sorted(range(len(source)), key=lambda i: rank(source.keys[i], 0))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> tuple[bytes, int] | BadImage:
        """Return the new file, and the size of the original one in bytes; or why the image cannot be used."""
        try:
            data = self.source.reader(self.source.keys[self.order[place]])
            return _smaller(data, self.size, self.source.max_pixels, self.value_range), len(data)
        except (BadImage, OSError) as error:
            return as_bad(error)


def _processes() -> int:
    """Return the number of processes that resize by default: one per core, where they are forked."""
    cores = available_cores()
    if cores == 1 or not is_installed("torch"):
        return 0
    with loading():
        from weft.data.loader import is_forking
    return cores if is_forking() else 0


def _results(images: _Resized, workers: int) -> Iterator[tuple[bytes, int] | BadImage]:
    """Return all results in order, those of the processes if there are any."""
    if not workers:
        return map(images.__getitem__, range(len(images)))
    with loading():
        from weft.data.loader import WorkerLoader
    return iter(WorkerLoader(images, batch_size=None, num_workers=workers, prefetch_factor=AHEAD))


def _pack(folder: Path, side: str, images: _Resized, workers: int) -> Iterator[int | BadImage]:
    """Write the shards of one split; yield for every image its original size in bytes, or why it is left out."""
    source, results, place = images.source, _results(images, workers), 0
    for number in itertools.count():
        if place == len(source):
            return
        with tarfile.open(folder / f"{side}-{number:06}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            while place < len(source) and archive.offset <= SHARD_BYTES:
                result, i = next(results), images.order[place]
                if isinstance(result, BadImage):  # its number stays unused
                    yield result
                else:
                    image, num_bytes = result
                    for ending, data in (("jpg", image), ("cls", source.classes[source.labels[i]].encode())):
                        member = tarfile.TarInfo(f"{i:08}.{ending}")  # no time, no owner: equal data, equal file
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
                    yield num_bytes
                place += 1


def _check_number(bad: list[BadFile], total: int) -> None:
    """Raise DataError if a larger fraction of the files than `MAX_BAD` is bad."""
    if len(bad) > MAX_BAD * total:
        raise DataError(
            f"At most {MAX_BAD:.3g} of the {total:,} files may be bad; so far {len(bad):,} are:"
            f" {first_few(file.key for file in bad)}. List them all with `weft data check`, and repair or remove them."
        )


def _check_classes(side: str, source: KeyedSource, damaged: list[BadFile]) -> None:
    """Raise DataError if all images of a split, or all training images of a class, are damaged."""
    lost = {file.key for file in damaged}
    left = {label for key, label in zip(source.keys, source.labels, strict=True) if key not in lost}
    empty = set(source.labels) - left if side == "train" or not left else ()
    if empty:
        raise DataError(
            f"Every class must have at least one usable image in the {side} split; all are damaged of"
            f" {first_few(source.classes[label] for label in sorted(empty))}. Add images, or remove the folder."
        )


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
