"""Fingerprint of a dataset, by which a resumed run checks that its data is unchanged.

One line per image: split, class, key, and the size and hash of its file. `open_data` knows the hash if it decodes the
image; without the hashes of both, two datasets are compared by sizes.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.data.source import KeyedSource, Splits
from weft.errors import CheckpointError
from weft.files import write_file
from weft.reading import read_bytes, unzipped
from weft.text import count, first_few, reason_of

COLUMNS = 5  # of a line: split, class, key, size, hash
MAX_PACKED = 1 << 30
MAX_RATIO = 256  # of the compression: names are alike


@dataclass(frozen=True)
class Fingerprint:
    """Class names in order, and one line per image."""

    classes: list[str]
    lines: list[str]

    def write(self, path: Path) -> None:
        """Write the fingerprint to a gzip file, atomically."""
        text = "\n".join([str(len(self.classes)), *self.classes, *self.lines])
        write_file(path, gzip.compress(text.encode("utf-8", "surrogateescape"), compresslevel=1, mtime=0))

    @property
    def cells(self) -> Iterator[list[str]]:
        """Split, class, key and `digest_of` of every image."""
        return (line.split("\t", 3) for line in self.lines)

    @property
    def has_hashes(self) -> bool:
        """Whether the hash of every image is known."""
        return not any(line.endswith("\t") for line in self.lines)

    @property
    def without_hashes(self) -> Fingerprint:
        """The same images with their sizes alone."""
        return Fingerprint(self.classes, [line[: line.rindex("\t") + 1] for line in self.lines])

    @property
    def digests(self) -> set[str]:
        """`digest_of` of every image."""
        return {digest for *_, digest in self.cells}

    def sides_of(self, source: KeyedSource) -> list[str]:
        """Return the split of every image of a source: `train`, `val`, or "" for one that is not in the fingerprint.

        An image with another name is found by the hash of its content, if it is known; copies on both sides count as
        `val`.
        """
        sizes = [digest[: digest.rindex("\t") + 1] for digest in source.digests]
        if not self.has_hashes or sizes == list(source.digests):
            exact = {(key, digest): side for side, _, key, digest in self.without_hashes.cells}
            return [exact.get(image, "") for image in zip(map(_cell, source.keys), sizes, strict=True)]
        exact = {(key, digest): side for side, _, key, digest in self.cells}
        by_content = {digest: side for side, _, _, digest in self.cells}
        by_content |= {digest: side for side, _, _, digest in self.cells if side == "val"}
        images = zip(map(_cell, source.keys), source.digests, strict=True)
        return [exact.get((key, digest)) or by_content.get(digest, "") for key, digest in images]

    @classmethod
    def read(cls, path: Path) -> Fingerprint:
        """Read a fingerprint.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            packed = read_bytes(path, max_bytes=MAX_PACKED)
            text = unzipped(packed, MAX_RATIO * len(packed) + (1 << 20)).decode("utf-8", "surrogateescape")
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
    """Return the fingerprint of both splits, as their files were when the data was opened."""
    lines = [
        "\t".join((side, splits.classes[label], _cell(key), digest))
        for side, source in (("train", splits.train), ("val", splits.val))
        for key, label, digest in zip(source.keys, source.labels, source.digests, strict=True)
    ]
    return Fingerprint(list(splits.classes), lines)


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """Return the difference as a sentence, or None if the fingerprints are equal."""
    if not (old.has_hashes and new.has_hashes):
        old, new = old.without_hashes, new.without_hashes
    classes = (dict.fromkeys(one.classes) for one in (old, new))
    images = ({key: "\t".join((*cells, digest)) for *cells, key, digest in one.cells} for one in (old, new))
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


def _cell(key: str) -> str:
    return key.replace("\t", "\\t").replace("\n", "\\n")
