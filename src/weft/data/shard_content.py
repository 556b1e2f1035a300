"""Content of a tar shard, by one pass over its headers: images, label files, and what is left out."""

from __future__ import annotations

import dataclasses
import json
import os
import tarfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from weft.data.decode import BadImage
from weft.data.formats import HEAD_BYTES, archive_kind_of, sniff
from weft.data.inventory import Inventory
from weft.data.remote import RemoteCache, RemoteFile
from weft.data.source import BadFile, bad_file
from weft.data.tree import EXTENSIONS, extension, is_junk
from weft.errors import DataError
from weft.text import printable, reason_of

LABELS = ("cls", "json", "txt")  # where a sample has several, the first of these decides
MAX_LABEL_BYTES = 1 << 16
_PIECE = 1 << 20  # bytes of one read
ShardImage = tuple[str, str, str, list[str]]
"""Key, class (empty without label file), split, and folders in the archive of an image."""


@dataclass
class ShardContent:
    """Content of one archive.

    Attributes:
        name: of the archive in keys.
        images: offset and size in bytes, by name.
        labels: place of the extension in `LABELS` and the class, by the name of the label file without extension.
        links: their targets.
        ignored, skipped: as in `Inventory`.
        sparse: images that are stored as sparse files.
        is_ended: whether the archive has an end marker.
    """

    name: str
    images: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, tuple[int, str]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    sparse: list[str] = field(default_factory=list)
    is_ended: bool = True

    def packed(self) -> bytes:
        """Return the content for the cache."""
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode(), 1)

    @classmethod
    def unpacked(cls, name: str, data: bytes) -> ShardContent | None:
        """Return the result of `packed` under a name; None of damaged data."""
        try:
            values = json.loads(zlib.decompress(data))
            counters = {key: Counter(values[key]) for key in ("ignored", "skipped")}
            return cls(**{**values, **counters, "name": name})
        except (zlib.error, ValueError, TypeError, KeyError):
            return None

    def samples(self, split: str, inventory: Inventory) -> list[ShardImage]:
        """Return the images with their label files; of several with one label file the first with the shortest ending,
        and add the other files to the counts of an inventory."""
        inventory.ignored += self.ignored
        inventory.skipped += self.skipped
        for name in self.sparse:
            problem = BadImage("", "damaged", "it is stored as a sparse file; pack it with tar -cf")
            inventory.bad.append(bad_file(f"{self.name}/{name}", problem, split))
        if not self.is_ended:
            message = f"{printable(self.name)} has no end marker: its last images may be missing. Copy it again."
            inventory.bad.append(BadFile(self.name, "truncated", message, split))
        stems = {name: self._stem(name) for name in self.images}
        chosen: dict[str, str] = {}
        for name in sorted(stems, key=lambda name: name.count(".")):
            chosen.setdefault(stems[name] or name, name)
        unused = self.labels.keys() - set(stems.values())
        inventory.ignored.update(LABELS[self.labels[stem][0]] for stem in unused)
        inventory.skipped.update("link-to-listed" if to in self.images else "broken-link" for to in self.links)
        inventory.skipped += Counter({"same-sample": len(stems) - len(chosen)})  # without zeros
        return [
            (
                f"{self.name}/{name}",
                self.labels[stem][1] if stem else "",
                split,
                [part for part in name.split("/")[:-1] if part != ".."],
            )
            for name, stem in stems.items()
            if chosen[stem or name] == name
        ]

    @classmethod
    def read(cls, shard: str | RemoteFile, name: str, cache: RemoteCache) -> ShardContent:
        """Read the headers of an archive, and its label files."""
        content, path = cls(name), shard.url if isinstance(shard, RemoteFile) else shard
        must = f"A shard must be an uncompressed tar file; '{printable(path)}' cannot be read"
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise DataError(f"{must} (it is not a file).")
            with open_archive(shard, cache) as file:
                if (kind := archive_kind_of(file.read(tarfile.BLOCKSIZE))) not in ("", "a tar archive"):
                    raise DataError(f"{must} (it is {kind}). Unpack it, and pass the folder.")
                file.seek(0)
                content._read(file, must)
        except DataError:
            raise
        except Exception as error:  # tarfile raises many types for malformed headers: ValueError, OverflowError, ...
            raise DataError(f"{must} ({getattr(error, 'strerror', None) or reason_of(error)}).") from error
        return content

    def _read(self, file: BinaryIO, must: str) -> None:
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
            self.is_ended = header != b""
            if any(header):
                raise DataError(f"{must} (its header at byte {archive.offset:,} is damaged). Copy it again.")
            if any(any(piece) for piece in iter(lambda: file.read(_PIECE), b"")):
                raise DataError(
                    f"{must} (it has more content after its end marker, as joined archives have). Unpack it with"
                    " `tar -i -xf`, and pass the folder."
                )

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
            self.sparse.append(name)
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
