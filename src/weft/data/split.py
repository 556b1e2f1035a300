"""Deterministic splits and subsets of images.

They rank every image by a hash of (seed, key). They do not depend on the order in which a file system lists files, a
repaired or added file moves no other file (except one at the boundary of its class or fold), and they use no random
generator whose stream could change between versions.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.groups import NONE, SIMILAR
from weft.data.inventory import Inventory
from weft.errors import DataError, UsageError
from weft.text import printable

Labels = Sequence[int] | Sequence[str]
"""Class of every image, as an index or a name."""


@dataclass(frozen=True)
class SplitPlan:
    """Which images are held out, and how many are used.

    Attributes:
        val_fraction: fraction of each class for validation, between 0 and 1, if the dataset defines no split.
        folds: number of folds of a cross-validation, at least 2, for a dataset without a split; `fold` is then the
            validation set, in place of `val_fraction`.
        fold: from 1 to `folds`.
        seed: seed of the split, and of the choice by `limit` and `train_fraction`.
        group: images of the same group are on the same side of the split: a column of the table, one of
            `weft.data.groups.RULES`, or a regular expression whose match in the image's key (the parenthesised part, if
            there is one) names the group.
        series: series of similar images that were found, by key, which come before `group`; an image that is not in
            it is alone.
        train_fraction: fraction of each class to use for training, above 0; validation images are all used.
        limit: maximum number of training images and of validation images, taken round-robin from the classes.

    Raises:
        UsageError: a number out of its range.
    """

    val_fraction: float = 0.2
    folds: int | None = None
    fold: int = 1
    seed: int = 0
    group: str | None = None
    series: Mapping[str, str] | None = None
    train_fraction: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UsageError(
                f"val_fraction must be between 0 and 1, exclusive; got {self.val_fraction}. The default is 0.2."
            )
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit must be at least 1 image; got {self.limit}.")
        if not 0 < self.train_fraction <= 1:
            raise UsageError(
                f"train_fraction must be above 0 and at most 1; got {self.train_fraction}. 1 uses all images."
            )
        if self.folds is not None and self.folds < 2:
            raise UsageError(f"folds must be at least 2; got {self.folds}. 5 is usual.")
        if not 1 <= self.fold <= (self.folds or 1):
            raise UsageError(f"fold must be from 1 to folds ({self.folds}); got {self.fold}.")

    @property
    def is_grouped(self) -> bool:
        """Whether images may have groups: not without a rule, nor where no series were found."""
        has_none = self.group == SIMILAR and self.series == {}
        return bool(self.series) or (self.group not in (None, NONE) and not has_none)

    @property
    def description(self) -> str:
        """The way in which images are held out, for a sentence."""
        part = f"{100 * self.val_fraction:.0f} %" if self.folds is None else f"fold {self.fold} of {self.folds}"
        return f"{part} made with seed {self.seed}"


DEFAULT = SplitPlan()
Side = list[int]
"""Numbers of images of an inventory."""


def assign(inventory: Inventory, images: Side, plan: SplitPlan) -> tuple[Side, Side]:
    """Return the training and validation images: the dataset's own, else shares of each class, or whole groups."""
    if inventory.is_given:
        if plan.folds is not None:
            raise DataError(
                f"Folds need a dataset without a split of its own; '{printable(inventory.name)}' has a validation set."
                " Pass a folder with the class folders alone, or leave out --folds."
            )
        own_train, own_val = ([i for i in images if inventory.splits[i] == side] for side in ("train", "val"))
        return own_train, own_val
    keys, labels = inventory.labelled(images)
    if inventory.groups:
        groups = [inventory.groups[i] for i in images]
        if plan.folds is None:
            held_out = grouped_share(labels, groups, plan.val_fraction, plan.seed)
        else:
            held_out = grouped_fold(labels, groups, plan.folds, plan.fold, plan.seed)
        train, val = grouped_split(labels, groups, held_out)
    elif plan.folds is not None:
        train, val = stratified_fold(keys, labels, plan.folds, plan.fold, plan.seed)
    else:
        train, val = stratified_split(keys, labels, plan.val_fraction, plan.seed)
    return [images[i] for i in train], [images[i] for i in val]


