"""Requirements on a dataset: errors for data that cannot be used, and notes about data that can."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from weft.data.colour import NOTES
from weft.data.inventory import Inventory
from weft.data.source import ImageEntry, sort_class_names
from weft.data.tree import SKIPPED
from weft.errors import DataError
from weft.text import NUM_NAMED, count, first_few, has_control_characters, printable

ARCHIVES = {"zip", "tar", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar"}  # extensions


def class_list(inventory: Inventory, wanted: Sequence[str] | None) -> list[str]:
    """Return the class names; raise DataError if the folders do not define them."""
    root = _root(inventory)
    if links := inventory.classes_outside:
        raise DataError(
            f"Folders of '{root}' must be inside it; {first_few(links)} "
            f"{'are links' if len(links) > 1 else 'is a link'} to the outside. "
            f"Move the folders there, or follow links: --follow-links."
        )
    own = sort_class_names({name for names in inventory.classes.values() for name in names})
    if not inventory.entries and not inventory.bad:
        instead = f" (but {tally(extensions(inventory.ignored))})" if inventory.ignored else ""
        raise DataError(
            f"The data directory must contain images; '{root}' contains none{instead}. "
            + (
                "Unpack the archives, and pass the folder."
                if ARCHIVES & inventory.ignored.keys()
                else "Put one folder of images per class in it."
            )
        )
    if not own:
        raise DataError(
            f"The data directory must contain one folder per class; '{root}' has"
            f" {count(len(inventory.entries), 'image')} and no folder. Sort the images into folders named after their"
            " classes."
        )
    if wanted is not None:
        if unknown_names := [name for name in own if name not in set(wanted)]:
            raise DataError(
                f"Every class of '{root}' must be one of the {len(wanted)} given classes ({first_few(wanted)}); "
                f"not among them: {first_few(unknown_names)}. Rename or remove these classes."
            )
        return list(wanted)
    _check_forms(own)
    names = inventory.classes.get("train", next(iter(inventory.classes.values())))
    train, side = f"{inventory.folder('train')}/", f"{inventory.folder('val')}/"
    if only_val := sorted(set(own) - set(names)):
        raise DataError(
            f"Every class of {side} must also be in {train}; only in {side}: {first_few(only_val)}. Add images of "
            f"{'it' if len(only_val) == 1 else 'them'} to {train}, or remove the folder from {side}."
        )
    if len(names) < 2:
        raise DataError(
            f"A classifier needs at least two classes; '{root}' has one, '{printable(names[0])}'. "
            f"Add a folder of images of another class."
        )
    return names


def check_nesting(inventory: Inventory, wanted: Sequence[str] | None) -> list[str]:
    """Return a note if the images are in further folders inside the class folders, none of which has its own.

    Args:
        inventory: of a folder.
        wanted: class names that the data must have; None for those of the folders.

    Raises:
        DataError: the further folders look like the classes: the class folders are a split, or a single folder.
    """
    nested, root = inventory.nested, _root(inventory)
    if not nested or (wanted is not None and set(nested) <= set(wanted)):
        return []
    each = first_few(f"{name}/ ({first_few(folders)})" for name, folders in nested.items())
    if len(nested) == 1:
        (name,), (folders,) = nested, nested.values()
        if "" not in inventory.classes:
            advice = f"Move the folders in {printable(name)}/ one level up."
        else:
            advice = f"Did you mean {root}/{printable(name)}?"
        raise DataError(
            f"A data directory must contain one folder per class; all images of '{root}' are in {printable(name)}/, in"
            f" {count(len(folders), 'folder')}: {first_few(folders)}. {advice}"
        )
    shared = set.intersection(*({folder.casefold() for folder in folders} for folders in nested.values()))
    if len(shared) > 1:
        raise DataError(
            f"Class folders must have images or different subfolders; in '{root}' all have the same ones: {each}. If"
            f" {first_few(nested)} are a split, name the folders train, val and test. If they are classes, move the"
            " images up into them."
        )
    return [f"No class folder has an image of its own, the images are in further folders: {each}."]


def match_forms(classes: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Map each name to the class that equals it up to the Unicode form of its letters; to itself without one."""
    first = {unicodedata.normalize("NFC", name): name for name in reversed(classes)}
    return {name: first.get(unicodedata.normalize("NFC", name), name) for name in names}


