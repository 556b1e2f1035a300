"""Open a folder of images: one folder per class, directly or below the folders of a split."""

from __future__ import annotations

import itertools
import operator
import os
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np

from weft.data.decode import BadImage, as_bad, open_regular
from weft.data.formats import HEAD_BYTES, archive_kind, sniff
from weft.data.index import IMAGE, OTHER, UNKNOWN, FileIndex, Found, in_threads
from weft.data.inventory import Inventory
from weft.data.source import FileReader, KeyedSource, Source, bad_file, sort_class_names
from weft.data.split_names import held_out_side, split_folders, split_of
from weft.data.tree import EXTENSIONS, extension, names_in, nested_folders, num_beside, walk
from weft.errors import DataError, UsageError
from weft.files import check_writable
from weft.text import printable


def open_folder(
    path: str | Path, *, test: bool = False, follow_links: bool = False, fresh: bool = False, sniffs: bool = True
) -> Inventory:
    """List the images of a folder: walk it, and read the first bytes of every file that the index does not know.

    Args:
        path: folder of class folders, or folder with `train/` and optionally `val/` or `test/`, by any of the names of
            `weft.data.split_names`.
        test: read the test split in place of the validation split.
        follow_links: also enter folders outside `path` through links.
        fresh: read all files, also those that the index knows.
        sniffs: recognise images by their first bytes; else by their names, and no file is opened.

    Raises:
        DataError: `path` does not exist, is not a directory, or cannot be read.
    """
    root = existing(path)
    sides, unread, set_aside = _split(root, test=test)
    depths = {name: _depth(root / name, name) for name in sides}
    classes: dict[str, list[str]] = {side: [] for side in sides.values()} or {"": []}
    inventory = Inventory(str(root), FileReader(root), classes, unread=unread, set_aside=set_aside)
    inventory.folders = {side: name for name, side in sides.items()}
    if sides and (number := num_beside(root)):
        inventory.skipped["beside"] = number

    def place(folder: str) -> tuple[str, list[str]]:
        """Return the split of a folder, and its path below the folder of the classes."""
        top, *_ = parts = folder.split("/")[:-1] or [""]
        return sides.get(top, ""), [part for part in parts[depths.get(top, 0) :] if part]

    listed = defaultdict[str, list[str]](list)
    for kind, folder, names in walk(os.fspath(root), only=sides or None, follow_links=follow_links):
        split, inner = place(folder)
        if kind == "file":
            listed[folder] += names
            continue
        for name in names:
            split, inner = place(f"{folder}{name}/")
            if kind == "folder":
                classes[split] += inner if len(inner) == 1 else []
            elif problem := _problem(name, kind):
                inventory.bad.append(bad_file(folder + name, problem, split))
            else:
                inventory.skipped[kind] += 1
                if kind == "link-out" and len(inner) < 2:
                    inventory.classes_outside.append(folder + name)
    for names in classes.values():
        names[:] = sort_class_names(names)
    index = FileIndex.of_folders(os.fspath(root), listed, fresh=fresh)
    every = np.arange(len(index.keys))
    if sniffs:
        index.fill(every, IMAGE, partial(_sniffed, root))
        is_image = index.records["level"] >= IMAGE
    else:
        is_image = np.array([extension(key) in EXTENSIONS for key in index.keys], bool)
    is_bad = index.is_bad(every, IMAGE if sniffs else UNKNOWN)
    with_images = []
    for folder, span in index.spans.items():
        split, inner = place(folder)
        keys = list(itertools.compress(index.keys[span], is_image[span] & ~is_bad[span]))
        inventory.add_all(keys, inner[0] if inner else "", split)
        with_images += [inner] if keys else []
        for i in (np.flatnonzero(is_bad[span]) + span.start).tolist():
            inventory.bad.append(bad_file(index.keys[i], index.problems[i], split))
        inventory.ignored.update(map(extension, itertools.compress(index.keys[span], ~is_image[span])))
    inventory.index, inventory.places = index, np.flatnonzero(is_image & ~is_bad)
    if not all(map(operator.le, inventory.keys, itertools.islice(inventory.keys, 1, None))):  # folders in folders
        inventory.keep(sorted(range(len(inventory.keys)), key=inventory.keys.__getitem__))
    inventory.bad.sort()
    inventory.nested = nested_folders(with_images)
    return inventory


def existing(path: str | Path) -> Path:
    """Return the path of a folder of images; refuse one that does not exist or cannot be read."""
    name = printable(os.fspath(path))
    todo = "Pass a folder with one folder of images per class, or the name digits."
    if not os.path.lexists(path):
        raise DataError(f"The data directory must exist; '{name}' does not. {todo}")
    if not os.path.isdir(path):
        if kind := archive_kind(path):
            raise DataError(f"The data must be a directory; '{name}' is {kind}. Unpack it, and pass the folder.")
        raise DataError(f"The data must be a directory; '{name}' is not. {todo}")
    try:
        with os.scandir(path):
            return Path(path)
    except OSError as err:
        raise DataError(f"The data directory must be readable; '{name}' is not ({err.strerror}).") from err


