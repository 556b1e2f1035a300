"""Index of image files: what is known about each, kept in the cache, so that a file is read again only if it changed.

A file is the same as before if its size and the times of its last change (mtime, ctime) are. Files that changed within
`SETTLED_NS` before they were listed are not kept: a further change could leave their times equal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import time
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import PIL

from weft.cache import CacheTable
from weft.data.bit_depth import Values
from weft.data.colour import NOTES
from weft.data.decode import BadImage, ImageInfo, heif_version
from weft.data.formats import MAX_PIXELS
from weft.files import cache_file
from weft.machine.processor import available_cores
from weft.machine.system import lock_file
from weft.progress import say
from weft.version import __version__

FILE = "files.sqlite3"  # in the cache directory
MAX_CACHED = 4_000_000_000  # bytes of it
SETTLED_NS = 2_000_000_000
SAVE_S = 5.0  # between two savings of what was found
MANY = 2_000  # unknown files, from which processes that start at the same time wait for the first one
CHUNK = 16  # files per task of a thread
AHEAD = 24  # tasks whose results wait at most
BLOCK = 1024  # files whose digests are made at a time
UNKNOWN, OTHER, IMAGE, HEADER, DECODED = range(5)
"""Levels of knowledge about a file: none; by its first bytes it is no image, or an image; its header; its pixels."""

RECORD = np.dtype(
    [
        *(("size", "<i8"), ("mtime", "<i8"), ("ctime", "<i8")),  # bytes, ns, ns
        *(("level", "u1"), ("height", "<i4"), ("width", "<i4")),
        ("notes", "<u2"),  # a bit for each of `NOTES`
        ("digest", "V12"),  # of the content, if it was decoded
    ]
)
STAMP = ["size", "mtime", "ctime"]
_FORM = f"{zlib.crc32(repr(RECORD.descr).encode()):08x}"
CONTEXT = f"{__version__} {PIL.__version__} {heif_version()} {' '.join(NOTES)} {_FORM}"
"""Of a row of another one, nothing is known."""
PASSING = {"missing", "not-a-file", "unreadable", "no-decoder", "out-of-memory", "too-many-pixels"}
"""Reasons of `BadImage` that the bytes of the file do not decide alone."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]


class Found(NamedTuple):
    """Result of a check: its level, properties of the image, the problem that this level found, hash and size of the
    content."""

    level: int
    info: ImageInfo | None = None
    problem: BadImage | None = None
    digest: bytes = b""
    size: int | None = None


