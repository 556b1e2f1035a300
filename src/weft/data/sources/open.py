"""Open any dataset (folder, table, shards, library, digits) as a training and a validation set."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.data.images import MAX_PIXELS
from weft.data.images.decode import BadImage
from weft.data.index.checks import (
    check_bad,
    check_empty,
    check_folds,
    check_names,
    check_nesting,
    check_numbers,
    check_sides,
    class_list,
    copy_notes,
    group_notes,
    match_forms,
    survey_notes,
)
from weft.data.index.inventory import (
    ImageEntry,
    Inventory,
    Progress,
    decode_entries,
    existing,
    inspect,
    scan_folder,
)
from weft.data.index.source import BadFile, Sample, Splits, lost_error
from weft.data.index.split import (
    GroupError,
    group_names,
    grouped_fold,
    grouped_share,
    grouped_split,
    stratified_fold,
    stratified_share,
    stratified_split,
    stratified_subset,
)
from weft.data.sources.catalog import CATALOG
from weft.data.sources.digits import DIGITS, open_digits
from weft.data.sources.library import open_hf, open_torchvision
from weft.data.sources.listing import Listing, Reader
from weft.data.sources.parquet import is_parquet_folder
from weft.data.sources.shards import is_shards, open_shards, shard_paths
from weft.data.sources.table import SUFFIXES, FileReader, open_table
from weft.errors import DataError
from weft.text import count, printable


class KeyedSource:
    """Images that a `Reader` reads by key."""

    def __init__(
        self, reader: Reader, classes: list[str], keys: list[str], labels: list[int], max_pixels: int = MAX_PIXELS
    ):
        self.reader, self.classes, self.keys, self.labels = reader, classes, keys, labels
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, i: int) -> Sample:
        """Return image `i`.

        Raises:
            DataError: the image is missing or cannot be read.
        """
        key = self.keys[i]
        try:
            return Sample(self.reader(key), self.labels[i], key)
        except BadImage as err:
            raise lost_error(key, err) from err
        except OSError as err:
            raise lost_error(key, BadImage("", "unreadable", err.strerror or "")) from err


def open_data(
    data: str | Path,
    *,
    val_fraction: float = 0.2,
    seed: int = 0,
    max_bad: float = 0.1,
    max_pixels: int | None = None,
    limit: int | None = None,
    train_fraction: float = 1.0,
    folds: int | None = None,
    fold: int = 1,
    group: str | None = None,
    image: str | None = None,
    label: str | None = None,
    test: bool = False,
    allow_empty_class: bool = False,
    classes: Sequence[str] | None = None,
    match: Callable[[Sequence[str]], Mapping[str, str]] | None = None,
    evaluate_only: bool = False,
    follow_links: bool = False,
    checked: Inventory | None = None,
    progress: Progress | None = None,
) -> Splits:
    """Open a dataset for training or evaluation. Every image is decoded once to exclude bad files.

    Args:
        data: a folder of class folders, or one with `train/` and optionally `val/` and `test/` that contain class
            folders (names as in `weft.data.index.split_names`); a table (`x.csv`, `x.tsv`, `x.parquet`, a folder of
            .parquet files); tar shards (`x.tar`, `train-{000..009}.tar`, a folder of .tar files);
            `torchvision:NAME`; `hf:NAME`; a name of `weft.data.sources.catalog`; or `digits`, scikit-learn's
            handwritten digits. A file or folder of such a name comes first.
        val_fraction: fraction of each class for validation, between 0 and 1, if the dataset defines no split.
        seed: seed of that split, and of the choice by `limit` and `train_fraction`.
        max_bad: largest accepted fraction of bad files, 0 to 1.
        max_pixels: images with more pixels (height x width) count as bad; None for 100 million.
        limit: maximum number of training images and of validation images, taken round-robin from the classes.
        train_fraction: fraction of each class to use for training, above 0; validation images are all used.
        folds: number of folds of a cross-validation, at least 2, for a dataset without a split; `fold` is then the
            validation set, in place of `val_fraction`.
        fold: from 1 to `folds`.
        group: images of the same group are on the same side of the split: a column of the table, or a regular
            expression whose match in the image's key (the parenthesised part, if there is one) names the group.
        image, label: columns of a table, of images and of classes; None to recognise them.
        test: hold out the test split in place of the validation split.
        allow_empty_class: keep classes without a usable image in the list; by default they are an error.
        classes: class names in the order of the labels, e.g. a trained model's; by default the class folders (of
            `train/`), sorted alphabetically, or by value if all are numbers (`2` before `10`). With them, data whose
            images are all of `train` have no validation images, unless `evaluate_only` is given.
        match: function from the class names of the data to a mapping from each to a name of `classes`; None: they are
            equal up to the Unicode form of their letters. It may raise DataError.
        evaluate_only: accept data without images in one of the splits, since nothing is trained on it.
        follow_links: also enter folders outside `data` through links.
        checked: result of `inspect_data` for the same data: no image is decoded again.
        progress: called regularly with (number checked, total).

    Raises:
        DataError: no usable data, more bad files than `max_bad`, a class that is empty or only in val, or a single
            class.
        UsageError: a number out of its range.
    """
    check_numbers(val_fraction, max_bad, limit, train_fraction, folds, fold)
    max_pixels = max_pixels or MAX_PIXELS
    listing = _open_listing(data, group, image, label, test=test)
    if listing is None:
        inventory, entries = scan_folder(data, follow_links=follow_links, test=test)
        reader: Reader = FileReader(inventory.root)
    else:
        inventory, entries, reader = listing.inventory(), listing.entries, listing.read
    if match is None and classes is not None:
        match = functools.partial(match_forms, classes)
    own = {} if match is None else match(sorted({name for names in inventory.classes.values() for name in names}))
    if any(name != other for name, other in own.items()):
        entries = [entry._replace(class_name=own.get(entry.class_name, "")) for entry in entries]
        inventory.classes = {split: sorted({own[name] for name in names}) for split, names in inventory.classes.items()}
    is_given = "val" in inventory.classes
    nesting = check_nesting(inventory, classes)
    names = class_list(inventory, entries, classes)
    if listing is not None and classes is None:
        names = listing.classes  # in the dataset's own order
    inside = [entry for entry in entries if entry.class_name]
    group_of = None if group is None else _groups(inside, group, listing, any_number=evaluate_only)

    def made(folds: int | None, fold: int) -> list[list[ImageEntry]]:
        return _made(inside, val_fraction, folds, fold, seed, group_of)

    if classes is not None and not evaluate_only and {entry.split for entry in entries} == {"train"}:
        parts = [inside, []]
    elif not is_given:
        parts = made(folds, fold)
    elif folds is None:
        parts = _given(inside)
    else:
        raise DataError(
            f"Folds need a dataset without a split of its own; '{printable(os.fspath(data))}' has a validation set."
            " Pass a folder with the class folders alone, or leave out --folds."
        )
    if train_fraction < 1:
        parts[0] = _share_of(parts[0], train_fraction, seed)
    if limit is not None:
        parts = [_limited(part, limit, seed) for part in parts]
    bad_before, chosen = len(inventory.bad), parts[0] + parts[1]
    if checked is None:
        read = None if listing is None else listing.read
        decode_entries(inventory, sorted(chosen), max_pixels=max_pixels, progress=progress, read=read)
    else:
        _adopt(inventory, chosen, checked)
    # with a limit only some are decoded: extrapolate their rate
    rate_before = bad_before / (bad_before + len(entries))
    rate_decoded = (len(inventory.bad) - bad_before) / max(len(chosen), 1)
    check_bad(inventory, 1 - (1 - rate_before) * (1 - rate_decoded), max_bad)
    bad = {file.key for file in inventory.bad}

    def readable(parts: list[list[ImageEntry]]) -> tuple[list[ImageEntry], list[ImageEntry]]:
        train, val = ([entry for entry in part if entry.key not in bad] for part in parts)
        return (train, val) if is_given else _ensure_train_images(train, val, group_of)

    train, val = readable(parts)
    if classes is None and not evaluate_only:
        check_names(names)
    if not allow_empty_class and classes is None:
        check_empty(names, train if limit is None and train_fraction == 1 else inside, inventory)
    if folds is not None and not evaluate_only:

        def held_out(folds: int) -> list[int]:
            return [len(readable(made(folds, number))[1]) for number in range(1, folds + 1)]

        check_folds(inventory, folds, held_out, is_grouped=group_of is not None)
    if not train + val or not (evaluate_only or (classes is not None and not is_given)):
        check_sides(inventory, len(train), len(val), is_grouped=group_of is not None)
    how = f"{100 * val_fraction:.0f} %" if folds is None else f"fold {fold} of {folds}"
    notes = [_split_note(train, val, names, f"{how} made with seed {seed}", inventory, is_folder=listing is None)]
    if group_of is not None:
        notes += group_notes(group_of, train, val)
    notes += survey_notes(inventory, names, val)
    parts_held_out = [val]
    if folds is not None and inventory.copies:
        parts_held_out = [readable(made(folds, number))[1] for number in range(1, folds + 1)]
    notes += copy_notes(inventory, train, parts_held_out)
    if len(inside) < len(entries):
        notes.append(f"Not used, because outside all class folders: {count(len(entries) - len(inside), 'image')}.")
    notes += nesting + _name_notes(data) + ([] if listing is None else listing.notes)
    train_source, val_source = (_source(reader, part, names, max_pixels) for part in (train, val))
    groups = [None if group_of is None else [group_of[entry.key] for entry in part] for part in (train, val)]
    return Splits(
        train_source,
        val_source,
        names,
        notes,
        _with_split(inventory.bad, parts),
        is_given,
        *groups,
        sizes=inventory.sizes,
        values=inventory.values,
    )


def inspect_data(
    data: str | Path,
    *,
    image: str | None = None,
    label: str | None = None,
    decode: bool = True,
    max_pixels: int = MAX_PIXELS,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Inventory:
    """Check every image of a dataset; as `inspect` for a folder, also for the other sources of `open_data`.

    Args:
        data, image, label: as in `open_data`.
        decode, max_pixels, follow_links, progress: as in `inspect`; without `decode`, the images of other sources than
            a folder are not read.

    Raises:
        DataError: the dataset does not exist or cannot be read.
    """
    listing = _open_listing(data, None, image, label)
    if listing is None:
        found = inspect(data, decode=decode, max_pixels=max_pixels, follow_links=follow_links, progress=progress)
        found.remarks = _nesting_notes(found) + _name_notes(data)
        return found
    inventory = listing.inventory()
    inventory.remarks = _nesting_notes(inventory) + listing.notes
    if decode:
        decode_entries(inventory, listing.entries, max_pixels=max_pixels, progress=progress, read=listing.read)
    else:
        inventory.good = list(listing.entries)
    return inventory


def problem_of(
    data: str | Path,
    checked: Inventory,
    *,
    image: str | None = None,
    label: str | None = None,
    follow_links: bool = False,
) -> str:
    """Return the message with which training refuses a dataset; an empty text if it can be trained on.

    Args:
        data, image, label, follow_links: as in `open_data`.
        checked: result of `inspect_data`.
    """
    try:
        open_data(data, image=image, label=label, follow_links=follow_links, checked=checked)
    except DataError as error:
        return str(error)
    return ""


def _nesting_notes(inventory: Inventory) -> list[str]:
    try:
        return check_nesting(inventory, None)
    except DataError:  # `problem_of` says it
        return []


def _adopt(inventory: Inventory, entries: list[ImageEntry], checked: Inventory) -> None:
    """Add images to `good` or `bad` of an inventory, as a check of the same data found them."""
    bad = {file.key: file for file in checked.bad}
    inventory.good += sorted(entry for entry in entries if entry.key not in bad)
    inventory.bad += [bad[entry.key] for entry in entries if entry.key in bad]
    inventory.bad.sort()
    inventory.copies, inventory.notes = checked.copies, checked.notes
    inventory.sizes, inventory.values = checked.sizes, checked.values


def check_exists(data: str | Path) -> None:
    """Refuse a folder, table or shard that does not exist. Datasets by name are not looked up.

    Raises:
        DataError: there is none.
    """
    text = os.fspath(data)
    kind = text.partition(":")[0]
    if data == "digits" or kind in ("torchvision", "hf") or text in CATALOG:
        return
    files = shard_paths(text) if is_shards(text) else [Path(text)] if text.endswith(SUFFIXES) else []
    if missing := [file for file in files if not os.path.lexists(file)]:
        raise DataError(f"The data must exist; '{printable(str(missing[0]))}' does not. Check the path.")
    if not files:
        existing(text)


def _open_listing(
    data: str | Path, group: str | None, image: str | None = None, label: str | None = None, *, test: bool = False
) -> Listing | None:
    """Open the listing that `data` names, with its held-out side; None for a folder of images.

    Args:
        data, image, label, test: as in `open_data`.
        group: may be a column of a table.
    """
    listing = _listing_of(os.fspath(data), group, image, label)
    return None if listing is None else listing.with_held_out(test=test)


def _listing_of(text: str, group: str | None, image: str | None, label: str | None) -> Listing | None:
    path = Path(text)
    if is_shards(text):
        return open_shards(text)
    if text.endswith(SUFFIXES) and (path.is_file() or not path.exists()):
        return open_table(path, group, image, label)
    if os.path.lexists(text):  # comes before the datasets of the same name
        return open_table(path, group, image, label) if is_parquet_folder(path) else None
    kind, _, address = text.partition(":")
    if kind == "torchvision":
        return open_torchvision(address)
    if kind == "hf":
        return open_hf(address, image, label)
    if text == DIGITS:
        return open_digits()
    return _known(text) if text in CATALOG else None


def _name_notes(data: str | Path) -> list[str]:
    """Return a note if a file or folder has the name of a known dataset."""
    text = os.fspath(data)
    if text not in (DIGITS, *CATALOG) or not os.path.lexists(text):
        return []
    kind = "folder" if os.path.isdir(text) else "file"
    return [f"'{text}' is the {kind} here, not the known dataset of that name: run weft elsewhere to use the dataset."]


def _known(name: str) -> Listing:
    """Open a dataset of the papers; add a note if its sizes differ from theirs."""
    known = CATALOG[name]
    if not known.source:
        raise DataError(f"weft cannot open {name} by name; pass its files as DATA: {known.note.rstrip('.')}.")
    listing = open_torchvision(known.source.partition(":")[2])
    counts = Counter(entry.split for entry in listing.entries)
    actual = (len(listing.classes), counts["train"], counts["val"])
    if actual != (stated := (known.classes, known.train, known.val)):
        expected = " / ".join(f"{number:,}" for number in stated)
        listing.notes.append(
            f"{name} has {' / '.join(f'{number:,}' for number in actual)} classes / images for training / held out;"
            f" the papers have {expected}."
        )
    return listing


def _given(entries: list[ImageEntry]) -> list[list[ImageEntry]]:
    return [[entry for entry in entries if entry.split == split] for split in ("train", "val")]


def _made(
    entries: list[ImageEntry],
    val_fraction: float,
    folds: int | None,
    fold: int,
    seed: int,
    group_of: dict[str, str] | None,
) -> list[list[ImageEntry]]:
    """Return training and validation images: a share of each class, or a fold; whole groups if there are any."""
    keys, labels = [entry.key for entry in entries], _numbers(entries)
    if group_of is not None:
        groups = [group_of[key] for key in keys]
        if folds is None:
            held_out = grouped_share(labels, groups, val_fraction, seed)
        else:
            held_out = grouped_fold(labels, groups, folds, fold, seed)
        sides = grouped_split(keys, labels, groups, held_out)
    elif folds is not None:
        sides = stratified_fold(keys, labels, folds, fold, seed)
    else:
        sides = stratified_split(keys, labels, val_fraction, seed)
    return [[entries[i] for i in side] for side in sides]


def _groups(entries: list[ImageEntry], group: str, listing: Listing | None, *, any_number: bool) -> dict[str, str]:
    """Return the group of every image by key, from the column of a table or from the key."""
    if listing is not None and listing.groups is not None:
        names = listing.groups
    else:
        names = group_names([entry.key for entry in entries], group)
    number = len({names[entry.key] for entry in entries})
    if number < 2 and not any_number:
        raise GroupError(
            f"The groups of --group must allow a split; with '{printable(group)}', all"
            f" {count(len(entries), 'image')} are in one. Choose a column or a pattern that gives more groups."
        )
    return names


def _limited(entries: list[ImageEntry], limit: int, seed: int) -> list[ImageEntry]:
    names = [entry.class_name for entry in entries]
    return [entries[i] for i in stratified_subset([entry.key for entry in entries], names, limit, seed)]


def _share_of(entries: list[ImageEntry], share: float, seed: int) -> list[ImageEntry]:
    return [entries[i] for i in stratified_share([p.key for p in entries], _numbers(entries), share, seed)]


def _numbers(entries: list[ImageEntry]) -> list[int]:
    """Return a class index for every entry, by sorted class name."""
    order = {name: number for number, name in enumerate(sorted({entry.class_name for entry in entries}))}
    return [order[entry.class_name] for entry in entries]


def _ensure_train_images(
    train: list[ImageEntry],
    val: list[ImageEntry],
    group_of: dict[str, str] | None,
) -> tuple[list[ImageEntry], list[ImageEntry]]:
    """Move the validation images of classes without a training image to train (for splits made here).

    Whole groups are moved.
    """
    if group_of is not None:
        entries = [*train, *val]
        keys = [entry.key for entry in entries]
        held_out = list(range(len(train), len(entries)))
        sides = grouped_split(keys, _numbers(entries), [group_of[key] for key in keys], held_out)
        train, val = ([entries[i] for i in side] for side in sides)
        return train, val
    train_classes = {entry.class_name for entry in train}
    moved = [entry for entry in val if entry.class_name not in train_classes]
    return sorted(train + moved), [entry for entry in val if entry.class_name in train_classes]


def _source(reader: Reader, entries: list[ImageEntry], names: list[str], max_pixels: int) -> KeyedSource:
    number = {name: i for i, name in enumerate(names)}
    keys, labels = [p.key for p in entries], [number[p.class_name] for p in entries]
    return KeyedSource(reader, names, keys, labels, max_pixels)


def _with_split(bad: list[BadFile], parts: list[list[ImageEntry]]) -> tuple[BadFile, ...]:
    """Return bad files with the split that they were assigned to; empty for files rejected by their first bytes."""
    sides = {entry.key: side for side, part in zip(("train", "val"), parts, strict=True) for entry in part}
    return tuple(file._replace(split=file.split or sides.get(file.key, "")) for file in bad)


def _split_note(
    train: list[ImageEntry],
    val: list[ImageEntry],
    names: list[str],
    how: str,
    inventory: Inventory,
    *,
    is_folder: bool,
) -> str:
    counts = f"{len(train):,} images in {len(names)} classes for training, {len(val):,} held out"
    if inventory.val_name:
        folders = f", {inventory.train_name}/ and {inventory.val_name}/" if is_folder else ""
        return f"{counts}: the dataset's own split{folders}."
    return f"{counts}: a stratified split of {how}, because the dataset has none."
