"""From `photos/` or `digits` to pictures to train on and pictures held out, with one list of classes."""

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
from weft.data.index.inventory import Inventory, Picture, Progress, examine, survey
from weft.data.index.source import BadFile, Sample, Splits, lost, stratified_share, stratified_split, stratified_subset
from weft.data.sources.catalog import CATALOG
from weft.data.sources.digits import open_digits
from weft.data.sources.library import open_hf, open_torchvision
from weft.data.sources.listing import Reader, Shelf, in_order
from weft.data.sources.shards import is_shards, open_shards
from weft.data.sources.table import SUFFIXES, FileReader, open_table
from weft.errors import DataError


class KeyedSource:
    """Pictures by their keys, from wherever a reader reads them."""

    def __init__(self, reader: Reader, classes: list[str], keys: list[str], labels: list[int]):
        self.reader, self.classes, self.keys, self.labels = reader, classes, keys, labels

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, i: int) -> Sample:
        """Picture `i`.

        Raises:
            DataError: it has vanished or cannot be read.
        """
        key = self.keys[i]
        try:
            return Sample(self.reader(key), self.labels[i], key)
        except BadImage as err:
            raise lost(key, err) from err
        except OSError as err:
            raise lost(key, BadImage("", "unreadable", err.strerror or "")) from err


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
    """Opens pictures for training or evaluation. Every picture is decoded once first, and bad files are left out.

    Args:
        data: a folder of class folders; or one with `train/` and perhaps `val/` (`valid/`, `validation/`, `test/`:
            the first that exists) in it, each holding class folders; a table (`x.csv`, `x.tsv`, `x.parquet`); tar
            shards (`x.tar`, `train-{000..009}.tar`, https URLs of such, a folder of such); `torchvision:NAME`;
            `hf:NAME`; a name of `weft.data.sources.catalog`; or `digits`, scikit-learn's handwriting. (A folder
            of that name is `./digits`.)
        val_fraction: what part of each class is held out where the data has no split, between 0 and 1. `digits` has
            its own.
        seed: decides that split, and what `limit` and `train_fraction` take.
        max_bad: the largest tolerated fraction of bad files.
        limit: take at most so many pictures for train and so many for val, in turn from every class.
        train_fraction: what part of each class to take for train, above 0; of val all is taken.
        allow_empty_class: a class folder without a good picture keeps its place in the list; by default it is an error.
        classes: the list to label by, such as a trained model's; by default the class folders (of `train/`), sorted.
        evaluate_only: nothing is trained on the data, so it needs no images on both sides of the split. Class folders
            that are all numbers are ordered by value (`2` before `10`), as the outputs of weights without class names
            are; for training, folders are sorted alphabetically. Tables and shards whose classes are numbers are always
            ordered by value.
        follow_links: also enter folders outside `data` that links lead to.
        progress: called now and then with (checked, of how many).

    Raises:
        DataError: no usable data there, or more than `max_bad` of it bad; classes that are empty, only in val, or
            only one.
        UsageError: a number out of its range.
    """
    check_numbers(val_fraction, max_bad, limit, train_fraction)
    shelf = _shelf(data)
    if shelf is None:
        inventory, pictures = survey(data, follow_links=follow_links)
        reader: Reader = FileReader(inventory.root)
    else:
        inventory, pictures, reader = shelf.inventory(), shelf.pictures, shelf.read
    is_given = "val" in inventory.classes
    names = class_list(inventory, pictures, classes)
    if shelf is not None and classes is None:
        names = shelf.classes  # in the order of the data itself
    elif evaluate_only and classes is None:
        names = in_order(set(names))
    inside = [picture for picture in pictures if picture.class_name]
    parts = _given(inside) if is_given else _made(inside, val_fraction, seed)
    if train_fraction < 1:
        parts[0] = _share_of(parts[0], train_fraction, seed)
    if limit is not None:
        parts = [_limited(part, limit, seed) for part in parts]
    bad_before, chosen = len(inventory.bad), parts[0] + parts[1]
    read = None if shelf is None else shelf.read
    examine(inventory, sorted(chosen), progress=progress, read=read)
    # with a limit only some are decoded: what these show holds for the rest
    rate_before = bad_before / (bad_before + len(pictures))
    rate_decoded = (len(inventory.bad) - bad_before) / max(len(chosen), 1)
    check_bad(inventory, 1 - (1 - rate_before) * (1 - rate_decoded), max_bad)
    good = set(inventory.good)
    train, val = ([picture for picture in part if picture in good] for part in parts)
    if not is_given:
        train, val = _spared(train, val)
    if not allow_empty_class and classes is None:
        check_empty(names, train if limit is None and train_fraction == 1 else inside, inventory)
    if not train + val or not (evaluate_only or (classes is not None and not is_given)):
        check_sides(inventory, len(train), len(val))
    notes = [_split_note(train, val, names, val_fraction, seed, inventory), *survey_notes(inventory, names, val)]
    notes += copy_notes(inventory, train, val)
    if len(inside) < len(pictures):
        notes.append(f"Not used, since outside all class folders: {count(len(pictures) - len(inside), 'image')}.")
    notes += [] if shelf is None else shelf.notes
    train_source, val_source = (_source(reader, part, names) for part in (train, val))
    return Splits(train_source, val_source, names, notes, _attributed(inventory.bad, parts), is_given)