class FileIndex:
    """Files in the order of their folders, and what is known about each.

    Args:
        keys: folder and name of each file, one folder after the other.
        counts: number of files by folder, which ends with a slash if it has a name.
        place: name in the cache of what the folders are in.
        stamps: `STAMP` of each file, int64 (n 3); None for images that are no files, about which nothing is kept.
        began: time before the stamps were read, in ns.
        fresh: ignore what is known, and find it again.

    Attributes:
        spans: places of the files of each folder in `keys`.
        records: of `RECORD`, one for each file.
        problems: why a file cannot be used, by its place in `keys`; found at the level of its record, not before.
        values: of images of more than 8 bits per channel, by place.
    """

    def __init__(
        self,
        keys: list[str],
        counts: Mapping[str, int],
        place: str = "",
        stamps: np.ndarray | None = None,
        *,
        began: int = 0,
        fresh: bool = False,
    ) -> None:
        self._began, self._is_fresh, self._place = began, fresh, place
        self.keys, self.records = keys, np.zeros(len(keys), RECORD)
        self.problems: dict[int, BadImage] = {}
        self.values: dict[int, Values] = {}
        ends = itertools.accumulate(counts.values())
        self.spans = {name: slice(end - counts[name], end) for name, end in zip(counts, ends, strict=True)}
        self._is_new = np.zeros(len(keys), bool)
        columns = "folder BLOB PRIMARY KEY, context TEXT, names BLOB, records BLOB, special TEXT, crc INTEGER"
        self._table = CacheTable(FILE, columns, MAX_CACHED) if stamps is not None else None
        if stamps is not None:
            for column, values in zip(STAMP, stamps.T, strict=True):
                self.records[column] = values
        self._load()

    @classmethod
    def of_folders(cls, root: str, folders: dict[str, list[str]], *, name: str = "", fresh: bool = False) -> FileIndex:
        """Return the index of files in folders of `root`.

        Args:
            root: an existing folder.
            folders: names of the files by folder; emptied, since millions of them take much memory.
            name: of a list of some of the files; empty for all files of the folders.
            fresh: as of the class.
        """
        began, keys, counts, stamps = time.time_ns(), list[str](), dict[str, int](), array("q")
        for folder in sorted(folders):
            files, base = sorted(folders.pop(folder)), os.path.join(root, folder)
            for file in files:
                stamps.extend(stamp_of(base + file))
            keys += [folder + file for file in files] if folder else files
            counts[folder] = len(files)
        place = f"{name}\n{os.path.realpath(root)}/"
        return cls(keys, counts, place, np.frombuffer(stamps, np.int64).reshape(-1, 3), began=began, fresh=fresh)

    @classmethod
    def of_list(cls, root: str, keys: Sequence[str], name: str, *, fresh: bool) -> tuple[FileIndex, np.ndarray]:
        """Return the index of a list of files, and the place of each in it."""
        folders = defaultdict[str, list[str]](list)
        for key in keys:
            folders[key[: key.rfind("/") + 1]].append(key[key.rfind("/") + 1 :])
        index = cls.of_folders(root, folders, name=name, fresh=fresh)
        places = dict(zip(index.keys, itertools.count()))
        return index, np.fromiter(map(places.__getitem__, keys), np.int64, len(keys))

    def fill(
        self,
        places: np.ndarray,
        level: int,
        find: Callable[[str], Found],
        *,
        max_pixels: int = MAX_PIXELS,
        progress: Progress | None = None,
    ) -> None:
        """Check those files of which less is known than `level`, in threads.

        Args:
            places: of the files.
            level: what must be known afterwards.
            find: check of the file with a key.
            max_pixels: larger images are checked again.
            progress: called regularly with (number done, total).
        """
        todo = self._unknown(places, level, max_pixels)
        with self._first() if len(todo) > MANY else contextlib.nullcontext():
            if len(todo) > MANY:  # another process may have found it since this one looked
                self._load(todo)
                todo = self._unknown(places, level, max_pixels)
            saved = time.monotonic()
            items = array("q", todo.tobytes())  # a list of Python's numbers would take five times the memory
            results = in_threads(lambda place: find(self.keys[place]), items)
            for done, (place, found) in enumerate(zip(items, results, strict=True), 1):
                self._record(place, found)
                if progress is not None and done % 64 == 0:
                    progress(done, len(todo))
                if time.monotonic() - saved > SAVE_S:
                    self._save()
                    saved = time.monotonic()
            self._save()
        if progress is not None:
            number = len(todo) or len(places)
            progress(number, number)

    def _unknown(self, places: np.ndarray, level: int, max_pixels: int) -> np.ndarray:
        """Return those places of which less is known than `level`."""
        levels = self.records["level"][places]
        is_known = (levels >= level) | (levels == OTHER) | self.is_bad(places, DECODED)
        pixels = self.records["height"][places].astype(np.int64) * self.records["width"][places]
        return places[~is_known | (pixels > max_pixels)]

    def is_bad(self, places: np.ndarray, level: int) -> np.ndarray:
        """Return for each place whether the file cannot be used, by what a check to this level finds."""
        return np.isin(places, np.array(list(self.problems), np.int64)) & (self.records["level"][places] <= level)

    def digests(self, places: np.ndarray, level: int) -> Digests:
        """Return size and hash of the content of files; the hash is only known to `DECODED`."""
        return Digests(self.records["size"][places], self.records["digest"][places] if level == DECODED else None)

    def _record(self, place: int, found: Found) -> None:
        record: Any = self.records[place]
        record["level"], self._is_new[place] = found.level, True
        self.problems.pop(place, None)
        if found.size is not None:
            record["size"], record["digest"] = found.size, np.void(found.digest or bytes(12))
        if found.problem is not None:
            self.problems[place] = found.problem
        if (info := found.info) is not None:
            record["height"], record["width"] = info.size
            record["notes"] = bits_of(info.notes)
            if info.values is not None:
                self.values[place] = info.values

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        """Wait until no other process finds out about files of this root."""
        number = zlib.crc32(self._key("")) % 64
        path, has_waited = cache_file(f"files-{number}.lock"), False
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no locks here: each process finds out for itself
                if path is not None and self._table is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    descriptor = stack.enter_context(open(path, "wb")).fileno()
                    while not lock_file(descriptor):
                        if not has_waited:
                            say("Another process reads these files; this one waits for what it finds.")
                        has_waited = True
                        time.sleep(0.2)
            yield

    def _load(self, places: np.ndarray | None = None) -> None:
        """Take over what the cache knows about files that did not change, or those in the folders of `places`."""
        is_asked = np.ones(len(self.keys), bool)
        if places is not None:
            is_asked[:] = False
            is_asked[places] = True

        def read(table: sqlite3.Connection) -> None:
            query = "SELECT names, records, special, crc FROM rows WHERE folder = ? AND context = ?"
            for folder, span in self.spans.items():
                if not is_asked[span].any():
                    continue
                row = table.execute(query, (self._key(folder), CONTEXT)).fetchone()
                with contextlib.suppress(TypeError, AttributeError):  # a damaged page may give values of other types
                    if row is not None and _crc(*row[:3]) == row[3]:
                        self._take(folder, row[0], np.frombuffer(row[1], RECORD), json.loads(row[2]))

        if self._table is not None and not self._is_fresh:
            self._table.use(read)

    def _take(self, folder: str, names: bytes, old: np.ndarray, special: dict[str, Any]) -> None:
        span, mine = self.spans[folder], self._names(folder)
        records = self.records[span]
        if names == mine:
            places = np.arange(len(old))
        else:
            place_of = {name: place for place, name in enumerate(names.split(b"\0"))}
            places = np.array([place_of.get(name, -1) for name in mine.split(b"\0")])
        is_same = (places >= 0) & np.all([old[column][places] == records[column] for column in STAMP], axis=0)
        records[is_same] = old[places[is_same]]
        now_at = np.full(len(old), -1)
        now_at[places[is_same]] = np.flatnonzero(is_same)
        for place, (problem, values) in special.items():
            if (i := int(now_at[int(place)])) >= 0:
                self.problems |= {} if problem is None else {span.start + i: BadImage("", *problem)}
                self.values |= {} if values is None else {span.start + i: Values(*values)}

    def _save(self) -> None:
        """Write what was found since the last time."""
        if self._table is None or not self._is_new.any():
            return
        rows = []
        for folder, span in self.spans.items():
            if not self._is_new[span].any():
                continue
            records, special = self.records[span].copy(), dict[int, Any]()
            records["level"][records["ctime"] >= self._began - SETTLED_NS] = UNKNOWN
            for i, place in enumerate(range(span.start, span.stop)):
                problem, values = self.problems.get(place), self.values.get(place)
                if problem is not None and problem.reason in PASSING:
                    records["level"][i] = UNKNOWN
                if (problem or values) and records["level"][i] != UNKNOWN:
                    special[i] = None if problem is None else (problem.reason, problem.detail), values
            row = self._names(folder), records.tobytes(), json.dumps(special)
            rows.append((self._key(folder), CONTEXT, *row, _crc(*row)))
        self._table.put(rows)
        self._is_new[:] = False

    def _key(self, folder: str) -> bytes:
        """Return the key of a folder in the table."""
        return (self._place + folder).encode(errors="surrogateescape")

    def _names(self, folder: str) -> bytes:
        """Return the names of the files of a folder, separated by zeros."""
        names = (key[len(folder) :] for key in self.keys[self.spans[folder]])
        return "\0".join(names).encode(errors="surrogateescape")


