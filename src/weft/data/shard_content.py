"""Content of a tar shard, by one pass over its headers: images with their classes, and what is left out."""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from collections import Counter
from typing import Any, BinaryIO, NamedTuple

from weft.data.formats import HEAD_BYTES, archive_kind_of, sniff
from weft.data.remote import RemoteCache, RemoteFile
from weft.data.tree import EXTENSIONS, extension, is_junk
from weft.errors import DataError
from weft.text import printable, reason_of

LABELS = ("cls", "json", "txt")  # where a sample has several, the first of these decides
MAX_LABEL_BYTES = 1 << 16
_PIECE = 1 << 20  # bytes of one read


class ShardContent(NamedTuple):
    """Content of one archive.

    Attributes:
        images: offset and size in bytes, and class (empty without label file), by name.
        ignored, skipped: as in `Inventory`.
        bad: name, and reason and detail of `BadImage`; of the archive itself, an empty name, and a sentence without
            its subject.
    """

    images: dict[str, tuple[int, int, str]]
    ignored: Counter[str]
    skipped: Counter[str]
    bad: list[tuple[str, str, str]]

    def packed(self) -> bytes:
        """Return the content for the cache."""
        return zlib.compress(json.dumps(self).encode(), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> ShardContent | None:
        """Return the content from the result of `packed`; None of damaged data."""
        try:
            images, ignored, skipped, bad = json.loads(zlib.decompress(data))
            return cls(images, Counter(ignored), Counter(skipped), bad)
        except (zlib.error, ValueError, TypeError):
            return None

    @classmethod
    def read(cls, shard: str | RemoteFile, cache: RemoteCache) -> ShardContent:
        """Read the headers of an archive, and its label files.

        Raises:
            DataError: it is no tar file, or damaged.
        """
        path = shard.url if isinstance(shard, RemoteFile) else shard
        must = f"A shard must be an uncompressed tar file; '{printable(path)}' cannot be read"
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise DataError(f"{must} (it is not a file).")
            with open_archive(shard, cache) as file:
                if (kind := archive_kind_of(file.read(tarfile.BLOCKSIZE))) not in ("", "a tar archive"):
                    raise DataError(f"{must} (it is {kind}). Unpack it, and pass the folder.")
                file.seek(0)
                return _Files(file, must).content()
        except DataError:
            raise
        except Exception as error:  # tarfile raises many types for malformed headers: ValueError, OverflowError, ...
            raise DataError(f"{must} ({getattr(error, 'strerror', None) or reason_of(error)}).") from error


class _Files:
    """Files of an archive: places of images, labels by the name of their file without extension, targets of links."""

    def __init__(self, file: BinaryIO, must: str) -> None:
        """Read all headers; `must` begins the message of an error."""
        self.images, self.labels = dict[str, tuple[int, int]](), dict[str, tuple[int, str]]()
        self.ignored, self.skipped = Counter[str](), Counter[str]()
        self.links, self.bad = list[str](), list[tuple[str, str, str]]()
        with tarfile.open(fileobj=file, mode="r:") as opened:
            archive: Any = opened  # untyped: `members` below is not in its type stubs
            num_bytes = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                # tarfile accepts a negative size, which leads back to an earlier header, and one beyond the end
                if not 0 <= member.size <= num_bytes - member.offset_data and not member.issparse():
                    raise DataError(f"{must} (a file in it must end within its {num_bytes:,} bytes). Copy it again.")
                self._add(member, file)
                archive.members = []  # else tarfile caches every header
            # tarfile also ends at a header that it cannot read
            file.seek(archive.offset)
            header = file.read(tarfile.BLOCKSIZE)
            if not header:
                detail = "has no end marker: its last images may be missing. Copy it again."
                self.bad.append(("", "truncated", detail))
            if any(header):
                raise DataError(f"{must} (its header at byte {archive.offset:,} is damaged). Copy it again.")
            if any(any(piece) for piece in iter(lambda: file.read(_PIECE), b"")):
                raise DataError(
                    f"{must} (it has more content after its end marker, as joined archives have). Unpack it with"
                    " `tar -i -xf`, and pass the folder."
                )

    def content(self) -> ShardContent:
        """Return the images with their classes; of several with one label file, the one with the shortest ending."""
        stem_of = {name: self._stem(name) for name in self.images}
        chosen: dict[str, str] = {}
        for name in sorted(stem_of, key=lambda name: name.count(".")):
            chosen.setdefault(stem_of[name] or name, name)
        unused = self.labels.keys() - set(stem_of.values())
        self.ignored.update(LABELS[self.labels[stem][0]] for stem in unused)
        self.skipped.update("link-to-listed" if to in self.images else "broken-link" for to in self.links)
        self.skipped += Counter({"same-sample": len(stem_of) - len(chosen)})  # without zeros
        images = {
            name: (*self.images[name], self.labels[stem][1] if stem else "")
            for name, stem in stem_of.items()
            if chosen[stem or name] == name
        }
        return ShardContent(images, self.ignored, self.skipped, self.bad)

    def _add(self, member: tarfile.TarInfo, file: BinaryIO) -> None:
        """Add a file of the archive to the images, labels or counts."""
        name, skipped = _normal(member.name), self.skipped
        place = member.offset_data, member.size
        ending = extension(name)
        if member.isdir():
            return
        if any(is_junk(part) for part in name.split("/") if part != ".."):
            skipped["hidden"] += 1
        elif member.issym():
            self.links.append(os.path.normpath(f"{name.rpartition('/')[0]}/{member.linkname}").lstrip("/"))
        elif member.islnk() and not (place := self.images.get(_normal(member.linkname), ())):
            skipped["broken-link"] += 1  # else a hard link is the file itself
        elif not (member.isreg() or member.islnk()):
            skipped["special"] += 1
        elif member.issparse():
            self.bad.append((name, "damaged", "it is stored as a sparse file; pack it with tar -cf"))
        elif ending in LABELS:
            stem, rank = name[: -len(ending) - 1], LABELS.index(ending)
            label = _label(_start(file, place, MAX_LABEL_BYTES + 1), ending)
            if label is None or self.labels.get(stem, (rank,))[0] < rank:
                self.ignored[ending] += 1
            else:
                self.labels[stem] = (rank, label)
        elif ending in EXTENSIONS or sniff(_start(file, place, HEAD_BYTES)) is not None:
            skipped.update(["replaced"] if name in self.images else [])
            self.images[name] = place
        else:
            self.ignored[ending] += 1

    def _stem(self, name: str) -> str:
        """Return the longest part of an image's name, up to a dot, that names a label file; empty if none does."""
        end = len(name)
        while end > name.rfind("/") + 1:
            if name[:end] in self.labels:
                return name[:end]
            end = name.rfind(".", 0, end)
        return ""


def open_archive(shard: str | RemoteFile, cache: RemoteCache) -> BinaryIO:
    """Open a shard for reading."""
    return cache.open(shard) if isinstance(shard, RemoteFile) else open(shard, "rb")


def _normal(name: str) -> str:
    """Return the name of a file in an archive without `./` and slashes that mean nothing."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _start(file: BinaryIO, place: tuple[int, int], most: int) -> bytes:
    """Return the first bytes of a file in an archive, at most a number."""
    offset, size = place
    file.seek(offset)
    return file.read(min(size, most))


def _label(data: bytes, ending: str) -> str | None:
    """Return the class from the content of a label file; None if it has none."""
    if len(data) > MAX_LABEL_BYTES:
        return None
    text = data.decode("utf-8", "replace").strip()
    if ending != "json":
        return text or None
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ("label", "class", "cls", "target") if isinstance(metadata, dict) else ()
    value = next((metadata[key] for key in keys if key in metadata), None)
    return None if value is None else str(value)