def _check_forms(names: Sequence[str]) -> None:
    """Raise DataError for class names that look equal: Unicode has two forms of `é`, and macOS writes the second."""
    first: dict[str, str] = {}
    for name in names:
        twin = first.setdefault(unicodedata.normalize("NFC", name), name)
        if twin != name:
            raise DataError(
                f"Class names must differ in more than the Unicode form of a letter; {twin!a} and {name!a} are both"
                f" '{printable(name)}'. Give them one name."
            )


def check_names(classes: Sequence[str]) -> None:
    """Raise DataError for a class name that a model directory cannot hold."""
    if bad := [name for name in classes if has_control_characters(name)]:
        raise DataError(f"Class names must have no control characters; got {bad[0]!r}. Rename the class.")


def check_bad(inventory: Inventory, bad_rate: float, max_bad: float) -> None:
    """Raise DataError if `bad_rate` exceeds `max_bad`; both are fractions of the files."""
    if inventory.bad and bad_rate > max_bad:
        raise DataError(
            f"At most {max_bad:.3g} of the files may be bad; in '{_root(inventory)}' {bad_rate:.3g} are: "
            f"{bad_files(inventory)}. List them all with `weft data check`, repair or remove them, or raise"
            " data.max_bad."
        )


def check_empty(names: list[str], entries: list[ImageEntry], inventory: Inventory) -> None:
    """Raise DataError for classes without a usable training image."""
    filled = {entry.class_name for entry in entries if entry.split != "val"}
    if empty := [name for name in names if name not in filled]:
        where = f" in {inventory.folder('train')}/" if inventory.is_given else ""
        raise DataError(
            f"Every class must have at least one usable image{where}; empty: {first_few(empty)}. "
            f"Add images, or remove the folder."
        )


def check_sides(inventory: Inventory, num_train: int, num_val: int, *, is_grouped: bool) -> None:
    """Raise DataError if a split has no usable image."""
    if num_train and num_val:
        return
    sides = (
        (f"{inventory.folder('train')}/", f"{inventory.folder('val')}/")
        if inventory.is_given
        else ("the training set", "the validation set")
    )
    side = sides[num_train > 0]
    advice = "Add images, two or more per class."
    if is_grouped and not inventory.is_given:
        advice = "A class can be held out only if its images are in two groups or more: choose another --group."
    raise DataError(
        f"Training needs usable images in both splits; {side} of '{_root(inventory)}' has none "
        f"({num_train} for training, {num_val} held out). {advice}"
    )


def check_folds(inventory: Inventory, held_out: Sequence[int], *, is_grouped: bool) -> None:
    """Raise DataError if one of several folds has no usable image; `held_out` is the number of images of each."""
    if (empty := [number for number in held_out if not number]) and len(held_out) > 1:
        unit = "groups" if is_grouped else "images"
        raise DataError(
            f"Every fold must hold out an image; {count(len(empty), 'fold')} of {len(held_out)} of '{_root(inventory)}'"
            f" would have none, because there are too few {unit} per class. Pass fewer --folds, or add {unit}."
        )


def survey_notes(inventory: Inventory, names: list[str], val: list[ImageEntry]) -> list[str]:
    """Return notes about accepted data: excluded files, classes without validation images, conversions."""
    notes = []
    if inventory.bad:
        notes.append(f"{count(len(inventory.bad), 'bad file')} excluded: {bad_files(inventory)}.")
    if missing := [name for name in names if name not in {entry.class_name for entry in val}]:
        notes.append(f"No validation image of {count(len(missing), 'class', 'classes')}: {first_few(missing)}.")
    notes += unread_notes(inventory)
    if inventory.ignored:
        notes.append(f"Ignored, not images by name or content: {tally(extensions(inventory.ignored))}.")
    if inventory.skipped:
        notes.append(f"Skipped: {tally(inventory.skipped, SKIPPED)}.")
    if inventory.notes:
        notes.append(f"Converted: {tally(inventory.notes, NOTES)}.")
    return notes