def with_trained_classes(inventory: Inventory, train: Side, val: Side) -> tuple[Side, Side]:
    """Move validation images of classes without a training image to train, in whole groups."""
    if inventory.groups:
        images = [*train, *val]
        groups = [inventory.groups[i] for i in images]
        parts = grouped_split(inventory.labelled(images)[1], groups, range(len(train), len(images)))
        return [images[i] for i in parts[0]], [images[i] for i in parts[1]]
    trained = set(inventory.labelled(train)[1])
    moved = [i for i in val if inventory.class_names[i] not in trained]
    kept = [i for i in val if inventory.class_names[i] in trained]
    return sorted(train + moved, key=inventory.keys.__getitem__), kept


def limited(inventory: Inventory, train: Side, val: Side, plan: SplitPlan) -> tuple[Side, Side]:
    """Return the images to use: a share of the training images, and at most `limit` of each side."""
    if plan.train_fraction < 1:
        train = [train[i] for i in stratified_share(*inventory.labelled(train), plan.train_fraction, plan.seed)]
    if plan.limit is not None:
        train, val = (
            [side[i] for i in stratified_subset(*inventory.labelled(side), plan.limit, plan.seed)]
            for side in (train, val)
        )
    return train, val


def rank(key: str, seed: int) -> bytes:
    """Return the sort key of `key` under `seed`: a uniformly distributed hash that no version may change."""
    return hashlib.blake2b(f"{seed}/{key}".encode(errors="surrogateescape"), digest_size=8).digest()


