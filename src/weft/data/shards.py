"""Open tar shards in the WebDataset layout: `0001.jpg` next to `0001.cls`, or images in folders named by class.

One pass over the headers of a shard lists its files, and the list stays in the cache for as long as the shard does not
change. Images are then read at their offset and never unpacked to disk; shards on a server are fetched into a bounded
cache. Memory holds the lists only, and links, devices and paths outside the archive have no effect.
"""

from __future__ import annotations

import itertools
import os
import re
import sqlite3
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.cache import CacheTable
from weft.data.decode import MAX_BYTES, BadImage, ImageInfo, image_header
from weft.data.index import SAVE_S, SETTLED_NS, FileIndex, in_threads, stamp_of
from weft.data.inventory import Inventory
from weft.data.remote import RemoteCache, RemoteFile, is_remote, remote_file
from weft.data.shard_content import LABELS, ShardContent, open_archive
from weft.data.source import BadFile, bad_file, sort_class_names
from weft.data.split_names import split_folders, split_of
from weft.data.tree import is_folder_of, is_junk, nested_folders, num_beside
from weft.errors import DataError, UsageError
from weft.text import count, first_few, printable
from weft.version import __version__

FILE = "shards.sqlite3"  # in the cache directory
MAX_CACHED = 4_000_000_000  # bytes of it
CACHE_BYTES = 50 << 30  # of shards on a server that are kept on disk
START_BYTES = 1 << 16  # of a file in a shard that mostly contain the header of an image
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
ANY_NAME: Any = {"errors": "surrogateescape"}  # of a file


class ShardImage(NamedTuple):
    """An image in a shard: its key, class (empty without label file), split, and folders in the archive."""

    key: str
    label: str
    split: str
    folders: list[str]


class ShardReader:
    """Read files in shards by key.

    Args:
        shards: path, or address on a server, of each shard.
        cache: of shards on a server.

    Attributes:
        numbers: of the files by key.
        places: shard, offset and size in bytes of each file, int64 (n 3).
    """

    def __init__(self, shards: Sequence[str | RemoteFile], cache: RemoteCache) -> None:
        self.shards, self.cache = shards, cache
        self.numbers: dict[str, int] = {}
        self.places = np.zeros((0, 3), np.int64)

    def __call__(self, key: str) -> bytes:
        """Return the bytes of a file."""
        return self._read(key)

    def header(self, key: str, max_pixels: int) -> ImageInfo:
        """Check the header of an image, which is mostly in the first bytes: `image_header`."""
        try:
            return image_header(self._read(key, START_BYTES), max_pixels=max_pixels)
        except BadImage:
            return image_header(self._read(key), max_pixels=max_pixels)

    def blocks(self, keys: Sequence[str]) -> np.ndarray | None:
        """Return the number of the shard that each file is in; None if no shard is on a server."""
        if not any(isinstance(shard, RemoteFile) for shard in self.shards):
            return None
        return self.places[[self.numbers[key] for key in keys], 0]

    def _read(self, key: str, most: int = MAX_BYTES) -> bytes:
        number, offset, size = self.places[self.numbers[key]].tolist()
        if size > MAX_BYTES:
            raise BadImage(printable(key), "too-many-bytes")
        shard, wanted = self.shards[number], min(size, most)
        with open_archive(shard, self.cache) as file:  # for each image: thousands of open shards would exceed the limit
            file.seek(offset)
            data = file.read(wanted)
        if len(data) < wanted:
            raise BadImage(printable(key), "truncated")
        return data


def is_shards(data: str) -> bool:
    """Return whether `data` is a .tar file (or pattern), or a folder with .tar files and without folders."""
    if os.path.isdir(data):
        return is_folder_of(data, ".tar")
    return (data.partition("?")[0] if is_remote(data) else data).endswith(".tar")