def unread_notes(inventory: Inventory) -> list[str]:
    """Return notes about folders, shards and splits that are not read."""
    notes = []
    if inventory.unread:
        if all(name.endswith(".tar") for name in inventory.unread):
            notes.append(f"Not read, because other shards are for training: {first_few(inventory.unread)}.")
        else:
            names = first_few(f"{name}/" for name in inventory.unread)
            notes.append(f"Not read, because {inventory.folder('train')}/ exists: {names}.")
    if inventory.set_aside:
        notes.append(
            f"Not read: {printable(inventory.set_aside)}. After training: weft evaluate RUN DATA --split test."
        )
    return notes


def group_notes(train: list[ImageEntry], val: list[ImageEntry]) -> list[str]:
    """Return notes about groups of images: their number, and those on both sides of a given split."""
    sides = [{entry.group for entry in side} for side in (train, val)]
    notes = [f"{count(len(sides[0]), 'group')} of images for training, {len(sides[1]):,} held out."]
    if torn := sorted(sides[0] & sides[1]):
        notes.append(
            f"{count(len(torn), 'group is', 'groups are')} on both sides of the dataset's own split, which makes the"
            f" validation accuracy too high: {first_few(torn)}."
        )
    return notes


def copy_notes(inventory: Inventory, train: list[ImageEntry], held_out: Sequence[list[ImageEntry]]) -> list[str]:
    """Return notes about byte-identical images across splits or classes.

    Args:
        inventory: of the dataset.
        train: training images.
        held_out: validation images; those of each fold for a cross-validation.
    """
    side_of = {entry.key: side for side, part in enumerate(held_out) for entry in part}
    class_of = {entry.key: entry.class_name for entry in itertools.chain(train, *held_out)}
    used = [[key for key in keys if key in class_of] for keys in inventory.copies]
    leaked = [key for keys in used if len(set(map(side_of.get, keys))) > 1 for key in keys if key in side_of]
    torn = [keys for keys in used if len(set(map(class_of.get, keys))) > 1]
    notes = []
    if leaked:
        notes.append(
            f"{count(len(leaked), 'validation image is', 'validation images are')} byte-identical to a training image, "
            f"which makes the validation accuracy too high: {first_few(leaked)}. To keep copies on one side, write a"
            " table: weft data review DATA --out DIR, then --apply; and train with it: --group group."
        )
    if torn:
        several = count(len(torn), "image is", "images are")
        notes.append(f"{several} in several classes, byte-identical: {first_few(map(same_bytes, torn))}.")
    return notes


def same_bytes(keys: Sequence[str]) -> str:
    """Format a group of identical files as `cats/1.jpg = cats/7.jpg`, with the number of further ones."""
    more = f" = {len(keys) - NUM_NAMED:,} more" if len(keys) > NUM_NAMED else ""
    return " = ".join(keys[:NUM_NAMED]) + more


def bad_files(inventory: Inventory) -> str:
    """Format the number of bad files by reason, and the first few names."""
    by_reason = tally(Counter(file.reason for file in inventory.bad))
    return f"{by_reason} ({first_few(file.key for file in inventory.bad)})"


def tally(counts: Mapping[str, int], meaning: Mapping[str, str] | None = None) -> str:
    """Format counts as `3 cmyk, 1 alpha`, most frequent first, each with its meaning in brackets if given."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n:,} {name}{f' ({meaning[name]})' if meaning else ''}" for name, n in ordered)


def extensions(counts: Mapping[str, int]) -> dict[str, int]:
    """Return `Inventory.ignored` with readable keys: `.txt`, `without extension`."""
    return {f".{printable(name)}" if name else "without extension": n for name, n in counts.items()}


def _root(inventory: Inventory) -> str:
    return printable(inventory.name)