class Digests:
    """Size and hash of the content of files, each as a text with a tab between them; made when they are needed.

    Args:
        sizes: in bytes, int64 (n).
        hashes: V12 (n); None if they are not known.
    """

    def __init__(self, sizes: np.ndarray, hashes: np.ndarray | None) -> None:
        self.sizes, self.hashes = sizes, hashes

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.sizes), BLOCK):  # Python's objects for all would take much memory
            block = slice(start, start + BLOCK)
            hashes = itertools.repeat(b"") if self.hashes is None else self.hashes[block].tolist()
            for size, content in zip(self.sizes[block].tolist(), hashes, strict=False):
                yield f"{size}\t{content.hex()}"


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], chunk_size: int = CHUNK) -> Iterator[Result]:
    """Yield the results in order, from a thread pool: Pillow releases the GIL while decoding."""
    pool, pending = ThreadPoolExecutor(min(available_cores(), 8)), deque[Future[list[Result]]]()
    try:
        for start in range(0, len(items), chunk_size):
            chunk = items[start : start + chunk_size]
            pending.append(pool.submit(lambda chunk: [function(item) for item in chunk], chunk))
            if len(pending) > AHEAD:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def stamp_of(path: str | Path) -> tuple[int, int, int]:
    """Return `STAMP` of a file; zeros if it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: NUL byte in the name
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def bits_of(notes: Iterable[str]) -> int:
    """Return the bits of some of `NOTES` in a record."""
    return sum(1 << number for number, note in enumerate(NOTES) if note in notes)


def _crc(names: bytes, records: bytes, special: str) -> int:
    return zlib.crc32(special.encode(), zlib.crc32(records, zlib.crc32(names)))
