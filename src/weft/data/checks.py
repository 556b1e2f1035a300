"""Requirements on a dataset: errors for data that cannot be used, and notes about data that can."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from weft.data.colour import NOTES
from weft.data.inventory import Inventory
from weft.data.source import sort_class_names
from weft.data.split import Side
from weft.data.tree import SKIPPED
from weft.errors import DataError
from weft.text import NUM_NAMED, count, first_few, has_control_characters, printable

ARCHIVES = {"zip", "tar", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar"}  # extensions


def class_list(inventory: Inventory, wanted: Sequence[str] | None) -> list[str]:
    """Return the class names; raise DataError if the folders do not define them."""
    root, folder = printable(inventory.name), inventory.folder
    if links := inventory.classes_outside:
        raise DataError(
            f"Folders of '{root}' must be inside it; links to the outside: {first_few(links)}. Move the folders there,"
            " or follow links: --follow-links."
        )
    if not inventory.keys and not inventory.bad:
        instead = f" (but {ignored_files(inventory)})" if inventory.ignored else ""
        advice = "Put one folder of images per class in it."
        if ARCHIVES & inventory.ignored.keys():
            advice = "Unpack the archives, and pass the folder."
        raise DataError(f"The data directory must contain images; '{root}' contains none{instead}. {advice}")
    own = sort_class_names({name for names in inventory.classes.values() for name in names})
    if not own:
        raise DataError(
            f"The data directory must contain one folder per class; '{root}' has"
            f" {count(len(inventory.keys), 'image')} and no folder. Sort the images into folders named after their"
            " classes."
        )
    if wanted is not None:
        known = set(wanted)
        if unknown_names := [name for name in own if name not in known]:
            raise DataError(
                f"Every class of '{root}' must be one of the {len(wanted)} given classes ({first_few(wanted)}); "
                f"not among them: {first_few(unknown_names)}. Rename or remove these classes."
            )
        return list(wanted)
    first: dict[str, str] = {}
    for name in own:  # Unicode has two forms of `é`, and macOS writes the second
        if (twin := first.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            raise DataError(
                f"Class names must differ in more than the Unicode form of a letter; {twin!a} and {name!a} are both"
                f" '{printable(name)}'. Give them one name."
            )
    names = inventory.classes.get("train", next(iter(inventory.classes.values())))
    if only_val := sorted(set(own) - set(names)):
        train, val = folder("train"), folder("val")
        raise DataError(
            f"Every class of {val}/ must also be in {train}/; only in {val}/: {first_few(only_val)}. Add images of"
            f" {'it' if len(only_val) == 1 else 'them'} to {train}/, or remove the folder from {val}/."
        )
    if len(names) < 2:
        raise DataError(
            f"A classifier needs at least two classes; '{root}' has one, '{printable(names[0])}'. Add a folder of"
            " images of another class."
        )
    return names


def check_nesting(inventory: Inventory, wanted: Sequence[str] | None) -> list[str]:
    """Return a note if the images are in further folders inside the class folders, none of which has its own.

    Raises:
        DataError: the further folders look like the classes: the class folders are a split, or a single folder.
    """
    nested, root = inventory.nested, printable(inventory.name)
    if not nested or (wanted is not None and set(nested) <= set(wanted)):
        return []
    each = first_few(f"{name}/ ({first_few(folders)})" for name, folders in nested.items())
    if len(nested) == 1:
        (name,), (folders,) = nested, nested.values()
        advice = f"Did you mean {root}/{printable(name)}?"
        if "" not in inventory.classes:
            advice = f"Move the folders in {printable(name)}/ one level up."
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


def check_names(classes: Sequence[str]) -> None:
    """Raise DataError for a class name that a model directory cannot hold."""
    if bad := [name for name in classes if has_control_characters(name)]:
        raise DataError(f"Class names must have no control characters; got {bad[0]!r}. Rename the class.")


def check_bad(inventory: Inventory, chosen: Side, max_bad: float) -> None:
    """Raise DataError if a larger fraction of the files than `max_bad` is bad.

    Of the images, the chosen ones count: with a limit only these are decoded, and their rate is extrapolated.
    """
    if not inventory.bad:
        return
    bad, images = {file.key for file in inventory.bad}, set(inventory.keys)
    num_before = sum(file.key not in images for file in inventory.bad)  # such as unreadable folders
    rate_before = num_before / (num_before + len(images))
    rate = 1 - (1 - rate_before) * (1 - sum(inventory.keys[i] in bad for i in chosen) / max(len(chosen), 1))
    if rate > max_bad:
        raise DataError(
            f"At most {max_bad:.3g} of the files may be bad; in '{printable(inventory.name)}' {rate:.3g} are:"
            f" {_bad_files(inventory)}. List them all with `weft data check`, repair or remove them, or raise"
            " data.max_bad."
        )


def check_empty(inventory: Inventory, names: Sequence[str], images: Side) -> None:
    """Raise DataError for classes without a usable training image."""
    is_given = inventory.is_given
    filled = {inventory.class_names[i] for i in images if not is_given or inventory.splits[i] == "train"}
    if empty := [name for name in names if name not in filled]:
        where = f" in {inventory.folder('train')}/" if is_given else ""
        raise DataError(
            f"Every class must have at least one usable image{where}; empty: {first_few(empty)}. Add images, or remove"
            " the folder."
        )


def check_sides(inventory: Inventory, num_train: int, num_val: int) -> None:
    """Raise DataError if a split has no usable image."""
    if num_train and num_val:
        return
    side = "the validation set" if num_train else "the training set"
    advice = "Add images, two or more per class."
    if inventory.is_given:
        side = f"{inventory.folder('val' if num_train else 'train')}/"
    elif inventory.groups:
        advice = "A class can be held out only if its images are in two groups or more: choose another --group."
    raise DataError(
        f"Training needs usable images in both splits; {side} of '{printable(inventory.name)}' has none"
        f" ({num_train} for training, {num_val} held out). {advice}"
    )


def check_folds(inventory: Inventory, held_out: Sequence[Side]) -> None:
    """Raise DataError if one of several folds has no usable image to hold out."""
    if (num_empty := sum(not side for side in held_out)) and len(held_out) > 1:
        unit = "groups" if inventory.groups else "images"
        raise DataError(
            f"Every fold must hold out an image; {count(num_empty, 'fold')} of {len(held_out)} of"
            f" '{printable(inventory.name)}' would have none, because there are too few {unit} per class. Pass fewer"
            f" --folds, or add {unit}."
        )


def survey_notes(inventory: Inventory, names: Sequence[str], val: Side) -> list[str]:
    """Return notes about accepted data: excluded files, classes without validation images, conversions."""
    notes = []
    if inventory.bad:
        notes.append(f"{count(len(inventory.bad), 'bad file')} excluded: {_bad_files(inventory)}.")
    held_out = {inventory.class_names[i] for i in val}
    if missing := [name for name in names if name not in held_out]:
        notes.append(f"No validation image of {count(len(missing), 'class', 'classes')}: {first_few(missing)}.")
    notes += unread_notes(inventory)
    if inventory.ignored:
        notes.append(f"Ignored, not images by name or content: {ignored_files(inventory)}.")
    if inventory.skipped:
        notes.append(f"Skipped: {tally(inventory.skipped, SKIPPED)}.")
    if inventory.notes:
        notes.append(f"Converted: {tally(inventory.notes, NOTES)}.")
    return notes


def unread_notes(inventory: Inventory) -> list[str]:
    """Return notes about folders, shards and splits that are not read."""
    notes = []
    if (unread := inventory.unread) and all(name.endswith(".tar") for name in unread):
        notes.append(f"Not read, because other shards are for training: {first_few(unread)}.")
    elif unread:
        names = first_few(f"{name}/" for name in unread)
        notes.append(f"Not read, because {inventory.folder('train')}/ exists: {names}.")
    if aside := printable(inventory.set_aside):
        notes.append(f"Not read: {aside}. After training: weft evaluate RUN DATA --split test.")
    return notes


def split_notes(inventory: Inventory, names: Sequence[str], train: Side, val: Side, how: str) -> list[str]:
    """Return notes about the split, made by weft as `how` says or given, and about groups that are on both sides."""
    if inventory.is_given:
        folders = f", {inventory.folder('train')}/ and {inventory.folder('val')}/" if inventory.folders else ""
        how = f"the dataset's own split{folders}"
    notes = [f"{len(train):,} images in {len(names)} classes for training, {len(val):,} held out: {how}."]
    if not inventory.groups:
        return notes
    trained, held_out = ({inventory.groups[i] for i in side} for side in (train, val))
    notes.append(f"{count(len(trained), 'group')} of images for training, {len(held_out):,} held out.")
    if torn := sorted(trained & held_out):
        notes.append(
            f"{count(len(torn), 'group is', 'groups are')} on both sides of the dataset's own split, which makes the"
            f" validation accuracy too high: {first_few(torn)}."
        )
    return notes


def copy_notes(inventory: Inventory, train: Side, held_out: Sequence[Side]) -> list[str]:
    """Return notes about byte-identical images across splits or classes; `held_out` has the images of each fold."""
    copies = inventory.copies
    several = {i for images in copies for i in images}
    fold_of = {i: fold for fold, side in enumerate([train, *held_out]) for i in side if i in several}
    used = [[i for i in images if i in fold_of] for images in copies]
    leaked = [i for images in used if len({fold_of[i] for i in images}) > 1 for i in images if fold_of[i]]
    torn = [images for images in used if len({inventory.class_names[i] for i in images}) > 1]
    notes = []
    if leaked:
        notes.append(
            f"{count(len(leaked), 'validation image is', 'validation images are')} byte-identical to a training image,"
            f" which makes the validation accuracy too high: {first_few(inventory.keys[i] for i in leaked)}. To keep"
            " copies on one side: weft data review DATA --out DIR, then weft train DIR/corrected.csv --group group."
        )
    if torn:
        names = first_few(same_bytes([inventory.keys[i] for i in images]) for images in torn)
        notes.append(f"{count(len(torn), 'image is', 'images are')} in several classes, byte-identical: {names}.")
    return notes


def same_bytes(keys: Sequence[str]) -> str:
    """Format a group of identical files as `cats/1.jpg = cats/7.jpg`, with the number of further ones."""
    more = f" = {len(keys) - NUM_NAMED:,} more" if len(keys) > NUM_NAMED else ""
    return " = ".join(keys[:NUM_NAMED]) + more


def tally(counts: Mapping[str, int], meaning: Mapping[str, str] | None = None) -> str:
    """Format counts as `3 cmyk, 1 alpha`, most frequent first, each with its meaning in brackets if given."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n:,} {name}{f' ({meaning[name]})' if meaning else ''}" for name, n in ordered)


def ignored_files(inventory: Inventory) -> str:
    """Format the number of files that are no images by extension, as `3 .txt, 1 without extension`."""
    return tally({f".{printable(name)}" if name else "without extension": n for name, n in inventory.ignored.items()})


def _bad_files(inventory: Inventory) -> str:
    by_reason = tally(Counter(file.reason for file in inventory.bad))
    return f"{by_reason} ({first_few(file.key for file in inventory.bad)})"
