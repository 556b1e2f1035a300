"""Open a folder of images: one folder per class, directly or below the folders of a split."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from weft.data.decode import BadImage, open_regular, read_regular
from weft.data.formats import HEAD_BYTES, archive_kind, sniff
from weft.data.inventory import Inventory, in_threads
from weft.data.source import BadFile, KeyedSource, Source, bad_file, sort_class_names
from weft.data.split_names import held_out_side, split_folders, split_of
from weft.data.tree import EXTENSIONS, extension, names_in, nested_folders, num_beside, walk
from weft.errors import DataError, UsageError
from weft.text import printable


class FileReader:
    """Read files by path, relative to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)

    def __call__(self, key: str) -> bytes:
        """Return the bytes of a file."""
        return read_regular(os.path.join(self.folder, key))


def open_folder(path: str | Path, *, test: bool = False, follow_links: bool = False) -> Inventory:
    """List the images of a folder: walk it, and read the first bytes of every file.

    Args:
        path: folder of class folders, or folder with `train/` and optionally `val/` or `test/`, by any of the names of
            `weft.data.split_names`.
        test: read the test split in place of the validation split.
        follow_links: also enter folders outside `path` through links.

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

    def place(key: str) -> tuple[str, list[str]]:
        """Return the split of a file or folder, and its path below the folder of the classes."""
        top, *_ = parts = key.split("/")
        return sides.get(top, ""), parts[depths.get(top, 0) :]

    files = []
    for key, kind in walk(os.fspath(root), only=sides or None, follow_links=follow_links):
        split, inner = place(key)
        if kind == "file":
            files.append(key)
        elif kind == "folder":
            classes[split] += inner if len(inner) == 1 else []
        elif problem := _problem(key, kind):
            inventory.bad.append(bad_file(key, problem, split))
        else:
            inventory.skipped[kind] += 1
            if kind == "link-out" and len(inner) < 2:
                inventory.classes_outside.append(key)
    for names in classes.values():
        names[:] = sort_class_names(names)
    files.sort()
    for key, result in in_threads(partial(_sniffed, root), files):
        split, inner = place(key)
        if result is True:
            inventory.add(key, inner[0] if len(inner) > 1 else "", split)
        elif result:
            inventory.bad.append(result._replace(split=split))
        else:
            inventory.ignored[extension(key)] += 1
    inventory.bad.sort()
    inventory.nested = nested_folders(place(key)[1][:-1] for key in inventory.keys)
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


def images_below(folder: Path) -> list[str]:
    """Return the image files of a folder by name or content, as `inspect` finds them; paths relative to it, sorted."""
    found = dict(walk(os.fspath(folder)))
    named = [(key, kind) for key, kind in found.items() if extension(key) in EXTENSIONS]
    images = {key for key, kind in named if kind == "file" or _problem(key, kind)}
    others = [key for key, kind in found.items() if kind == "file" and key not in images]
    images |= {key for key, is_image in in_threads(partial(_sniffed, folder), others) if is_image}
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


def _sniffed(root: Path, key: str) -> bool | BadFile:
    """Return whether a file is an image by its first bytes; a bad file if only its extension is an image's."""
    try:
        with open_regular(os.path.join(root, key)) as file:
            if sniff(file.read(HEAD_BYTES)) is not None:
                return True
        problem = BadImage("", "not-an-image")
    except (BadImage, OSError) as err:
        problem = err
    return extension(key) in EXTENSIONS and bad_file(key, problem)
