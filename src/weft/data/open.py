"""Open any dataset (folder, table, shards, library, digits) as a training and a validation set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from weft.data.checks import (
    check_bad,
    check_empty,
    check_folds,
    check_names,
    check_nesting,
    check_sides,
    class_list,
    copy_notes,
    match_forms,
    split_notes,
    survey_notes,
)
from weft.data.folder import existing, open_folder
from weft.data.formats import MAX_PIXELS
from weft.data.groups import GroupError, groups_of
from weft.data.index import DECODED, HEADER, UNKNOWN, Progress
from weft.data.inventory import Inventory, check_images
from weft.data.library import DIGITS, open_digits, open_hf, open_torchvision
from weft.data.remote import is_remote
from weft.data.shards import CACHE_BYTES, ShardReader, is_shards, open_shards, shard_paths
from weft.data.source import KeyedSource, Splits
from weft.data.split import DEFAULT, Side, SplitPlan, assign, limited, with_trained_classes
from weft.data.table import SUFFIXES, open_table
from weft.data.tabular import PARQUET
from weft.data.tree import is_folder_of
from weft.errors import DataError, UsageError
from weft.text import count, printable

ALIASES = {
    "imagenet": "ImageNet",
    "cars": "StanfordCars",
    "flowers": "Flowers102",
    "pets": "OxfordIIITPet",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}  # datasets of the papers by name -> dataset of torchvision


Check = Literal["auto", "none", "header", "decode"]
"""How far images are checked before they are used."""
LEVELS = {"none": UNKNOWN, "header": HEADER, "decode": DECODED}
MOST_DECODED = 20_000  # images; of more, only the headers are checked by default


def open_data(
    data: str | Path,
    plan: SplitPlan = DEFAULT,
    *,
    image: str | None = None,
    label: str | None = None,
    test: bool = False,
    check: Check = "auto",
    takes_next: bool | None = None,
    only: Literal["train", "val"] | None = None,
    max_bad: float = 0.1,
    max_pixels: int | None = None,
    classes: Sequence[str] | None = None,
    match: Callable[[Sequence[str]], Mapping[str, str]] | None = None,
    evaluate_only: bool = False,
    follow_links: bool = False,
    cache_bytes: int = CACHE_BYTES,
    progress: Progress | None = None,
) -> Splits:
    """Open a dataset for training or evaluation. Images are checked, to exclude bad files. The results are kept in the
    cache, and files that did not change since are not read again.

    Args:
        data: a folder of class folders, or one with `train/` and optionally `val/` and `test/` that contain class
            folders (names as in `weft.data.split_names`); a table (`x.csv`, `x.tsv`, `x.parquet`, a folder of
            .parquet files); tar shards (`x.tar`, `train-{000..009}.tar`, a folder of .tar files);
            `torchvision:NAME`; `hf:NAME`; a name in `ALIASES`; or `digits`, scikit-learn's handwritten digits. A file
            or folder of such a name comes first.
        plan: which images are held out, and how many are used.
        image, label: columns of a table, of images and of classes; None to recognise them.
        test: hold out the test split in place of the validation split.
        check: `decode`: every image is decoded once. `header`: only the header of its file is read. `none`: images are
            recognised by their names, and no file is opened. `auto`: `decode` for up to 20,000 images, else `header`.
        takes_next: in place of a training image that turns out to be damaged later, use the next one of its class; None
            if nothing is trained, so that no error advises it.
        only: read only the training or the held-out images of data that have a split of their own.
        max_bad: largest accepted fraction of bad files, 0 to 1.
        max_pixels: images with more pixels (height x width) count as bad; None for 100 million.
        classes: class names in the order of the labels, e.g. a trained model's; by default the class folders (of
            `train/`), sorted alphabetically, or by value if all are numbers (`2` before `10`). With them, data whose
            images are all of `train` have no validation images, unless `evaluate_only` is given.
        match: function from the class names of the data to a mapping from each to a name of `classes`; None: they are
            equal up to the Unicode form of their letters. It may raise DataError.
        evaluate_only: accept data without images in one of the splits, or of a class, since nothing is trained on it.
        follow_links: also enter folders outside `data` through links.
        cache_bytes: bytes of shards on a server that are kept on disk.
        progress: called regularly with (number checked, total).

    Raises:
        DataError: no usable data, more bad files than `max_bad`, a class that is empty or only in val, or a single
            class.
        UsageError: a number out of its range.
    """
    if not 0 <= max_bad <= 1:
        raise UsageError(
            f"max_bad must be between 0 and 1; got {max_bad}. It is the largest accepted fraction of bad files."
        )
    inventory = _opened(
        data,
        image,
        label,
        group=None if plan.series else plan.group,
        test=test,
        follow_links=follow_links,
        sniffs=check != "none",
        cache_bytes=cache_bytes,
    )
    if classes is not None:
        own = sorted({name for names in inventory.classes.values() for name in names})
        new = match(own) if match is not None else match_forms(classes, own)
        inventory.class_names = [new.get(name, "") for name in inventory.class_names]
        inventory.classes = {split: sorted({new[name] for name in names}) for split, names in inventory.classes.items()}
    return _split(
        inventory,
        plan,
        classes=classes,
        evaluate_only=evaluate_only,
        max_bad=max_bad,
        max_pixels=max_pixels or MAX_PIXELS,
        depth=check,
        only=only,
        takes_next=takes_next,
        progress=progress,
    )


def inspect(
    data: str | Path,
    *,
    image: str | None = None,
    label: str | None = None,
    decode: bool = True,
    max_pixels: int | None = None,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Inventory:
    """Check every image of a dataset. All files are read again, also those that are known.

    Args:
        data, image, label, follow_links: as in `open_data`.
        decode: decode every image; otherwise only the header of each file is read, and damage of its pixels not found.
        max_pixels: images with more pixels (height x width) count as bad; None for 100 million.
        progress: called regularly with (number done, total).

    Raises:
        DataError: the dataset does not exist or cannot be read.
    """
    inventory = _opened(data, image, label, follow_links=follow_links, fresh=True)
    with contextlib.suppress(DataError):  # `problem_of` says it
        inventory.remarks[:0] = check_nesting(inventory, None)
    level, images, most = DECODED if decode else HEADER, range(len(inventory.keys)), max_pixels or MAX_PIXELS
    check_images(inventory, images, level, max_pixels=most, fresh=True, progress=progress)
    return inventory


def problem_of(inventory: Inventory) -> str:
    """Return the message with which training refuses a dataset of `inspect`; an empty text if it can be trained on."""
    try:
        _split(inventory, DEFAULT, is_checked=True)
    except DataError as error:
        return str(error)
    return ""


def is_library(data: str) -> bool:
    """Return whether data are a dataset by name, from a library."""
    return data in (DIGITS, *ALIASES) or data.partition(":")[0] in ("torchvision", "hf")


def check_exists(data: str | Path) -> None:
    """Refuse a folder, table or shard that does not exist. Datasets by name are not looked up.

    Raises:
        DataError: there is none.
    """
    text = os.fspath(data)
    if is_library(text):
        return
    files = shard_paths(text) if is_shards(text) else [Path(text)] if text.endswith(SUFFIXES) else []
    if missing := [file for file in files if not (is_remote(str(file)) or os.path.lexists(file))]:
        raise DataError(f"The data must exist; '{printable(str(missing[0]))}' does not. Check the path.")
    if not files:
        existing(text)


def _opened(
    data: str | Path,
    image: str | None,
    label: str | None,
    *,
    group: str | None = None,
    test: bool = False,
    follow_links: bool = False,
    fresh: bool = False,
    sniffs: bool = True,
    cache_bytes: int = CACHE_BYTES,
) -> Inventory:
    """List the images that `data` names, with the held-out side; the arguments are those of the sources."""
    text, path = os.fspath(data), Path(data)
    kind, _, address = text.partition(":")
    is_table = text.endswith(SUFFIXES) and (path.is_file() or not path.exists())
    if is_shards(text):
        inventory = open_shards(text, cache_bytes=cache_bytes, fresh=fresh)
    elif is_table or is_folder_of(path, PARQUET):
        inventory = open_table(path, group, image, label)
    elif os.path.lexists(text) or not (kind in ("torchvision", "hf") or text in (DIGITS, *ALIASES)):
        inventory = open_folder(data, test=test, follow_links=follow_links, fresh=fresh, sniffs=sniffs)
    elif kind == "hf":
        inventory = open_hf(address, image, label)
    elif text == DIGITS:
        inventory = open_digits()
    else:
        inventory = open_torchvision(ALIASES.get(text, address))
    if text in (DIGITS, *ALIASES) and os.path.lexists(text):
        is_here = f"'{text}' is the {'folder' if os.path.isdir(text) else 'file'} here"
        note = f"{is_here}, not the known dataset of that name: run weft elsewhere to use the dataset."
        inventory.remarks.insert(0, note)
    if not inventory.folders:
        inventory.hold_out(test=test)
    return inventory


def _split(
    inventory: Inventory,
    plan: SplitPlan,
    *,
    classes: Sequence[str] | None = None,
    evaluate_only: bool = False,
    max_bad: float = 0.1,
    max_pixels: int = MAX_PIXELS,
    depth: Check = "auto",
    only: str | None = None,
    takes_next: bool | None = None,
    is_checked: bool = False,
    progress: Progress | None = None,
) -> Splits:
    """Split a dataset, check the images that are used unless `inspect` did, and refuse what cannot be used."""
    nesting = check_nesting(inventory, classes)
    names = class_list(inventory, classes)
    inside = [i for i, name in enumerate(inventory.class_names) if name]
    if inventory.groups or plan.is_grouped:
        _check_groups(inventory, inside, plan, any_number=evaluate_only)
    is_all_for_training = set(inventory.splits) == {"train"} and classes is not None and not evaluate_only
    sides = limited(inventory, *((inside, []) if is_all_for_training else assign(inventory, inside, plan)), plan)
    if only is not None and inventory.is_given:
        sides = tuple(side if name == only else [] for name, side in zip(("train", "val"), sides, strict=True))
    chosen = sorted([*sides[0], *sides[1]])
    level = LEVELS.get(depth, DECODED if len(chosen) <= MOST_DECODED else HEADER)
    if not is_checked:
        for split, side in zip(("train", "val"), sides, strict=True):
            for i in side:
                inventory.splits[i] = split  # of its file, if it is bad
        check_images(inventory, chosen, level, max_pixels=max_pixels, progress=progress)
    check_bad(inventory, chosen, max_bad)
    bad = {file.key for file in inventory.bad}

    def usable(train: Side, val: Side) -> tuple[Side, Side]:
        if bad:
            train, val = ([i for i in side if inventory.keys[i] not in bad] for side in (train, val))
        return (train, val) if inventory.is_given else with_trained_classes(inventory, train, val)

    train, val = usable(*sides)
    held_out = [val]
    if plan.folds is not None:
        folds = [replace(plan, fold=fold) for fold in range(1, plan.folds + 1)]
        held_out = [usable(*assign(inventory, inside, fold))[1] for fold in folds]
    if not evaluate_only:
        if classes is None:
            check_names(names)
        check_folds(inventory, held_out)
    if not evaluate_only and classes is None:
        check_empty(inventory, names, train if plan.limit is None and plan.train_fraction == 1 else inside)
    if not train + val or not (evaluate_only or (classes is not None and not inventory.is_given)):
        check_sides(inventory, len(train), len(val))
    kind = "split by groups" if inventory.groups else "stratified split"
    how = f"a {kind} of {plan.description}, because the dataset has none"
    notes = split_notes(inventory, names, train, val, how)
    notes += survey_notes(inventory, names, val) + copy_notes(inventory, train, held_out)
    if num_outside := len(inventory.keys) - len(inside):
        notes.append(f"Not used, because outside all class folders: {count(num_outside, 'image')}.")
    if depth == "auto" and level == HEADER:
        notes.append(
            f"Only the headers of the images are checked, since there are more than {MOST_DECODED:,}: damage of their"
            " pixels shows in training. To decode each once: --set data.check=decode."
        )
    number = {name: i for i, name in enumerate(names)}

    def source(side: Side, **options: bool | None) -> KeyedSource:
        keys, class_names = inventory.labelled(side)
        labels, digests = [number[name] for name in class_names], inventory.digests(side)
        blocks = inventory.read.blocks(keys) if isinstance(inventory.read, ShardReader) else None
        return KeyedSource(inventory.read, names, keys, labels, max_pixels, digests, **options, blocks=blocks)

    return Splits(
        source(train, takes_next=takes_next),
        source(val),
        classes=names,
        notes=notes + nesting + inventory.remarks,
        bad=tuple(inventory.bad),
        is_given=inventory.is_given,
        groups=[inventory.groups[i] for i in train] if inventory.groups else None,
        val_groups=[inventory.groups[i] for i in val] if inventory.groups else None,
        sizes=inventory.sizes,
        values=inventory.values,
    )


def _check_groups(inventory: Inventory, images: Side, plan: SplitPlan, *, any_number: bool) -> None:
    """Add the groups of images by their keys, unless a column of a table has them."""
    group = str(plan.group)
    if not inventory.groups:
        keys = inventory.labelled(images)[0]
        if plan.series and plan.series.keys().isdisjoint(keys):  # of other images
            return
        found, notes = groups_of(group, keys, inventory.read, plan.series)
        inventory.remarks += notes
        groups = dict(zip(images, found, strict=True))
        inventory.groups = [groups.get(i, "") for i in range(len(inventory.keys))]
    if len({inventory.groups[i] for i in images}) < 2 and not any_number:
        raise GroupError(
            f"The groups of --group must allow a split; with '{printable(group)}', all"
            f" {count(len(images), 'image')} are in one. Choose a column or a pattern that gives more groups."
        )
