"""What data must fulfil before anyone trains on it, and the sentences that say what was found: refusals and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from weft.data.images.colour import NOTES
from weft.data.index.inventory import Inventory, Picture
from weft.data.index.tree import SKIPPED
from weft.errors import DataError, UsageError
from weft.text import printable

NUM_NAMED = 5  # examples in a sentence


def check_numbers(val_fraction: float, max_bad: float, limit: int | None, train_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise UsageError(f"val_fraction must lie between 0 and 1; got {val_fraction}. A fifth, 0.2, is usual.")
    if not 0 <= max_bad <= 1:
        raise UsageError(f"max_bad must lie between 0 and 1; got {max_bad}. It is the tolerated fraction of bad files.")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1 image; got {limit}.")
    if not 0 < train_fraction <= 1:
        raise UsageError(f"train_fraction must be above 0 and at most 1; got {train_fraction}. 1 takes all images.")


def class_list(inventory: Inventory, pictures: list[Picture], wanted: Sequence[str] | None) -> list[str]:
    """The one list of classes."""
    root = _root(inventory)
    if links := inventory.classes_outside:
        raise DataError(
            f"Folders of '{root}' must lie inside it; {some(links)} {'lead' if len(links) > 1 else 'leads'} outside, "
            f"by a link. Put the folders there, or allow it with follow_links."
        )
    own = sorted({name for names in inventory.classes.values() for name in names})
    if not pictures and not inventory.bad:
        instead = f" (but {tally(extensions(inventory.ignored))})" if inventory.ignored else ""
        raise DataError(
            f"The data directory must hold images; '{root}' holds none{instead}. "
            f"Put one folder of images per class in it."
        )
    if not own:
        raise DataError(
            f"The data directory must hold one folder per class; '{root}' has {count(len(pictures), 'image')} and no "
            f"folder. Sort the images into folders named after their classes."
        )
    if wanted is not None:
        if strange := [name for name in own if name not in set(wanted)]:
            raise DataError(
                f"Every class folder of '{root}' must be one of the {len(wanted)} classes "
                f"to label by ({some(wanted)}); "
                f"not among them: {some(strange)}. Rename or remove these folders."
            )
        return list(wanted)
    names = inventory.classes.get("train", own)
    side = f"{inventory.val_name}/"
    if only_val := sorted(set(own) - set(names)):
        raise DataError(
            f"Every class of {side} must be in train/ as well; only in {side}: {some(only_val)}. Add images of "
            f"{'it' if len(only_val) == 1 else 'them'} to train/, or remove the folder from {side}."
        )
    if len(names) < 2:
        raise DataError(
            f"A classifier needs at least two classes; '{root}' has one, '{printable(names[0])}'. "
            f"Add a folder of images of something else."
        )
    return names


def check_bad(inventory: Inventory, bad_rate: float, max_bad: float) -> None:
    """Refuses data of which more than `max_bad` is bad; both fractions."""
    if inventory.bad and bad_rate > max_bad:
        raise DataError(
            f"At most {max_bad:.3g} of the files may be bad; in '{_root(inventory)}' {bad_rate:.3g} are: "
            f"{bad_files(inventory)}. List them all with `weft data check`, repair or remove them, or raise max_bad."
        )


def check_empty(names: list[str], pictures: list[Picture], inventory: Inventory) -> None:
    """Refuses classes without a picture to learn from: their numbers would mean nothing, or shift all others."""
    filled = {picture.class_name for picture in pictures if picture.split != "val"}
    if empty := [name for name in names if name not in filled]:
        where = " in train/" if inventory.val_name else ""
        raise DataError(
            f"Every class must hold at least one good image{where}; empty: {some(empty)}. "
            f"Add images, remove the folder, or keep the empty class in the list with allow_empty_class."
        )


def check_sides(inventory: Inventory, num_train: int, num_val: int) -> None:
    """Refuses a side without a single good picture."""
    if num_train and num_val:
        return
    sides = ("train/", f"{inventory.val_name}/") if inventory.val_name else ("the training part", "the held-out part")
    side = sides[num_train > 0]
    raise DataError(
        f"Training needs good images on both sides; {side} of '{_root(inventory)}' has none ({num_train} for training, "
        f"{num_val} held out). Add images, two or more per class."
    )


def survey_notes(inventory: Inventory, names: list[str], val: list[Picture]) -> list[str]:
    """What a person should know about data that was accepted, a sentence each."""
    notes = []
    if inventory.bad:
        notes.append(f"{count(len(inventory.bad), 'bad file')} left out: {bad_files(inventory)}.")
    if missing := [name for name in names if name not in {picture.class_name for picture in val}]:
        notes.append(f"No held-out image of {count(len(missing), 'class', 'classes')}: {some(missing)}.")
    if inventory.unread:
        notes.append(f"Not read, since train/ is there: {some(f'{name}/' for name in inventory.unread)}.")
    if inventory.ignored:
        notes.append(f"Ignored, neither named nor made like an image: {tally(extensions(inventory.ignored))}.")
    if inventory.skipped:
        notes.append(f"Passed over: {tally(inventory.skipped, SKIPPED)}.")
    if inventory.notes:
        notes.append(f"Read as a person sees them: {tally(inventory.notes, NOTES)}.")
    return notes


def copy_notes(inventory: Inventory, train: list[Picture], val: list[Picture]) -> list[str]:
    """What pictures that are there twice do to a training and to its number, a sentence each."""
    learnt, held = {picture.key for picture in train}, {picture.key for picture in val}
    class_of = {picture.key: picture.class_name for picture in train + val}
    leaked = [key for keys in inventory.copies if learnt.intersection(keys) for key in keys if key in held]
    torn = [keys for keys in inventory.copies if len({class_of[key] for key in keys if key in class_of}) > 1]
    notes = []
    if leaked:
        notes.append(
            f"{count(len(leaked), 'held-out image')}, the same to the byte, {'is' if len(leaked) == 1 else 'are'} also "
            f"learned from, and {'flatters' if len(leaked) == 1 else 'flatter'} the result: {some(leaked)}."
        )
    if torn:
        several = count(len(torn), "image is", "images are")
        notes.append(f"{several} in several classes at once, the same to the byte: {some(map(same_bytes, torn))}.")
    return notes


def same_bytes(keys: Sequence[str]) -> str:
    """`cats/1.jpg = cats/7.jpg`; of many the first few, and how many more."""
    more = f" = {len(keys) - NUM_NAMED:,} more" if len(keys) > NUM_NAMED else ""
    return " = ".join(keys[:NUM_NAMED]) + more


def bad_files(inventory: Inventory) -> str:
    """Counts by reason, and the first few by name."""
    by_reason = tally(Counter(file.reason for file in inventory.bad))
    return f"{by_reason} ({some(file.key for file in inventory.bad)})"


def tally(counts: Mapping[str, int], meaning: Mapping[str, str] | None = None) -> str:
    """`3 cmyk, 1 alpha`, the most frequent first, with what each means in brackets if told."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n:,} {name}{f' ({meaning[name]})' if meaning else ''}" for name, n in ordered)


def extensions(counts: Mapping[str, int]) -> dict[str, int]:
    """The keys of `Inventory.ignored` as people write them: `.txt`, `without extension`."""
    return {f".{printable(name)}" if name else "without extension": n for name, n in counts.items()}


def some(names: Iterable[str]) -> str:
    """The first few, printable, and how many more."""
    listed = [printable(name) for name in names]
    more = f" and {len(listed) - NUM_NAMED:,} more" if len(listed) > NUM_NAMED else ""
    return ", ".join(listed[:NUM_NAMED]) + more


def count(number: int, one: str, many: str = "") -> str:
    """`1 image`, `2,000 images`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def _root(inventory: Inventory) -> str:
    return printable(str(inventory.root))
