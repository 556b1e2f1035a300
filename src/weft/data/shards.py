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
from pathlib import Path
from typing import Any, BinaryIO

from weft.data.decode import MAX_BYTES, BadImage
from weft.data.formats import HEAD_BYTES, archive_kind, sniff
from weft.data.inventory import Inventory
from weft.data.source import BadFile, bad_file, sort_class_names
from weft.data.split_names import split_folders, split_of
from weft.data.tree import EXTENSIONS, extension, is_folder_of, is_junk, nested_folders, num_beside
from weft.errors import DataError, UsageError
from weft.text import count, first_few, printable, reason_of

LABELS = ("cls", "json", "txt")  # where a sample has several, the first of these decides
MAX_LABEL_BYTES = 1 << 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PIECE = 1 << 20  # bytes of one read
_Place = tuple[str, int, int]  # of a file in an archive: path of the archive, offset and size in bytes
_Image = tuple[str, str, str, list[str]]  # key, class (empty without label file), split, folders in the archive


class ShardReader:
    """Read files in shards by key."""

    def __init__(self, places: dict[str, _Place]) -> None:
        self.places = places

    def __call__(self, key: str) -> bytes:
        path, offset, size = self.places[key]
        if size > MAX_BYTES:
            raise BadImage(printable(key), "too-many-bytes")
        # Opened for each image: thousands of open shards would exceed the limit of the system.
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) < size:
            raise BadImage(printable(key), "truncated")
        return data


def is_shards(data: str) -> bool:
    """Return whether `data` is a .tar file (or pattern), or a folder with .tar files and without folders."""
    return data.endswith(".tar") or is_folder_of(data, ".tar")


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
    inventory = Inventory(data, ShardReader(places := {}), {}, unread=[names[path] for path in unread])
    if Path(data).is_dir():
        num_hidden = sum(is_junk(entry.name) for entry in Path(data).iterdir())
        inventory.skipped += Counter(hidden=num_hidden, beside=num_beside(data))
    images: list[_Image] = []
    for path, split in splits.items():
        shard = _Shard(path, names[path], split if is_given else "", inventory)
        images += shard.samples()
        places |= {f"{shard.name}/{key}": place for key, place in shard.images.items()}
    if not is_given:
        images = _inner_split(images, inventory)
    _add_images(images, inventory)
    inventory.classes = {"": sort_class_names(set(inventory.class_names))}
    inventory.remarks.append(f"{count(len(inventory.keys), 'image')} in {count(len(splits), 'tar file')}.")
    return inventory


def _inner_split(images: list[_Image], inventory: Inventory) -> list[_Image]:
    """Return the images with the split of the folders that they are in, such as `photos/train/cat/1.jpg`; the rule of
    a folder. A note names the folders of no side, whose images are left out."""
    base = _base([folders for *_, folders in images])
    tops = ["".join(folders[base : base + 1]) for *_, folders in images]
    # a `train` that contains images without a label is a class
    of_sides = (image[3][base] for image in images if len(image[3]) > base + (not image[1]))
    sides = split_folders(set(of_sides))
    if not sides:
        return images
    if unread := sorted(set(tops) - sides.keys()):
        train = next(name for name, side in sides.items() if side == "train")
        where = first_few(f"{name}/" if name else "images outside all folders" for name in unread)
        name = printable(inventory.name)
        inventory.remarks.append(f"Not read, because {printable(train)}/ exists in {name}: {where}.")
    pairs = zip(images, tops, strict=True)
    return [(key, label, sides[top], folders) for (key, label, _, folders), top in pairs if top in sides]


def _add_images(images: list[_Image], inventory: Inventory) -> None:
    """Add images with their classes: those of label files, else the folders, as in a folder of class folders."""
    is_labelled = any(label for _, label, *_ in images)  # a folder of labelled images is no class
    by_split: dict[str, list[list[str]]] = defaultdict(list)
    for _, _, split, folders in images:
        by_split[split].append(folders)
    bases = {split: _base(paths) for split, paths in by_split.items()}
    for key, label, split, folders in images:
        label = label or "".join(folders[bases[split] :][:1] if not is_labelled else ())
        if label:
            inventory.add(key, label, split)
            continue
        text = f"{printable(key)} has no label ({', '.join(f'.{ending}' for ending in LABELS)})"
        text += "." if is_labelled else ", and is in no folder."
        inventory.bad.append(BadFile(key, "no-class", text, split))
    if not is_labelled:
        inventory.nested = nested_folders(folders[bases[split] :] for _, _, split, folders in images)


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


