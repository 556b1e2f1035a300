"""From `photos/` or `digits` to pictures to train on and pictures held out, with one list of classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from weft.data.checks import check_bad, check_empty, check_numbers, check_sides, class_list, count, survey_notes
from weft.data.digits import open_digits
from weft.data.image import MAX_PIXELS, BadImage, open_regular
from weft.data.inventory import Inventory, Picture, Progress, examine, survey
from weft.data.source import BadFile, Sample, Splits, lost, stratified_split, stratified_subset

BUILT_IN = ("digits",)


class FolderSource:
    """Pictures of a folder, by their keys (paths below it)."""

    def __init__(self, root: str | Path, classes: list[str], keys: list[str], labels: list[int]):
        self.root, self.classes, self.keys, self.labels = os.fspath(root), classes, keys, labels

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, i: int) -> Sample:
        """Picture `i`.

        Raises:
            DataError: it has vanished or cannot be read.
        """
        key = self.keys[i]
        try:
            with open_regular(os.path.join(self.root, key)) as file:
                return Sample(file.read(), self.labels[i], key)
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
    allow_empty_class: bool = False,
    classes: Sequence[str] | None = None,
    max_pixels: int = MAX_PIXELS,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Splits:
    """Opens pictures for training or evaluation. Every picture is decoded once first, and bad files are left out.

    Args:
        data: a folder of class folders; or one with `train/` and perhaps `val/` (`valid/`, `validation/`, `test/`:
            the first that exists) in it, each holding class folders; or `digits`, scikit-learn's handwriting. (A
            folder of that name is `./digits`.)
        val_fraction: what part of each class is held out where the data has no split, between 0 and 1. `digits` has
            its own.
        seed: decides that split, and what `limit` takes.
        max_bad: the largest tolerated fraction of bad files.
        limit: take at most so many pictures for train and so many for val, in turn from every class.
        allow_empty_class: a class folder without a good picture keeps its place in the list; by default it is an error.
        classes: the list to label by, such as a trained model's; by default the class folders (of `train/`), sorted.
        max_pixels: pictures that claim more are bad.
        follow_links: also enter folders outside `data` that links lead to.
        progress: called now and then with (checked, of how many).

    Raises:
        DataError: no usable data there, or more than `max_bad` of it bad; classes that are empty, only in val, or
            only one.
        UsageError: a number out of its range.
    """
    check_numbers(val_fraction, max_bad, limit)
    if data in BUILT_IN:
        return open_digits(limit=limit, seed=seed, classes=classes)
    inventory, pictures = survey(data, follow_links=follow_links)
    is_given = "val" in inventory.classes
    names = class_list(inventory, pictures, classes)
    inside = [picture for picture in pictures if picture.class_name]
    parts = _given(inside) if is_given else _made(inside, val_fraction, seed)
    if limit is not None:
        parts = [_limited(part, limit, seed) for part in parts]
    bad_before, chosen = len(inventory.bad), parts[0] + parts[1]
    examine(inventory, sorted(chosen), max_pixels=max_pixels, progress=progress)
    # with a limit only some are decoded: what these show holds for the rest
    rate_before = bad_before / (bad_before + len(pictures))
    rate_decoded = (len(inventory.bad) - bad_before) / max(len(chosen), 1)
    check_bad(inventory, 1 - (1 - rate_before) * (1 - rate_decoded), max_bad)
    good = set(inventory.good)
    train, val = ([picture for picture in part if picture in good] for part in parts)
    if not is_given:
        train, val = _spared(train, val)
    if not allow_empty_class and classes is None:
        check_empty(names, inside if limit is not None else train, inventory)
    if classes is None or is_given or not train + val:  # what is only to be evaluated needs no two sides
        check_sides(inventory, len(train), len(val))
    notes = [_split_note(train, val, names, val_fraction, seed, inventory), *survey_notes(inventory, names, val)]
    if len(inside) < len(pictures):
        notes.append(f"Not used, since outside all class folders: {count(len(pictures) - len(inside), 'image')}.")
    train_source, val_source = (_source(inventory, part, names) for part in (train, val))
    return Splits(train_source, val_source, names, notes, _attributed(inventory.bad, parts), is_given)


def _given(pictures: list[Picture]) -> list[list[Picture]]:
    return [[picture for picture in pictures if picture.split == split] for split in ("train", "val")]


def _made(pictures: list[Picture], val_fraction: float, seed: int) -> list[list[Picture]]:
    sides = stratified_split([p.key for p in pictures], _numbers(pictures), val_fraction, seed)
    return [[pictures[i] for i in side] for side in sides]


def _limited(pictures: list[Picture], limit: int, seed: int) -> list[Picture]:
    return [pictures[i] for i in stratified_subset([p.key for p in pictures], _numbers(pictures), limit, seed)]


def _numbers(pictures: list[Picture]) -> list[int]:
    """A number per class, in the order of the names."""
    order = {name: number for number, name in enumerate(sorted({picture.class_name for picture in pictures}))}
    return [order[picture.class_name] for picture in pictures]


def _spared(train: list[Picture], val: list[Picture]) -> tuple[list[Picture], list[Picture]]:
    """A split of our own holds out nothing of a class that has nothing left to learn from."""
    learnt = {picture.class_name for picture in train}
    spared = [picture for picture in val if picture.class_name not in learnt]
    return sorted(train + spared), [picture for picture in val if picture.class_name in learnt]


def _source(inventory: Inventory, pictures: list[Picture], names: list[str]) -> FolderSource:
    number = {name: i for i, name in enumerate(names)}
    keys, labels = [p.key for p in pictures], [number[p.class_name] for p in pictures]
    return FolderSource(inventory.root, names, keys, labels)


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