def open_shards(data: str, *, cache_bytes: int = CACHE_BYTES, fresh: bool = False) -> Inventory:
    """List the images in tar shards.

    The class of an image is the text of its label file, whose name is that of the image up to a dot. Without any label
    file, it is the first folder below those around all images. Folders `train` and `val` in the archives are a split,
    unless the names of the shards are.

    Args:
        data: a file, a range such as `train-{000..009}.tar`, a list such as `{a,b}.tar`, a folder of .tar files, or
            URLs. File names with `train`, `val` or `test` define a split; other shards are then not read.
        cache_bytes: bytes of shards on a server that are kept on disk.
        fresh: read all shards, also those whose lists are in the cache.

    Raises:
        DataError: a shard cannot be read, or it is not clear whether shards are for training.
        UsageError: an invalid range, or a URL that cannot be read.
    """
    paths = shard_paths(data)
    splits, unread = _splits(paths)
    is_given = len(set(splits.values())) > 1
    folder = os.path.commonpath([os.path.dirname(_absolute(path)) for path in paths])
    names = {path: os.path.relpath(_absolute(path), folder) for path in paths}
    if len(set(names.values())) < len(names):
        twice = next(name for name, number in Counter(names.values()).items() if number > 1)
        raise UsageError(f"Every shard must be named once; got '{printable(twice)}' twice. Leave one out.")
    cache, began = RemoteCache(cache_bytes), time.time_ns()
    shards = list(in_threads(lambda path: remote_file(path) if is_remote(path) else path, list(splits), chunk_size=1))
    reader = ShardReader(shards, cache)
    inventory = Inventory(data, reader, {}, unread=[names[path] for path in unread])
    if os.path.isdir(data):
        num_hidden = sum(is_junk(entry.name) for entry in Path(data).iterdir())
        inventory.skipped += Counter(hidden=num_hidden, beside=num_beside(data))
    images, counts, places, stamps = list[ShardImage](), dict[str, int](), array("q"), array("q")
    listed = _listed(shards, cache, fresh=fresh)
    for number, ((path, side), (shard, stamp)) in enumerate(zip(splits.items(), listed, strict=True)):
        name, split = names[path], side if is_given else ""
        inventory.ignored += shard.ignored
        inventory.skipped += shard.skipped
        for file, reason, detail in shard.bad:
            if file:
                inventory.bad.append(bad_file(f"{name}/{file}", BadImage("", reason, detail), split))
            else:  # its images are used
                inventory.bad.append(BadFile(name, reason, f"{printable(name)} {detail}", split))
        counts[f"{name}/"] = len(shard.images)
        for file, (offset, size, label) in shard.images.items():
            folders = [part for part in file.split("/")[:-1] if part != ".."]
            images.append(ShardImage(f"{name}/{file}", label, split, folders))
            places.extend((number, offset, size))
            stamps.extend((size, *stamp[1:]))
    keys = [image.key for image in images]
    reader.numbers = dict(zip(keys, itertools.count()))
    reader.places, stamps_of = (np.frombuffer(column, np.int64).reshape(-1, 3) for column in (places, stamps))
    if not is_given:
        images = _inner_split(images, inventory)
    _add_images(images, inventory)
    inventory.index = FileIndex(keys, counts, f"{folder}/", stamps_of, began=began, fresh=fresh)
    inventory.places = np.array([reader.numbers[key] for key in inventory.keys], np.int64)
    inventory.classes = {"": sort_class_names(set(inventory.class_names))}
    inventory.remarks.append(f"{count(len(inventory.keys), 'image')} in {count(len(splits), 'tar file')}.")
    return inventory


def _listed(
    shards: Sequence[str | RemoteFile], cache: RemoteCache, *, fresh: bool
) -> Iterator[tuple[ShardContent, tuple[int, int, int]]]:
    """Yield the content of every shard, and its stamp as that of a file; from the cache as far as it is known there."""
    table = CacheTable(FILE, "shard BLOB PRIMARY KEY, stamp TEXT, content BLOB", MAX_CACHED)
    latest, saved = time.time_ns() - SETTLED_NS, time.monotonic()
    stamps = [(1, one.number, 1) if isinstance(one, RemoteFile) else stamp_of(one) for one in shards]
    keys = [(one.url if isinstance(one, RemoteFile) else os.path.realpath(one)).encode(**ANY_NAME) for one in shards]
    known, rows = dict[int, ShardContent](), list[tuple[bytes, str, bytes]]()

    def load(opened: sqlite3.Connection) -> None:
        query = "SELECT content FROM rows WHERE shard = ? AND stamp = ?"
        for number, (key, stamp) in enumerate(zip(keys, stamps, strict=True)):
            row = opened.execute(query, (key, f"{__version__} {stamp}")).fetchone()
            if row is not None and (shard := ShardContent.unpacked(row[0])) is not None:
                known[number] = shard

    if not fresh:
        table.use(load)
    unknown = [shard for number, shard in enumerate(shards) if number not in known]
    new = in_threads(lambda shard: ShardContent.read(shard, cache), unknown, chunk_size=1)
    for number, (key, stamp) in enumerate(zip(keys, stamps, strict=True)):
        if (shard := known.pop(number, None)) is None:
            shard = next(new)
            if stamp[2] < latest:
                rows.append((key, f"{__version__} {stamp}", shard.packed()))
            if time.monotonic() - saved > SAVE_S:
                table.put(rows)
                rows, saved = [], time.monotonic()
        yield shard, stamp
    table.put(rows)


