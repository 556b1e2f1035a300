"""Safe directory walk: list each regular file once, skip devices and pipes, never leave the root.

By default links to folders outside the root are not followed: one link to `/` would list the whole machine. Links to
files are followed wherever they point (hub caches and deduplicated stores consist of them), unless the file is in the
tree already. Hard links count as files.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

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


def extension(name: str) -> str:
    """Return the file extension without its dot, in lower case; empty if there is none."""
    return os.path.splitext(name)[1][1:].lower()


def is_junk(name: str) -> bool:
    """Return whether a name is hidden or belongs to the operating system."""
    return name.startswith(".") or name in JUNK


def names_in(folder: str | Path) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the folders in a folder, sorted; none of one that cannot be read."""
    files, folders = list[str](), list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_junk(entry.name):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError:  # reported when the folder is opened
        return [], []
    return sorted(files), sorted(folders)


def is_folder_of(path: str | Path, suffix: str) -> bool:
    """Return whether a path is a folder that has files with an extension, and no folders."""
    files, folders = names_in(path)
    return any(name.endswith(suffix) for name in files) and not folders


def num_beside(folder: str | Path) -> int:
    """Return the number of files directly in a folder that are images by name."""
    return sum(extension(name) in EXTENSIONS for name in names_in(folder)[0])


def nested_folders(paths: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    """Return the folders in each class, from the folders above images; none if one is directly in a class."""
    nested: dict[str, set[str]] = defaultdict(set)
    for folders in paths:
        if len(folders) == 1:
            return {}
        if folders:
            nested[folders[0]].add(folders[1])
    return {name: sorted(inside) for name, inside in sorted(nested.items())}


def walk(
    root: str, *, only: Collection[str] | None = None, follow_links: bool = False
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, folder, names) of the entries of a directory tree. Only folders are opened.

    A folder is relative to the root, and ends with `/`; that of the root is empty. The kind is `file` (regular files,
    or links to those outside the tree), `folder` (also links that are followed), a key of `SKIPPED`, `not-utf-8` for
    files and folders with such names, or for a folder that cannot be read the reason of the operating system after
    `unreadable: `.

    Args:
        root: an existing folder, or a link to one.
        only: top-level names to include; all by default.
        follow_links: also enter folders outside the root through links.
    """
    inside = os.path.join(os.path.realpath(root), "")
    seen = _Seen()  # every folder entered and file listed
    folders, links, later = [""], list[str](), list[str]()
    while folders or links or later:
        if folders:
            folder = folders.pop()
            try:
                status = os.stat(os.path.join(root, folder))
                with os.scandir(os.path.join(root, folder)) as scanned:
                    entries = list(scanned)
            except OSError as err:
                yield f"unreadable: {err.strerror}", *_parts(folder)
                continue
            if not seen.add(status):
                continue
            if folder:
                yield "folder", *_parts(folder)
            elif only is not None:
                entries = [entry for entry in entries if entry.name in only]
            found, inodes = defaultdict[str, list[str]](list), seen.files[status.st_dev]
            files = found["file"]
            for entry in entries:
                name = entry.name
                if is_junk(name):
                    found["hidden"].append(name)
                elif not (name.isascii() or _is_utf8(name)):
                    found["not-utf-8"].append(name)
                elif entry.is_file(follow_symlinks=False):
                    inodes.append(entry.inode())
                    files.append(name)
                elif entry.is_symlink():
                    later.append(folder + name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(f"{folder}{name}/")
                else:
                    found["special"].append(name)
            yield from ((kind, folder, names) for kind, names in found.items())
        elif links:  # after all folders, so that a file is listed by its real name
            key = links.pop()
            try:
                status = os.stat(os.path.join(root, key))
            except OSError:
                yield "broken-link", *_parts(key)
                continue
            is_inside = os.path.realpath(os.path.join(root, key)).startswith(inside)
            if status in seen:
                yield "link-to-listed", *_parts(key)
            elif stat.S_ISREG(status.st_mode):
                seen.add(status)
                yield "file", *_parts(key)
            elif not stat.S_ISDIR(status.st_mode):
                yield "special", *_parts(key)
            elif is_inside or follow_links:
                folders.append(f"{key}/")
            else:
                yield "link-out", *_parts(key)
        else:
            links, later = sorted(later, reverse=True), []


class _Seen:
    """Files and folders by device and inode. A set of all files is only made if a link needs it: it is large."""

    def __init__(self) -> None:
        self.files: defaultdict[int, array[int]] = defaultdict(partial(array, "Q"))
        self.entries = set[tuple[int, int]]()

    def __contains__(self, status: os.stat_result) -> bool:
        for device, inodes in self.files.items():
            self.entries.update((device, inode) for inode in inodes)
        self.files.clear()
        return (status.st_dev, status.st_ino) in self.entries

    def add(self, status: os.stat_result) -> bool:
        """Add a folder or a file; return whether it is new."""
        before = len(self.entries)
        self.entries.add((status.st_dev, status.st_ino))
        return len(self.entries) > before


def _parts(key: str) -> tuple[str, list[str]]:
    """Return the folder that an entry is in, with `/` at its end, and its name."""
    folder, slash, name = key.rstrip("/").rpartition("/")
    return folder + slash, [name]


def _is_utf8(name: str) -> bool:
    """Return whether a name is UTF-8; in others, Python keeps surrogates for the bytes."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one; False for a link that leads in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False
