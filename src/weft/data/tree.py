"""Safe directory walk: list each regular file once, skip devices and pipes, never leave the root.

By default links to folders outside the root are not followed: one link to `/` would list the whole machine. Links to
files are followed wherever they point (hub caches and deduplicated stores consist of them), unless the file is in the
tree already. Hard links count as files.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    """Return the folders in each class, from the folders above each image; none if one is directly in a class."""
    nested: dict[str, set[str]] = defaultdict(set)
    for folders in paths:
        if len(folders) == 1:
            return {}
        if folders:
            nested[folders[0]].add(folders[1])
    return {name: sorted(inside) for name, inside in sorted(nested.items())}


def walk(root: str, *, only: Collection[str] | None = None, follow_links: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of the entries of a directory tree. Only folders are opened.

    A path is relative to the root, with `/`. The kind is `file` (a regular file, or a link to one outside the tree),
    `folder` (also a link that is followed), a key of `SKIPPED`, `not-utf-8` for a file or folder with such a name, or
    for a folder that cannot be read the reason of the operating system after `unreadable: `.

    Args:
        root: an existing folder, or a link to one.
        only: top-level names to include; all by default.
        follow_links: also enter folders outside the root through links.
    """
    inside = os.path.join(os.path.realpath(root), "")
    seen = set[tuple[int, int]]()  # (device, inode) of every folder entered and file listed
    folders, links, later = [""], list[str](), list[str]()
    while folders or links or later:
        if folders:
            key = folders.pop()
            try:
                status = os.stat(os.path.join(root, key))
                with os.scandir(os.path.join(root, key)) as scanned:
                    entries = [entry for entry in scanned if key or only is None or entry.name in only]
            except OSError as err:
                yield key, f"unreadable: {err.strerror}"
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if key:
                yield key, "folder"
            for entry in entries:
                name = f"{key}/{entry.name}" if key else entry.name
                if is_junk(entry.name):
                    yield name, "hidden"
                elif not _is_utf8(entry.name):
                    yield name, "not-utf-8"
                elif entry.is_symlink():
                    later.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    seen.add((status.st_dev, entry.inode()))
                    yield name, "file"
                else:
                    yield name, "special"
        elif links:  # after all folders, so that a file is listed by its real name
            key = links.pop()
            try:
                status = os.stat(os.path.join(root, key))
            except OSError:
                yield key, "broken-link"
                continue
            is_inside = os.path.realpath(os.path.join(root, key)).startswith(inside)
            if (status.st_dev, status.st_ino) in seen:
                yield key, "link-to-listed"
            elif stat.S_ISREG(status.st_mode):
                seen.add((status.st_dev, status.st_ino))
                yield key, "file"
            elif not stat.S_ISDIR(status.st_mode):
                yield key, "special"
            elif is_inside or follow_links:
                folders.append(key)
            else:
                yield key, "link-out"
        else:
            links, later = sorted(later, reverse=True), []


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