def paths_of(source: Source) -> list[str]:
    """Return the absolute paths of the images of a folder or of a table.

    Raises:
        UsageError: the images are not files.
    """
    if not isinstance(source, KeyedSource) or not isinstance(source.reader, FileReader):
        raise UsageError(
            "A review reads image files: a folder with one subfolder per class, or a table of paths and labels. Unpack"
            " other data into a folder first."
        )
    folder = os.path.abspath(source.reader.folder)
    return [os.path.join(folder, key) for key in source.keys]


def check_outside(out: str | Path, *data: str | Path, is_dataset: bool = True) -> None:
    """Refuse an output in a folder of images, where a later run would read it as a class or an image.

    Args:
        out: file or directory to write.
        data: folders of images; other sources are ignored.
        is_dataset: next to the folders of a split, where nothing is read, an output is allowed.

    Raises:
        UsageError: `out` is in one of the folders.
    """
    for folder in data:
        root, resolved = Path(folder).resolve(), Path(out).resolve()
        if not root.is_dir() or not resolved.is_relative_to(root):
            continue
        is_beside = is_dataset and resolved != root and bool(_split(root, test=False)[0])
        if not is_beside or split_of(resolved.relative_to(root).parts[0]):
            raise UsageError(
                f"The output must be outside the data folder, where it would be read as a class or an image;"
                f" {printable(str(out))} is in {printable(os.fspath(folder))}. Choose another path."
            )


def check_new_file(path: Path, option: str, source: str, *, force: bool) -> None:
    """Check that a file can be written, outside a dataset.

    Args:
        path: of the file.
        option: that names it.
        source: the dataset.
        force: the file may exist.

    Raises:
        UsageError: it exists, or is in the dataset.
        StorageError: its folder cannot be written to.
    """
    if path.exists() and not (force and path.is_file()):
        raise UsageError(f"{option} must name a new file; {path} exists already. Pass --force or another name.")
    check_outside(path, source)
    check_writable(path.parent)


def images_below(folder: Path) -> list[str]:
    """Return the image files of a folder by name or content, as `inspect` finds them; paths relative to it, sorted."""
    found = {place + name: kind for kind, place, names in walk(os.fspath(folder)) for name in names}
    named = [(key, kind) for key, kind in found.items() if extension(key) in EXTENSIONS]
    images = {key for key, kind in named if kind == "file" or _problem(key, kind)}
    others = [key for key, kind in found.items() if kind == "file" and key not in images]
    results = in_threads(partial(_sniffed, folder), others)
    images |= {key for key, result in zip(others, results, strict=True) if result.level == IMAGE}
    return sorted(images)


def _split(root: Path, *, test: bool) -> tuple[dict[str, str], list[str], str]:
    """Return the folders of the split with their sides, those of no side, and that of a test split that is not read."""
    # only folders that contain folders: a `train` of files is a class, and a `test` of unsorted files has no classes
    names = _folders(root)
    named = (name for name in names if split_of(name) and _folders(root / name))
    folder_of = {side: name for name, side in split_folders(named).items()}
    held_out = held_out_side(folder_of, test=test)
    if not folder_of:
        return {}, [], ""
    sides = {folder_of["train"]: "train"} | ({folder_of[held_out]: "val"} if held_out else {})
    set_aside = folder_of.get("test", "") if held_out != "test" else ""
    unread = [name for name in names if name not in sides and name != set_aside]
    return sides, unread, f"{set_aside}/" if set_aside else ""


def _folders(folder: Path) -> list[str]:
    return names_in(folder)[1]


def _depth(folder: Path, name: str) -> int:
    """Return the number of folders above the class folders: 2 for `seg_train/seg_train`, as archives are unpacked."""
    depth = 1
    while len(inner := _folders(folder)) == 1 and split_of(inner[0]) == split_of(name) and _folders(folder / inner[0]):
        folder, depth = folder / inner[0], depth + 1
    return depth


def _problem(key: str, kind: str) -> BadImage | None:
    """Return why an entry of `walk` is bad: an unreadable folder, a name, or an image by its name that is no file."""
    if kind.startswith("unreadable: "):
        return BadImage("", "unreadable", kind.removeprefix("unreadable: "))
    if kind == "not-utf-8":
        return BadImage("", kind)
    reason = {"special": "not-a-file", "broken-link": "missing"}.get(kind)
    return BadImage("", reason) if reason and extension(key) in EXTENSIONS else None


def _sniffed(root: Path, key: str) -> Found:
    """Check the first bytes of a file; one of another content is only bad if its name is an image's."""
    try:
        with open_regular(os.path.join(root, key)) as file:
            if sniff(file.read(HEAD_BYTES)) is not None:
                return Found(IMAGE)
        problem = BadImage("", "not-an-image")
    except (BadImage, OSError) as err:
        problem = as_bad(err)
    if extension(key) in EXTENSIONS:
        return Found(IMAGE, problem=problem)
    return Found(UNKNOWN if problem.reason == "unreadable" else OTHER)
