"""Fingerprint of a dataset, by which a resumed run checks that its data is unchanged.

One line per image: split, class, key, size and a hash of its bytes. Hashing reads every file once; for datasets larger
than `HASHED_BYTES` only names and sizes are recorded, which takes a second for 100,000 files.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.data.images.decode import BadImage
from weft.data.index.source import Source, Splits
from weft.errors import CheckpointError, DataError
from weft.files import write_whole
from weft.reading import read_bytes, unzipped
from weft.text import count, first_few, printable, reason_of

COLUMNS = 5  # of a line: split, class, key, size, hash
HASHED_BYTES = 2 << 30
MAX_PACKED = 1 << 30  # hex digests in the lines bound the compression ratio


@dataclass(frozen=True)
class Fingerprint:
    """Class names in order, and one line per image."""

    classes: list[str]
    lines: list[str]

    def write(self, path: Path) -> None:
        """Write the fingerprint to a gzip file, atomically."""
        text = "\n".join([str(len(self.classes)), *self.classes, *self.lines])
        write_whole(path, gzip.compress(text.encode("utf-8", "surrogateescape"), mtime=0))

    @property
    def hashes(self) -> set[str]:
        """`hash_of` of every image; empty for a dataset that is larger than `HASHED_BYTES`."""
        return {line.rpartition("\t")[2] for line in self.lines} - {"-"}

    def sides_of(self, source: Source) -> list[str]:
        """Return the split of every image of a source: `train`, `val`, or "" for one that is not in the fingerprint.

        An image with another name is found by its content; copies on both sides count as `val`. An image that was
        recorded without a hash is found by its name and size.

        Raises:
            DataError: an image can no longer be read.
        """
        exact: dict[tuple[str, str, str], str] = {}
        by_content: dict[str, str] = {}
        for line in self.lines:
            side, *_, key, size, digest = line.split("\t")
            exact[key, size, digest] = side
            if by_content.get(digest) != "val":
                by_content[digest] = side
        by_content.pop("-", None)
        sides = []
        for i, size in enumerate(_sizes(source)):
            digest = hash_of(source.read(i).data) if by_content else "-"
            names = [(_key(source, i), str(size), recorded) for recorded in (digest, "-")]
            sides.append(exact.get(names[0]) or exact.get(names[1]) or by_content.get(digest, ""))
        return sides

    @classmethod
    def read(cls, path: Path) -> Fingerprint:
        """Read a fingerprint.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            packed = read_bytes(path, max_bytes=MAX_PACKED)
            text = unzipped(packed, 64 * len(packed) + (1 << 20)).decode("utf-8", "surrogateescape")
            number, *rest = text.split("\n")
            classes, lines = rest[: int(number)], rest[int(number) :]
            if any(line.count("\t") < COLUMNS - 1 for line in lines):
                raise ValueError(f"every line must have {COLUMNS} columns")
            return cls(classes, lines)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(
                f"{path} must list the images of the run; it cannot be read ({reason_of(error)}). Restore it."
            ) from error


def fingerprint(splits: Splits) -> Fingerprint:
    """Compute the fingerprint of both splits.

    Raises:
        DataError: an image can no longer be read.
    """
    sides = (("train", splits.train), ("val", splits.val))
    sizes = [list(_sizes(source)) for _, source in sides]
    is_small = sum(map(sum, sizes)) <= HASHED_BYTES
    lines = []
    for (side, source), of_side in zip(sides, sizes, strict=True):
        for i, size in enumerate(of_side):
            cells = (side, splits.classes[source.labels[i]], _key(source, i), str(size))
            lines.append("\t".join([*cells, hash_of(source.read(i).data) if is_small else "-"]))
    return Fingerprint(list(splits.classes), lines)


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """Return the difference as a sentence, or None if the fingerprints are equal."""
    classes = (dict.fromkeys(one.classes) for one in (old, new))
    images = (_by_key(one) for one in (old, new))
    for one, several, (was, now) in (("class", "classes", classes), ("image", "images", images)):
        changed = {key for key in was.keys() & now.keys() if was[key] != now[key]}
        keys_of = {"gone": was.keys() - now.keys(), "new": now.keys() - was.keys(), "changed": changed}
        parts = [
            f"{count(len(keys), one, several)} {word} ({first_few(sorted(keys), 3)})"
            for word, keys in keys_of.items()
            if keys
        ]
        if parts:
            return f"{', '.join(parts)}."
        if list(was) != list(now):
            return f"its {several} are in another order."
    return None


def _by_key(one: Fingerprint) -> dict[str, str | None]:
    """Return a dictionary from key to the other columns."""
    cells = (line.split("\t") for line in one.lines)
    return {cell[-3]: "\t".join([*cell[:-3], *cell[-2:]]) for cell in cells}


def _key(source: Source, i: int) -> str:
    return source.keys[i].replace("\t", "\\t").replace("\n", "\\n")


def _sizes(source: Source) -> Iterator[int]:
    """Yield the size of every image in bytes, without reading the file where the reader knows it."""
    size = getattr(getattr(source, "reader", None), "size", None)
    for i, key in enumerate(source.keys):
        try:
            yield len(source.read(i).data) if size is None else size(key)
        except (OSError, BadImage) as error:
            raise DataError(f"{printable(key)} could be read a moment ago and cannot any more.") from error


def hash_of(data: bytes) -> str:
    """Return the hash of an image file in hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()
