"""Safe directory walk: list each regular file once, skip devices and pipes, never leave the root.

By default links to folders outside the root are not followed: one link to `/` would list the whole machine. Links to
files are followed wherever they point (hub caches and deduplicated stores consist of them), unless the file is in the
tree already. Hard links count as files.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from weft.data.images.decode import BadImage
from weft.data.index.source import BadFile
from weft.text import printable

JUNK = {"__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "$RECYCLE.BIN", "lost+found"}
EXTENSIONS = {  # format by file name; the content decides
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "png": "PNG", "apng": "PNG", "webp": "WEBP",
    "bmp": "BMP", "dib": "BMP", "tif": "TIFF", "tiff": "TIFF", "gif": "GIF",
    "avif": "AVIF", "heic": "HEIF", "heif": "HEIF", "hif": "HEIF",
}  # fmt: skip
SKIPPED = {  # reasons for skipped entries
    "hidden": "hidden, or a system file (.DS_Store, __MACOSX, Thumbs.db)",
    "special": "a pipe, socket or device",
    "broken-link": "a broken link",
    "link-to-listed": "a link to a file or folder that is listed already",
    "link-out": "a link to a folder outside, not followed without --follow-links",
    "replaced": "a file in a tar that a later one of the same name replaces",
    "beside": "an image next to the folders of a split, or next to shards or Parquet files",
    "same-sample": "a further image with the same label file; the one with the shortest ending is read",
}


@dataclass
class Tree:
    """Content of a directory tree. Paths are relative to the root, with `/`; surrogates for bytes that are not UTF-8.

    Attributes:
        files: regular files, and links to regular files outside the tree.
        folders: folders and followed links to folders.
        bad: entries that are images by name, or folders, and cannot be read.
        skipped: number of skipped entries by key of `SKIPPED`.
        links_out: links to folders outside the root that were not followed.
    """

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    links_out: list[str] = field(default_factory=list)


def extension(name: str) -> str:
    """Return the file extension without its dot, in lower case; empty if there is none."""
    return os.path.splitext(name)[1][1:].lower()


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one; False for a link that leads in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_junk(name: str) -> bool:
    """Return whether a name is hidden or belongs to the operating system."""
    return name.startswith(".") or name in JUNK


def num_beside(folder: str) -> int:
    """Return the number of files directly in a folder that are images by name."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if extension(entry.name) in EXTENSIONS and not is_folder(entry)]
    except OSError:  # reported when the folder is opened
        return 0
    return sum(not is_junk(name) for name in names)


def walk(root: str, *, only: Collection[str] | None = None, follow_links: bool = False) -> Tree:
    """List a directory tree. Only folders are opened.

    Args:
        root: an existing folder, or a link to one.
        only: top-level names to include; all by default.
        follow_links: also enter folders outside the root through links.
    """
    return _Walk(root, only, follow_links).run()


class _Walk:
    def __init__(self, root: str, only: Collection[str] | None, follow_links: bool):
        self.root, self.real_root = root, os.path.realpath(root)
        self.only, self.follow_links = only, follow_links
        self.tree = Tree()
        self.seen: set[tuple[int, int]] = set()  # (device, inode) of every folder entered and file listed
        self.links: list[str] = []

    def run(self) -> Tree:
        self.enter("")
        while self.links:  # links last, so that a file is listed by its real name
            links, self.links = sorted(self.links), []
            for key in links:
                self.follow(key)
        self.tree.files.sort()
        self.tree.folders.sort()
        return self.tree

    def enter(self, key: str) -> None:
        """List the folder `key` recursively."""
        waiting = [key]
        while waiting:
            key = waiting.pop()
            try:
                status = os.stat(self.path(key))
                with os.scandir(self.path(key)) as entries:
                    inside = list(entries)
            except OSError as err:
                self.refuse(key, "unreadable", err.strerror)
                continue
            if (status.st_dev, status.st_ino) in self.seen:
                continue
            self.seen.add((status.st_dev, status.st_ino))
            if key:
                self.tree.folders.append(key)
            if not key and self.only is not None:
                inside = [entry for entry in inside if entry.name in self.only]
                self.tree.skipped += Counter(beside=num_beside(self.root))  # without zeros
            inner = [self.note(f"{key}/{entry.name}" if key else entry.name, entry, status.st_dev) for entry in inside]
            waiting += [folder for folder in inner if folder]

    def note(self, key: str, entry: os.DirEntry[str], device: int) -> str:
        """Record an entry; return its key if it is a folder to enter, else an empty string."""
        if is_junk(entry.name):
            self.tree.skipped["hidden"] += 1
        elif entry.is_symlink():
            self.links.append(key)
        elif entry.is_dir(follow_symlinks=False):
            return key
        elif entry.is_file(follow_symlinks=False):
            self.seen.add((device, entry.inode()))
            self.tree.files.append(key)
        else:
            self.pass_over(key, "special", "not-a-file")
        return ""

    def follow(self, key: str) -> None:
        try:
            status = os.stat(self.path(key))
        except OSError:
            self.pass_over(key, "broken-link", "missing")
            return
        identity = status.st_dev, status.st_ino
        is_inside = os.path.realpath(self.path(key)).startswith(os.path.join(self.real_root, ""))
        if identity in self.seen:
            self.tree.skipped["link-to-listed"] += 1
        elif stat.S_ISREG(status.st_mode):
            self.seen.add(identity)
            self.tree.files.append(key)
        elif not stat.S_ISDIR(status.st_mode):
            self.pass_over(key, "special", "not-a-file")
        elif is_inside or self.follow_links:
            self.enter(key)
        else:
            self.tree.skipped["link-out"] += 1
            self.tree.links_out.append(key)

    def pass_over(self, key: str, why: str, reason: str) -> None:
        """Record a bad file if its name is an image's, else count it as skipped."""
        if extension(key) in EXTENSIONS:
            self.refuse(key, reason)
        else:
            self.tree.skipped[why] += 1

    def refuse(self, key: str, reason: str, detail: str | None = None) -> None:
        self.tree.bad.append(BadFile(key, reason, str(BadImage(printable(key), reason, detail or ""))))

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)
