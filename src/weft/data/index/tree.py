"""A walk through a stranger's tree: every regular file once, nothing opened that could hang, no way out of the root.

Links to folders that leave the root are not followed unless asked: one link to `/` would be the whole machine. Links
to files are, wherever they point (hub caches and deduplicated stores are made of them), unless the file is in the
tree already. Hard links cannot be told from files, and count as files.
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
EXTENSIONS = {  # what a name promises; the content decides
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "png": "PNG", "apng": "PNG", "webp": "WEBP",
    "bmp": "BMP", "dib": "BMP", "tif": "TIFF", "tiff": "TIFF", "gif": "GIF",
}  # fmt: skip
SKIPPED = {  # why something in the tree was passed over
    "hidden": "hidden, or left by a system (.DS_Store, __MACOSX, Thumbs.db)",
    "special": "a pipe, socket or device",
    "broken-link": "a link that points nowhere",
    "link-to-listed": "a link to what is in the tree already",
    "link-out": "a link to a folder outside, not followed (follow_links follows it)",
}


@dataclass
class Tree:
    """What lies below a root. Paths are relative to it, with `/`, as the system gives them (surrogates for odd bytes).

    Attributes:
        files: regular files, and links to regular files that are not in the tree themselves.
        folders: folders and followed links to folders.
        bad: what promises to be an image by its name, or should be a folder, and cannot be looked at.
        skipped: how many entries were passed over, by a key of `SKIPPED`.
        links_out: links to folders outside the root that were not followed.
    """

    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    links_out: list[str] = field(default_factory=list)


def extension(name: str) -> str:
    """The last suffix without its dot, in lower case; empty where there is none."""
    return os.path.splitext(name)[1][1:].lower()


def is_junk(name: str) -> bool:
    """Whether nobody means this name to be data."""
    return name.startswith(".") or name in JUNK


def walk(root: str, *, only: Collection[str] | None = None, follow_links: bool = False) -> Tree:
    """Lists a tree. Only folders are opened.

    Args:
        root: an existing folder; it may be a link itself.
        only: names directly under the root to look at; all by default.
        follow_links: also enter folders outside the root that links lead to.
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
        while self.links:  # after all that is really here, so that the real name of a thing wins over its links
            links, self.links = sorted(self.links), []
            for key in links:
                self.follow(key)
        self.tree.files.sort()
        self.tree.folders.sort()
        return self.tree

    def enter(self, key: str) -> None:
        """Lists the folder `key` and all below it."""
        waiting = [key]
        while waiting:
            key = waiting.pop()
            try:
                status = os.stat(self.path(key))
                with os.scandir(self.path(key)) as entries:
                    found = list(entries)
            except OSError as err:
                self.refuse(key, "unreadable", err.strerror)
                continue
            if (status.st_dev, status.st_ino) in self.seen:
                continue
            self.seen.add((status.st_dev, status.st_ino))
            if key:
                self.tree.folders.append(key)
            if not key and self.only is not None:
                found = [entry for entry in found if entry.name in self.only]
            inner = [self.note(f"{key}/{entry.name}" if key else entry.name, entry, status.st_dev) for entry in found]
            waiting += [folder for folder in inner if folder]

    def note(self, key: str, entry: os.DirEntry[str], device: int) -> str:
        """Files an entry away; gives its key back if it is a folder to enter."""
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
        """A bad file if its name promises an image, else only counted."""
        if extension(key) in EXTENSIONS:
            self.refuse(key, reason)
        else:
            self.tree.skipped[why] += 1

    def refuse(self, key: str, reason: str, detail: str | None = None) -> None:
        self.tree.bad.append(BadFile(key, reason, str(BadImage(printable(key), reason, detail or ""))))

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)