def _shelf(data: str | Path) -> Shelf | None:
    """What `data` names, if it is not a folder of pictures."""
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


def _known(name: str) -> Shelf:
    """A data set of the papers."""
    known = CATALOG[name]
    if not known.source:
        raise DataError(f"weft knows {name} by name, but not where it lies: {known.note}. Give that as DATA.")
    shelf = open_torchvision(known.source.partition(":")[2])
    counts = Counter(picture.split for picture in shelf.pictures)
    found = (len(shelf.classes), counts["train"], counts["val"])
    if found != (stated := (known.classes, known.train, known.val)):
        said = " / ".join(f"{number:,}" for number in stated)
        shelf.notes.append(
            f"{name} has {' / '.join(f'{number:,}' for number in found)} classes / images for training / held out;"
            f" the papers have {said}."
        )
    return shelf


def _given(pictures: list[Picture]) -> list[list[Picture]]:
    return [[picture for picture in pictures if picture.split == split] for split in ("train", "val")]


def _made(pictures: list[Picture], val_fraction: float, seed: int) -> list[list[Picture]]:
    sides = stratified_split([p.key for p in pictures], _numbers(pictures), val_fraction, seed)
    return [[pictures[i] for i in side] for side in sides]


def _limited(pictures: list[Picture], limit: int, seed: int) -> list[Picture]:
    return [pictures[i] for i in stratified_subset([p.key for p in pictures], _numbers(pictures), limit, seed)]


def _share_of(pictures: list[Picture], share: float, seed: int) -> list[Picture]:
    return [pictures[i] for i in stratified_share([p.key for p in pictures], _numbers(pictures), share, seed)]


def _numbers(pictures: list[Picture]) -> list[int]:
    """A number per class, in the order of the names."""
    order = {name: number for number, name in enumerate(sorted({picture.class_name for picture in pictures}))}
    return [order[picture.class_name] for picture in pictures]


def _spared(train: list[Picture], val: list[Picture]) -> tuple[list[Picture], list[Picture]]:
    """A split of our own holds out nothing of a class that has nothing left to learn from."""
    learnt = {picture.class_name for picture in train}
    spared = [picture for picture in val if picture.class_name not in learnt]
    return sorted(train + spared), [picture for picture in val if picture.class_name in learnt]


def _source(reader: Reader, pictures: list[Picture], names: list[str]) -> KeyedSource:
    number = {name: i for i, name in enumerate(names)}
    keys, labels = [p.key for p in pictures], [number[p.class_name] for p in pictures]
    return KeyedSource(reader, names, keys, labels)


def _attributed(bad: list[BadFile], parts: list[list[Picture]]) -> tuple[BadFile, ...]:
    """Bad files with the side they would have been on; empty for those that no first look took for a picture."""
    sides = {picture.key: side for side, part in zip(("train", "val"), parts, strict=True) for picture in part}
    return tuple(file._replace(split=file.split or sides.get(file.key, "")) for file in bad)


def _split_note(
    train: list[Picture], val: list[Picture], names: list[str], val_fraction: float, seed: int, inventory: Inventory
) -> str:
    counts = f"{len(train):,} images in {len(names)} classes for training, {len(val):,} held out"
    if inventory.val_name:
        return f"{counts}: the data's own split, train/ and {inventory.val_name}/."
    return f"{counts}: a stratified split of {val_fraction:.0%} made with seed {seed}, since the data has none."
