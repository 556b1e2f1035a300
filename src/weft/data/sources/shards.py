"""Open tar shards in the WebDataset layout: `0001.jpg` next to `0001.cls`, or images in folders named by class.

One pass over the headers builds an index of offsets; images are then read at their offset and never unpacked to disk.
Memory holds the index only, and links, devices and paths outside the archive have no effect.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from weft.data.images.decode import MAX_BYTES, BadImage
from weft.data.images.formats import HEAD_BYTES, archive_kind, sniff
from weft.data.index.inventory import Inventory
from weft.data.index.source import BadFile, ImageEntry, bad_file, sort_class_names
from weft.data.index.split_names import split_folders, split_of
from weft.data.index.tree import EXTENSIONS, extension, is_folder_of, is_junk, num_beside
from weft.errors import DataError, UsageError
from weft.text import count, first_few, printable, reason_of

LABELS = ("cls", "json", "txt")  # where a sample has several, the first of these decides
MAX_LABEL_BYTES = 1 << 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PIECE = 1 << 20  # bytes of one read
_Images = list[tuple[ImageEntry, list[str]]]  # images with the folders in the archive; without class, no label file


class TarMember(NamedTuple):
    """Position of a file in a tar archive, in bytes."""

    shard: str
    offset: int
    size: int


class ShardReader:
    """Read files in shards by key."""

    def __init__(self, places: dict[str, TarMember]) -> None:
        self.places = places

    def __call__(self, key: str) -> bytes:
        place = self.places[key]
        if place.size > MAX_BYTES:
            raise BadImage(printable(key), "too-many-bytes")
        # Opened for each image: thousands of open shards would exceed the limit of the system.
        with open(place.shard, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
        if len(data) < place.size:
            raise BadImage(printable(key), "truncated")
        return data


@dataclass
class _Shard:
    """Content of one archive.

    Attributes:
        name: path relative to the other shards.
        split: `train`, `val`, `test`, or empty.
        images: position of every image by its name in the archive, in order.
        labels: class of every label file by its name without extension, after the place of its extension in `LABELS`.
        links: targets of symbolic links.
    """

    name: str
    split: str
    images: dict[str, TarMember] = field(default_factory=dict)
    labels: dict[str, tuple[int, str]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)

    def add_samples(self, images: _Images, inventory: Inventory) -> None:
        """Add the images with their label files; of several with one label file the first with the shortest ending."""
        stems = {name: _label_stem(name, self.labels) for name in self.images}
        chosen: dict[str, str] = {}
        for name in sorted(stems, key=lambda name: name.count(".")):
            chosen.setdefault(stems[name] or name, name)
        for name, stem in stems.items():
            if chosen[stem or name] == name:
                label = self.labels[stem][1] if stem else ""
                images.append((ImageEntry(f"{self.name}/{name}", label, self.split), _folders(name)))
        unused = self.labels.keys() - set(stems.values())
        inventory.ignored.update(LABELS[self.labels[stem][0]] for stem in unused)
        inventory.skipped.update("link-to-listed" if link in self.images else "broken-link" for link in self.links)
        inventory.skipped += Counter({"same-sample": len(stems) - len(chosen)})  # without zeros


def is_shards(data: str) -> bool:
    """Return whether `data` is a .tar file (or pattern), or a folder with .tar files and without folders."""
    return data.endswith(".tar") or is_folder_of(Path(data), ".tar")


def open_shards(data: str) -> Inventory:
    """List the images in tar shards.

    The class of an image is the text of its label file, whose name is that of the image up to a dot. Without any label
    file, it is the first folder below those around all images. Folders `train` and `val` in the archives are a split,
    unless the names of the shards are.

    Args:
        data: a file, a range such as `train-{000..009}.tar`, or a folder of .tar files. File names with `train`, `val`
            or `test` define a split; other shards are then not read.

    Raises:
        DataError: a shard cannot be read, or it is not clear whether shards are for training.
        UsageError: an invalid range, or a URL.
    """
    paths = shard_paths(data)
    splits, unread = _splits(paths)
    is_given = len(set(splits.values())) > 1
    root = os.path.commonpath([path.absolute().parent for path in paths])
    names = {path: path.absolute().relative_to(root).as_posix() for path in paths}
    inventory = Inventory(data, [], ShardReader(places := {}), {}, unread=[names[path] for path in unread])
    if Path(data).is_dir():
        num_hidden = sum(is_junk(entry.name) for entry in Path(data).iterdir())
        inventory.skipped += Counter(hidden=num_hidden, beside=num_beside(data))
    images: _Images = []
    for path, split in splits.items():
        shard = _Shard(names[path], split if is_given else "")
        _read_shard(path, shard, inventory)
        shard.add_samples(images, inventory)
        places |= {f"{shard.name}/{key}": place for key, place in shard.images.items()}
    if not is_given:
        images = _inner_split(images, inventory)
    _add_entries(images, inventory)
    inventory.classes = {"": sort_class_names({entry.class_name for entry in inventory.entries})}
    inventory.remarks.append(f"{count(len(inventory.entries), 'image')} in {count(len(splits), 'tar file')}.")
    return inventory


def _inner_split(images: _Images, inventory: Inventory) -> _Images:
    """Return the images with the split of the folders that they are in, such as `photos/train/cat/1.jpg`; the rule of
    a folder. A note names the folders of no side, whose images are left out."""
    base = _base([folders for _, folders in images])
    inner = [folders[base:] for _, folders in images]
    # a `train` that contains images without a label is a class
    pairs = zip(images, inner, strict=True)
    sides = split_folders({folders[0] for (entry, _), folders in pairs if len(folders) > (not entry.class_name)})
    if not sides:
        return images
    if unread := sorted({folders[0] if folders else "" for folders in inner} - sides.keys()):
        train = next(name for name, side in sides.items() if side == "train")
        where = first_few(f"{name}/" if name else "images outside all folders" for name in unread)
        name = printable(inventory.name)
        inventory.remarks.append(f"Not read, because {printable(train)}/ exists in {name}: {where}.")
    return [
        (entry._replace(split=sides[below[0]]), folders)
        for (entry, folders), below in zip(images, inner, strict=True)
        if below and below[0] in sides
    ]


def _add_entries(images: _Images, inventory: Inventory) -> None:
    """Add images with their classes: those of label files, else the folders, as in a folder of class folders."""
    is_labelled = any(entry.class_name for entry, _ in images)  # a folder of labelled images is no class
    nested: dict[str, set[str]] | None = None if is_labelled else defaultdict(set)
    splits = {entry.split for entry, _ in images}
    bases = {split: _base([folders for entry, folders in images if entry.split == split]) for split in splits}
    for entry, folders in images:
        inner = folders[bases[entry.split] :]
        if inner and not is_labelled:
            entry = entry._replace(class_name=inner[0])
            if len(inner) == 1:
                nested = None
            elif nested is not None:
                nested[inner[0]].add(inner[1])
        if entry.class_name:
            inventory.entries.append(entry)
        else:
            text = f"{printable(entry.key)} has no label ({', '.join(f'.{ending}' for ending in LABELS)})"
            text += "." if is_labelled else ", and is in no folder."
            inventory.bad.append(BadFile(entry.key, "no-class", text, entry.split))
    inventory.nested = {name: sorted(folders) for name, folders in sorted((nested or {}).items())}


def _base(paths: list[list[str]]) -> int:
    """Return the number of folders around all others: 1 for `photos/cat/1.jpg`, `photos/dog/1.jpg`.

    Single images next to the further folders do not count.
    """
    depth = 0
    while True:
        inside = [folders[depth:] for folders in paths if len(folders) > depth]
        num_direct = sum(len(folders) == 1 for folders in inside)
        if len({folders[0] for folders in inside}) != 1 or 2 * num_direct >= len(inside):
            return depth
        depth += 1


def _folders(key: str) -> list[str]:
    return [part for part in key.split("/")[:-1] if part != ".."]


def shard_paths(data: str) -> list[Path]:
    """Return the files that `data` means; they may be missing.

    Raises:
        UsageError: an invalid range, or a URL.
    """
    if Path(data).is_dir():
        return sorted(path for path in Path(data).glob("*.tar") if not is_junk(path.name))
    if "://" in data:
        raise UsageError(f"Data must be a local path; got '{printable(data)}'. Download the shards first.")
    return [Path(name) for name in _expanded(data)]


def _expanded(text: str) -> Iterator[str]:
    """Expand `a-{00..11}.tar` to its twelve names."""
    match = _RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match[1], match[2]
    if int(first) > int(last) or int(last) - int(first) > 1_000_000:
        raise UsageError(f"A range of shards must be ascending, with at most a million numbers; got '{match[0]}'.")
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{text[: match.start()]}{number:0{len(first)}}{text[match.end() :]}")


def _splits(paths: list[Path]) -> tuple[dict[Path, str], list[Path]]:
    """Return the shards to read with their split, and those that are not read, because others are for training."""
    splits = {path: split_of(path.name) for path in paths}
    unnamed = [path for path, split in splits.items() if not split]
    if "train" in splits.values():
        return {path: split for path, split in splits.items() if split}, unnamed
    if unnamed and len(unnamed) < len(paths):
        held_out = first_few(path.name for path in paths if path not in unnamed)
        raise DataError(
            f"Next to shards of a validation set ({held_out}), the names of training shards must begin with train; got"
            f" {first_few(path.name for path in unnamed)}. Rename them, or pass one kind alone."
        )
    return splits, []


def _read_shard(path: Path, shard: _Shard, inventory: Inventory) -> None:
    """Read the headers of an archive, and its label files."""
    must = f"A shard must be an uncompressed tar file; '{printable(str(path))}' cannot be read"
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{must} (it is not a file).")
        if (kind := archive_kind(path)) not in ("", "a tar archive"):
            raise DataError(f"{must} (it is {kind}). Unpack it, and pass the folder.")
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as opened:
            archive: Any = opened  # untyped: `members` below is not in its type stubs
            num_bytes = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                # tarfile accepts a negative size, which leads back to an earlier header, and one beyond the end
                if not 0 <= member.size <= num_bytes - member.offset_data and not member.issparse():
                    raise DataError(f"{must} (a file in it must end within its {num_bytes:,} bytes). Copy it again.")
                _add_member(shard, member, file, os.fspath(path), inventory)
                archive.members = []  # else tarfile caches every header
            # tarfile also ends at a header that it cannot read
            file.seek(archive.offset)
            header = file.read(tarfile.BLOCKSIZE)
            if header == b"":
                message = f"{printable(shard.name)} has no end marker: its last images may be missing. Copy it again."
                inventory.bad.append(BadFile(shard.name, "truncated", message, shard.split))
            if any(header):
                raise DataError(f"{must} (its header at byte {archive.offset:,} is damaged). Copy it again.")
            if any(any(piece) for piece in iter(lambda: file.read(_PIECE), b"")):
                raise DataError(
                    f"{must} (it has more content after its end marker, as joined archives have). Unpack it with"
                    " `tar -i -xf`, and pass the folder."
                )
    except DataError:
        raise
    except Exception as error:  # tarfile raises many types for malformed headers: ValueError, OverflowError, ...
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise DataError(f"{must} ({reason}).") from error


def _add_member(shard: _Shard, member: tarfile.TarInfo, file: BinaryIO, path: str, inventory: Inventory) -> None:
    """Add a file of an archive to its images, labels or counts."""
    name = _normal(member.name)
    if member.isdir():
        return
    if any(is_junk(part) for part in name.split("/") if part != ".."):
        inventory.skipped["hidden"] += 1
        return
    place = TarMember(path, member.offset_data, member.size)
    if member.issym():
        shard.links.append(os.path.normpath(f"{name.rpartition('/')[0]}/{member.linkname}").lstrip("/"))
        return
    if member.islnk() and (linked := shard.images.get(_normal(member.linkname))):
        place = linked  # a hard link is the file itself
    elif not member.isreg():
        inventory.skipped["broken-link" if member.islnk() else "special"] += 1
        return
    ending = extension(name)
    if member.issparse():
        problem = BadImage("", "damaged", "it is stored as a sparse file; pack it with tar -cf")
        inventory.bad.append(bad_file(f"{shard.name}/{name}", problem, shard.split))
    elif ending in LABELS:
        label = _label(file, place, ending)
        stem, rank = name[: -len(ending) - 1], LABELS.index(ending)
        if label is None or shard.labels.get(stem, (rank,))[0] < rank:
            inventory.ignored[ending] += 1
        else:
            shard.labels[stem] = (rank, label)
    elif ending in EXTENSIONS or _is_image(file, place):
        inventory.skipped += Counter({"replaced": int(name in shard.images)})
        shard.images[name] = place
    else:
        inventory.ignored[ending] += 1


def _normal(name: str) -> str:
    """Return the name of a file in an archive without `./` and slashes that mean nothing."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _is_image(file: BinaryIO, place: TarMember) -> bool:
    file.seek(place.offset)
    return sniff(file.read(min(place.size, HEAD_BYTES))) is not None


def _label_stem(name: str, labels: dict[str, tuple[int, str]]) -> str:
    """Return the longest part of an image's name, up to a dot, that names a label file; empty if none does."""
    end = len(name)
    while end > name.rfind("/") + 1:
        if name[:end] in labels:
            return name[:end]
        end = name.rfind(".", 0, end)
    return ""


def _label(file: BinaryIO, place: TarMember, ending: str) -> str | None:
    """Read the class from a label file; None if it has none."""
    if place.size > MAX_LABEL_BYTES:
        return None
    file.seek(place.offset)
    text = file.read(place.size).decode("utf-8", "replace").strip()
    if ending != "json":
        return text or None
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return None
    keys = ("label", "class", "cls", "target") if isinstance(metadata, dict) else ()
    value = next((metadata[key] for key in keys if key in metadata), None)
    return None if value is None else str(value)