class _Shard:
    """Content of one archive: its images by name, its label files by name without extension, and its links."""

    def __init__(self, path: Path, name: str, split: str, inventory: Inventory) -> None:
        self.path, self.name, self.split, self.inventory = path, name, split, inventory
        self.images: dict[str, _Place] = {}
        self.labels: dict[str, tuple[int, str]] = {}  # the place of the extension in `LABELS`, and the class
        self.links: list[str] = []  # their targets
        self._read()

    def samples(self) -> list[_Image]:
        """Return the images with their label files; of several with one label file the first with the shortest ending,
        and add the other files to the counts."""
        stems = {name: self._stem(name) for name in self.images}
        chosen: dict[str, str] = {}
        for name in sorted(stems, key=lambda name: name.count(".")):
            chosen.setdefault(stems[name] or name, name)
        unused = self.labels.keys() - set(stems.values())
        self.inventory.ignored.update(LABELS[self.labels[stem][0]] for stem in unused)
        self.inventory.skipped.update("link-to-listed" if to in self.images else "broken-link" for to in self.links)
        self.inventory.skipped += Counter({"same-sample": len(stems) - len(chosen)})  # without zeros
        return [
            (
                f"{self.name}/{name}",
                self.labels[stem][1] if stem else "",
                self.split,
                [part for part in name.split("/")[:-1] if part != ".."],
            )
            for name, stem in stems.items()
            if chosen[stem or name] == name
        ]

    def _read(self) -> None:
        """Read the headers of the archive, and its label files."""
        must = f"A shard must be an uncompressed tar file; '{printable(str(self.path))}' cannot be read"
        try:
            if self.path.exists() and not self.path.is_file():
                raise DataError(f"{must} (it is not a file).")
            if (kind := archive_kind(self.path)) not in ("", "a tar archive"):
                raise DataError(f"{must} (it is {kind}). Unpack it, and pass the folder.")
            with self.path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as opened:
                archive: Any = opened  # untyped: `members` below is not in its type stubs
                num_bytes = os.fstat(file.fileno()).st_size
                while (member := archive.next()) is not None:
                    # tarfile accepts a negative size, which leads back to an earlier header, and one beyond the end
                    if not 0 <= member.size <= num_bytes - member.offset_data and not member.issparse():
                        raise DataError(
                            f"{must} (a file in it must end within its {num_bytes:,} bytes). Copy it again."
                        )
                    self._add(member, file)
                    archive.members = []  # else tarfile caches every header
                # tarfile also ends at a header that it cannot read
                file.seek(archive.offset)
                header = file.read(tarfile.BLOCKSIZE)
                if header == b"":
                    message = (
                        f"{printable(self.name)} has no end marker: its last images may be missing. Copy it again."
                    )
                    self.inventory.bad.append(BadFile(self.name, "truncated", message, self.split))
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
            raise DataError(f"{must} ({getattr(error, 'strerror', None) or reason_of(error)}).") from error

    def _add(self, member: tarfile.TarInfo, file: BinaryIO) -> None:
        """Add a file of the archive to the images, labels or counts."""
        name, skipped = _normal(member.name), self.inventory.skipped
        place = os.fspath(self.path), member.offset_data, member.size
        ending = extension(name)
        if member.isdir():
            return
        if any(is_junk(part) for part in name.split("/") if part != ".."):
            skipped["hidden"] += 1
        elif member.issym():
            self.links.append(os.path.normpath(f"{name.rpartition('/')[0]}/{member.linkname}").lstrip("/"))
        elif member.islnk() and not (place := self.images.get(_normal(member.linkname))):
            skipped["broken-link"] += 1  # else a hard link is the file itself
        elif not (member.isreg() or member.islnk()):
            skipped["special"] += 1
        elif member.issparse():
            problem = BadImage("", "damaged", "it is stored as a sparse file; pack it with tar -cf")
            self.inventory.bad.append(bad_file(f"{self.name}/{name}", problem, self.split))
        elif ending in LABELS:
            stem, rank = name[: -len(ending) - 1], LABELS.index(ending)
            label = _label(_start(file, place, MAX_LABEL_BYTES + 1), ending)
            if label is None or self.labels.get(stem, (rank,))[0] < rank:
                self.inventory.ignored[ending] += 1
            else:
                self.labels[stem] = (rank, label)
        elif ending in EXTENSIONS or sniff(_start(file, place, HEAD_BYTES)) is not None:
            skipped.update(["replaced"] if name in self.images else [])
            self.images[name] = place
        else:
            self.inventory.ignored[ending] += 1

    def _stem(self, name: str) -> str:
        """Return the longest part of an image's name, up to a dot, that names a label file; empty if none does."""
        end = len(name)
        while end > name.rfind("/") + 1:
            if name[:end] in self.labels:
                return name[:end]
            end = name.rfind(".", 0, end)
        return ""


def _normal(name: str) -> str:
    """Return the name of a file in an archive without `./` and slashes that mean nothing."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _start(file: BinaryIO, place: _Place, most: int) -> bytes:
    """Return the first bytes of a file in an archive, at most a number."""
    file.seek(place[1])
    return file.read(min(place[2], most))


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