def stratified_split(
    keys: Sequence[str], labels: Labels, val_fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return (train, val) indices, ascending: `val_fraction` of every class, rounded, at least one image in each split.

    The only image of a class goes to train.
    """
    train, val = [], []
    for members in _by_class(keys, labels, seed).values():
        num_val = min(max(round(len(members) * val_fraction), 1), len(members) - 1)
        val += members[:num_val]
        train += members[num_val:]
    return sorted(train), sorted(val)


def stratified_fold(
    keys: Sequence[str], labels: Labels, folds: int, fold: int, seed: int
) -> tuple[list[int], list[int]]:
    """Return (train, val) indices, ascending, of one fold of a cross-validation.

    Every image is in the validation set of one fold, from 1 to `folds`, except the only image of a class, which is
    never held out. A class has at least one image in the training set of every fold.
    """
    val = []
    for place, members in enumerate(_by_class(keys, labels, seed).values()):
        number = len(members)
        # The first fold differs between classes, so that small classes do not all fall into the same folds.
        val += [i for j, i in enumerate(members) if number > 1 and (j * folds // number + place) % folds == fold - 1]
    return _rest(len(keys), val), sorted(val)


def grouped_share(labels: Labels, groups: Sequence[str], share: float, seed: int) -> list[int]:
    """Return indices of whole groups, ascending: about the fraction `share` of every class.

    A group belongs to the class of most of its images. The groups of a class are taken in the order of their ranks
    until they have its share of the images. The rank, a number from 0 to 1, of a group of more than 1.5 times the share
    is raised, so that a large group is held out only if there are no others. An image more or less moves only groups at
    the end of the share. Of several groups that are all too large, the smallest is held out.
    """
    chosen = set[str]()
    for sizes in _groups_by_class(labels, groups, seed):
        wanted, before = share * sum(sizes.values()), 0
        raised = {
            name: int.from_bytes(rank(name, seed)) / 2**64 + max(size / wanted - 1.5, 0) for name, size in sizes.items()
        }
        for name in sorted(sizes, key=raised.__getitem__):
            if before + sizes[name] / 2 < wanted:
                chosen.add(name)
            before += sizes[name]
        if len(sizes) > 1 and chosen.isdisjoint(sizes):
            chosen.add(min(sizes, key=sizes.__getitem__))
    return [i for i, group in enumerate(groups) if group in chosen]


def grouped_fold(labels: Labels, groups: Sequence[str], folds: int, fold: int, seed: int) -> list[int]:
    """Return indices of whole groups, ascending: one fold of a cross-validation, with about as many images as others.

    The groups of a class, in the order of their ranks, are cut into runs of equal numbers of images. The size of a
    group counts up to the size of a run, so that each run has a group if there are enough groups. An image more or less
    moves only groups at the ends of the runs.
    """
    chosen = set[str]()
    for place, sizes in enumerate(_groups_by_class(labels, groups, seed)):
        weights = _capped(list(sizes.values()), folds)
        ends = list(itertools.accumulate(weights))
        middles = [2 * end - weight for end, weight in zip(ends, weights, strict=True)]  # twice, to be whole
        runs = [middle * folds // (2 * ends[-1]) for middle in middles]
        # The first run of each class is another fold, so that small classes do not all fall into the same folds.
        chosen |= {name for name, run in zip(sizes, runs, strict=True) if (run + place) % folds == fold - 1}
    return [i for i, group in enumerate(groups) if group in chosen]


def _groups_by_class(labels: Labels, groups: Sequence[str], seed: int) -> list[dict[str, int]]:
    """Return the size of the groups of every class, in the order of their ranks."""
    counts: dict[str, Counter[Any]] = defaultdict(Counter)
    for label, group in zip(labels, groups, strict=True):
        counts[group][label] += 1
    by_class: dict[Any, dict[str, int]] = defaultdict(dict)
    for group in sorted(counts, key=lambda name: rank(name, seed)):
        label = min(counts[group], key=lambda label: (-counts[group][label], label))
        by_class[label][group] = counts[group].total()
    return [by_class[label] for label in sorted(by_class)]


def _capped(sizes: list[int], parts: int) -> list[int]:
    """Return sizes in a unit of which all are whole, with the largest lowered until none exceeds a part of the sum."""
    rest, unit = sum(sizes), parts
    for size in sorted(sizes, reverse=True)[: parts - 1]:
        if size * unit <= rest:
            break
        rest, unit = rest - size, unit - 1
    return [min(size * unit, rest) or 1 for size in sizes]


def grouped_split(labels: Labels, groups: Sequence[str], held_out: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return (train, val) indices, ascending: `held_out` without the groups that leave a class without training image.

    A class whose images are all in one group, as the only image of a class, is never held out.
    """
    val = set(held_out)
    trained, classes_of = {label for i, label in enumerate(labels) if i not in val}, defaultdict(set)
    for i in val:
        classes_of[groups[i]].add(labels[i])
    kept = set()
    for group in sorted(classes_of):
        if not classes_of[group] <= trained:
            trained |= classes_of[group]
            kept.add(group)
    val = {i for i in val if groups[i] not in kept}
    return _rest(len(labels), val), sorted(val)


def stratified_subset(keys: Sequence[str], labels: Labels, limit: int, seed: int) -> list[int]:
    """Return at most `limit` indices, ascending, taken round-robin from the classes.

    The order of the classes is random, and the same for training and validation images. `labels` are indices or names.
    """
    turns = [
        (turn, place, i)
        for label, members in _by_class(keys, labels, seed).items()
        for place in [rank(f"class/{label}", seed)]
        for turn, i in enumerate(members)
    ]
    return sorted(i for *_, i in sorted(turns)[:limit])


def proportional_subset(keys: Sequence[str], limit: int, seed: int) -> list[int]:
    """Return at most `limit` indices, ascending, of a simple random sample: classes keep their shares."""
    # not the hash of the key alone: in a class, that of a held-out image is lower than those of the training images
    return sorted(sorted(range(len(keys)), key=lambda i: rank(f"subset/{keys[i]}", seed))[:limit])


def stratified_share(keys: Sequence[str], labels: Labels, share: float, seed: int) -> list[int]:
    """Return indices, ascending: the fraction `share` of every class, rounded, at least one image. A smaller share is a
    subset of a larger one."""
    members = _by_class(keys, labels, seed).values()
    return sorted(i for group in members for i in group[: max(round(len(group) * share), 1)])


def _by_class(keys: Sequence[str], labels: Labels, seed: int) -> dict[Any, list[int]]:
    members = defaultdict(list)
    for i, label in enumerate(labels):
        members[label].append(i)
    return {label: sorted(members[label], key=lambda i: rank(keys[i], seed)) for label in sorted(members)}


def _rest(number: int, indices: Iterable[int]) -> list[int]:
    chosen = set(indices)
    return [i for i in range(number) if i not in chosen]