def _inner_split(images: list[ShardImage], inventory: Inventory) -> list[ShardImage]:
    """Return the images with the split of their folders, such as `photos/train/cat/1.jpg`; a note names the others."""
    base = _base([image.folders for image in images])
    tops = ["".join(image.folders[base : base + 1]) for image in images]
    # a `train` that contains images without a label is a class
    of_sides = (image.folders[base] for image in images if len(image.folders) > base + (not image.label))
    sides = split_folders(set(of_sides))
    if not sides:
        return images
    if unread := sorted(set(tops) - sides.keys()):
        train = next(name for name, side in sides.items() if side == "train")
        where = first_few(f"{name}/" if name else "images outside all folders" for name in unread)
        name = printable(inventory.name)
        inventory.remarks.append(f"Not read, because {printable(train)}/ exists in {name}: {where}.")
    pairs = zip(images, tops, strict=True)
    return [image._replace(split=sides[top]) for image, top in pairs if top in sides]


def _add_images(images: list[ShardImage], inventory: Inventory) -> None:
    """Add images with their classes: those of label files, else the folders, as in a folder of class folders."""
    is_labelled = any(image.label for image in images)  # a folder of labelled images is no class
    by_split: dict[str, list[list[str]]] = defaultdict(list)
    for image in images:
        by_split[image.split].append(image.folders)
    bases = {split: _base(paths) for split, paths in by_split.items()}
    where = ", ".join(f".{ending}" for ending in LABELS) + ("" if is_labelled else ", and no folder")
    for key, label, split, folders in images:
        label = label or "".join(folders[bases[split] :][:1] if not is_labelled else ())
        if label:
            inventory.add(key, label, split)
        else:
            inventory.bad.append(bad_file(key, BadImage("", "no-class", f"no {where}"), split))
    if not is_labelled:
        inventory.nested = nested_folders(folders[bases[split] :] for _, _, split, folders in images)


def _base(paths: list[list[str]]) -> int:
    """Return the number of folders around all others, but for single images: 1 for `photos/cat/1.jpg`."""
    depth = 0
    while True:
        inside = [folders[depth:] for folders in paths if len(folders) > depth]
        num_direct = sum(len(folders) == 1 for folders in inside)
        if len({folders[0] for folders in inside}) != 1 or 2 * num_direct >= len(inside):
            return depth
        depth += 1


def shard_paths(data: str) -> list[str]:
    """Return the files that `data` means, or their URLs; they may be missing.

    Raises:
        UsageError: an invalid range.
    """
    if os.path.isdir(data):
        names = (name for name in os.listdir(data) if name.endswith(".tar") and not is_junk(name))
        return [os.path.join(data, name) for name in sorted(names)]
    return list(_expanded(data.removeprefix("file://")))


def _absolute(path: str) -> str:
    """Return an absolute path; of a URL, one that begins with it."""
    return f"/{path}" if is_remote(path) else os.path.abspath(path)


def _expanded(text: str) -> Iterator[str]:
    """Expand `a-{00..11}.tar` to its twelve names, and `{a,b}.tar` to its two; also inside each other."""
    start, depth, commas = text.find("{"), 0, list[int]()
    for place in range(start, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        commas += [place] if text[place] == "," and depth == 1 else []
        if depth == 0:
            break
    else:
        yield text  # no braces, or not closed
        return
    ends = [start, *commas, place]
    options = [text[one + 1 : other] for one, other in itertools.pairwise(ends)]
    expanded = _range(options[0]) if not commas else itertools.chain.from_iterable(map(_expanded, options))
    for option, rest in itertools.product(expanded, list(_expanded(text[place + 1 :]))):
        yield text[:start] + option + rest


def _range(text: str) -> Iterator[str]:
    """Return the numbers of `000..011`; of another text, that in braces."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return iter([f"{{{text}}}"])
    first, last = match[1], match[2]
    if int(first) > int(last) or int(last) - int(first) > 1_000_000:
        raise UsageError(f"A range of shards must be ascending, with at most a million numbers; got '{{{text}}}'.")
    return (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _splits(paths: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the shards to read with their split, and those that are not read, because others are for training."""
    splits = {path: split_of(os.path.basename(path)) for path in paths}
    unnamed = [path for path, split in splits.items() if not split]
    if "train" in splits.values():
        return {path: split for path, split in splits.items() if split}, unnamed
    if unnamed and len(unnamed) < len(paths):
        held_out = first_few(os.path.basename(path) for path in paths if path not in unnamed)
        raise DataError(
            f"Next to shards of a validation set ({held_out}), the names of training shards must begin with train; got"
            f" {first_few(os.path.basename(path) for path in unnamed)}. Rename them, or pass one kind alone."
        )
    return splits, []
