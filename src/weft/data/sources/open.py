"""Open any dataset (folder, table, shards, library, digits) as a training and a validation set."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weft.data.images.decode import BadImage
from weft.data.index.checks import (
    check_bad,
    check_empty,
    check_numbers,
    check_sides,
    class_list,
    copy_notes,
    count,
    survey_notes,
)
from weft.data.index.inventory import ImageEntry, Inventory, Progress, decode_entries, scan_folder
from weft.data.index.source import (
    BadFile,
    Sample,
    Splits,
    lost_error,
    stratified_share,
    stratified_split,
    stratified_subset,
)
from weft.data.sources.catalog import CATALOG
from weft.data.sources.digits import open_digits
from weft.data.sources.library import open_hf, open_torchvision
from weft.data.sources.listing import Listing, Reader, sort_class_names
from weft.data.sources.shards import is_shards, open_shards
from weft.data.sources.table import SUFFIXES, FileReader, open_table
from weft.errors import DataError


class KeyedSource:
    """Images that a `Reader` reads by key."""

    def __init__(self, reader: Reader, classes: list[str], keys: list[str], labels: list[int]):
        self.reader, self.classes, self.keys, self.labels = reader, classes, keys, labels

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
    limit: int | None = None,
    train_fraction: float = 1.0,
    allow_empty_class: bool = False,
    classes: Sequence[str] | None = None,
    evaluate_only: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Splits:
    """Open a dataset for training or evaluation. Every image is decoded once to exclude bad files.

    Args:
        data: a folder of class folders, or one with `train/` and optionally `val/` (`valid/`, `validation/`, `test/`:
            the first that exists) that contain class folders; a table (`x.csv`, `x.tsv`, `x.parquet`); tar
            shards (`x.tar`, `train-{000..009}.tar`, https URLs, a folder of .tar files); `torchvision:NAME`;
            `hf:NAME`; a name of `weft.data.sources.catalog`; or `digits`, scikit-learn's handwritten digits (pass a
            folder of that name as `./digits`).
        val_fraction: fraction of each class for validation, between 0 and 1, if the dataset defines no split.
        seed: seed of that split, and of the choice by `limit` and `train_fraction`.
        max_bad: largest accepted fraction of bad files, 0 to 1.
        limit: maximum number of training images and of validation images, taken round-robin from the classes.
        train_fraction: fraction of each class to use for training, above 0; validation images are all used.
        allow_empty_class: keep classes without a usable image in the list; by default they are an error.
        classes: class names in the order of the labels, e.g. a trained model's; by default the class folders (of
            `train/`), sorted.
        evaluate_only: accept data without images in one of the splits, since nothing is trained on it. Class folders
            that are all numbers are then sorted by value (`2` before `10`), as the outputs of weights without class
            names are; for training, folders are sorted alphabetically. Numeric classes of tables and shards
            are always sorted by value.
        follow_links: also enter folders outside `data` through links.
        progress: called regularly with (number checked, total).

    Raises:
        DataError: no usable data, more bad files than `max_bad`, a class that is empty or only in val, or a single
            class.
        UsageError: a number out of its range.
    """
    check_numbers(val_fraction, max_bad, limit, train_fraction)
    listing = _open_listing(data)
    if listing is None:
        inventory, entries = scan_folder(data, follow_links=follow_links)
        reader: Reader = FileReader(inventory.root)
    else:
        inventory, entries, reader = listing.inventory(), listing.entries, listing.read
    is_given = "val" in inventory.classes
    names = class_list(inventory, entries, classes)
    if listing is not None and classes is None:
        names = listing.classes  # in the dataset's own order
    elif evaluate_only and classes is None:
        names = sort_class_names(set(names))
    inside = [entry for entry in entries if entry.class_name]
    parts = _given(inside) if is_given else _made(inside, val_fraction, seed)
    if train_fraction < 1:
        parts[0] = _share_of(parts[0], train_fraction, seed)
    if limit is not None:
        parts = [_limited(part, limit, seed) for part in parts]
    bad_before, chosen = len(inventory.bad), parts[0] + parts[1]
    read = None if listing is None else listing.read
    decode_entries(inventory, sorted(chosen), progress=progress, read=read)
    # with a limit only some are decoded: extrapolate their rate
    rate_before = bad_before / (bad_before + len(entries))
    rate_decoded = (len(inventory.bad) - bad_before) / max(len(chosen), 1)
    check_bad(inventory, 1 - (1 - rate_before) * (1 - rate_decoded), max_bad)
    good = set(inventory.good)
    train, val = ([entry for entry in part if entry in good] for part in parts)
    if not is_given:
        train, val = _ensure_train_images(train, val)
    if not allow_empty_class and classes is None:
        check_empty(names, train if limit is None and train_fraction == 1 else inside, inventory)
    if not train + val or not (evaluate_only or (classes is not None and not is_given)):
        check_sides(inventory, len(train), len(val))
    notes = [_split_note(train, val, names, val_fraction, seed, inventory), *survey_notes(inventory, names, val)]
    notes += copy_notes(inventory, train, val)
    if len(inside) < len(entries):
        notes.append(f"Not used, because outside all class folders: {count(len(entries) - len(inside), 'image')}.")
    notes += [] if listing is None else listing.notes
    train_source, val_source = (_source(reader, part, names) for part in (train, val))
    return Splits(train_source, val_source, names, notes, _with_split(inventory.bad, parts), is_given)


def _open_listing(data: str | Path) -> Listing | None:
    """Open the listing that `data` names; None for a folder of images."""
    if data == "digits":
        return open_digits()
    text = os.fspath(data)
    kind, _, address = text.partition(":")
    if Path(text).is_dir() and not is_shards(text):
        return None
    if kind == "torchvision":
        return open_torchvision(address)
    if kind == "hf":
        return open_hf(address)
    if text.endswith(SUFFIXES) and (Path(text).is_file() or not Path(text).exists()):
        return open_table(Path(text))
    if is_shards(text):
        return open_shards(text)
    if text in CATALOG:
        return _known(text)
    return None


def _known(name: str) -> Listing:
    """Open a dataset of the papers; add a note if its sizes differ from theirs."""
    known = CATALOG[name]
    if not known.source:
        raise DataError(f"weft cannot open {name} by name; pass its files as DATA: {known.note}.")
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


def _made(entries: list[ImageEntry], val_fraction: float, seed: int) -> list[list[ImageEntry]]:
    sides = stratified_split([p.key for p in entries], _numbers(entries), val_fraction, seed)
    return [[entries[i] for i in side] for side in sides]


def _limited(entries: list[ImageEntry], limit: int, seed: int) -> list[ImageEntry]:
    return [entries[i] for i in stratified_subset([p.key for p in entries], _numbers(entries), limit, seed)]


def _share_of(entries: list[ImageEntry], share: float, seed: int) -> list[ImageEntry]:
    return [entries[i] for i in stratified_share([p.key for p in entries], _numbers(entries), share, seed)]


def _numbers(entries: list[ImageEntry]) -> list[int]:
    """Return a class index for every entry, by sorted class name."""
    order = {name: number for number, name in enumerate(sorted({entry.class_name for entry in entries}))}
    return [order[entry.class_name] for entry in entries]


def _ensure_train_images(train: list[ImageEntry], val: list[ImageEntry]) -> tuple[list[ImageEntry], list[ImageEntry]]:
    """Move the validation images of classes without a training image to train (for splits made here)."""
    train_classes = {entry.class_name for entry in train}
    moved = [entry for entry in val if entry.class_name not in train_classes]
    return sorted(train + moved), [entry for entry in val if entry.class_name in train_classes]


def _source(reader: Reader, entries: list[ImageEntry], names: list[str]) -> KeyedSource:
    number = {name: i for i, name in enumerate(names)}
    keys, labels = [p.key for p in entries], [number[p.class_name] for p in entries]
    return KeyedSource(reader, names, keys, labels)


def _with_split(bad: list[BadFile], parts: list[list[ImageEntry]]) -> tuple[BadFile, ...]:
    """Return bad files with the split that they were assigned to; empty for files rejected by their first bytes."""
    sides = {entry.key: side for side, part in zip(("train", "val"), parts, strict=True) for entry in part}
    return tuple(file._replace(split=file.split or sides.get(file.key, "")) for file in bad)


def _split_note(
    train: list[ImageEntry],
    val: list[ImageEntry],
    names: list[str],
    val_fraction: float,
    seed: int,
    inventory: Inventory,
) -> str:
    counts = f"{len(train):,} images in {len(names)} classes for training, {len(val):,} held out"
    if inventory.val_name:
        return f"{counts}: the dataset's own split, train/ and {inventory.val_name}/."
    return f"{counts}: a stratified split of {val_fraction:.0%} made with seed {seed}, because the dataset has none."
