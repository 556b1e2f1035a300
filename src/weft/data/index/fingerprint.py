"""What a run learned from, so that one that goes on can tell whether it is still the same.

One line per picture: split, class, key, size, and a hash of its bytes. Hashing reads everything once; of data larger
than `HASHED_BYTES` only names and sizes are kept, which take a second for a hundred thousand files.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.images.decode import BadImage
from weft.data.index.source import Source, Splits
from weft.durable import write_whole
from weft.errors import CheckpointError, DataError
from weft.reading import read_bytes, unzipped
from weft.text import printable

HASHED_BYTES = 2 << 30
MAX_PACKED = 1 << 30  # a line has a sha256 of 64 digits: it shrinks to no less than a half
NUM_NAMED = 5


@dataclass(frozen=True)
class Fingerprint:
    """Classes in their order, and one line for every picture."""

    classes: list[str]
    lines: list[str]

    def write(self, path: Path) -> None:
        """Writes it, compressed."""
        text = "\n".join([str(len(self.classes)), *self.classes, *self.lines])
        write_whole(path, gzip.compress(text.encode("utf-8", "surrogateescape"), mtime=0))

    @classmethod
    def read(cls, path: Path) -> Fingerprint:
        """Reads it.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        try:
            packed = read_bytes(path, max_bytes=MAX_PACKED)
            text = unzipped(packed, 64 * len(packed) + (1 << 20)).decode("utf-8", "surrogateescape")
            count, *rest = text.split("\n")
            return cls(rest[: int(count)], rest[int(count) :])
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path} must say what the run learns from; it cannot be read ({error}).") from error


def fingerprint(splits: Splits) -> Fingerprint:
    """Looks at every picture of both sides.

    Raises:
        DataError: one cannot be read any more.
    """
    sides = (("train", splits.train), ("val", splits.val))
    sizes = [list(_sizes(source)) for _, source in sides]
    is_small = sum(map(sum, sizes)) <= HASHED_BYTES
    lines = []
    for (side, source), of_side in zip(sides, sizes, strict=True):
        for i, size in enumerate(of_side):
            cells = (side, splits.classes[source.labels[i]], _key(source, i), str(size))
            lines.append("\t".join([*cells, _hash(source, i) if is_small else "-"]))
    return Fingerprint(list(splits.classes), lines)


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """What changed from one to the other, in a sentence; None for nothing."""
    if old.classes != new.classes:
        gone, come = set(old.classes) - set(new.classes), set(new.classes) - set(old.classes)
        if not gone and not come:
            return "its classes are in another order."
        return f"{_named('class', 'gone', gone)}{' and ' if gone and come else ''}{_named('class', 'new', come)}."
    if old.lines == new.lines:
        return None
    was, now = (_by_key(one) for one in (old, new))
    changed = {key for key in was.keys() & now.keys() if was[key] != now[key]}
    parts = [
        _named("image", word, keys)
        for word, keys in (("gone", was.keys() - now.keys()), ("new", now.keys() - was.keys()), ("changed", changed))
        if keys
    ]
    return f"{', '.join(parts)}." if parts else "its images are in another order."


def _by_key(one: Fingerprint) -> dict[str, str]:
    """Key to everything else; the split is part of it, but not the name of the class folder."""
    cells = (line.split("\t") for line in one.lines)
    return {cell[-3]: "\t".join([*cell[:-3], *cell[-2:]]) for cell in cells}


def _named(what: str, how: str, names: Any) -> str:
    if not names:
        return ""
    listed = ", ".join(printable(name) for name in sorted(names)[:NUM_NAMED])
    more = f" and {len(names) - NUM_NAMED:,} more" if len(names) > NUM_NAMED else ""
    plural = {"class": "classes", "image": "images"}[what] if len(names) > 1 else what
    return f"{len(names):,} {plural} {how} ({listed}{more})"


def _key(source: Source, i: int) -> str:
    return source.keys[i].replace("\t", "\\t").replace("\n", "\\n")


def _sizes(source: Source) -> Iterator[int]:
    """Bytes of every picture, without reading it where that can be."""
    size = getattr(getattr(source, "reader", None), "size", None)
    for i, key in enumerate(source.keys):
        try:
            yield len(source.read(i).data) if size is None else size(key)
        except (OSError, BadImage) as error:
            raise DataError(f"{printable(key)} was there a moment ago, and is not any more.") from error


def _hash(source: Source, i: int) -> str:
    return hashlib.blake2b(source.read(i).data, digest_size=12).hexdigest()
