"""Images of an extension: those of the old run, with their features, and the new ones (`weft.train.extend`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from weft.data import Splits, open_data
from weft.data.index.checks import check_names, match_forms
from weft.data.index.fingerprint import Fingerprint
from weft.data.index.split import GroupError
from weft.data.sources.open import class_names
from weft.errors import DataError
from weft.inference.features import fingerprint
from weft.inference.inputs import JoinedSource, SourcePart
from weft.progress import counting, reading
from weft.recipes import Recipe, load_recipe
from weft.recipes.schema import Data
from weft.runs.directory import FEATURES, FINGERPRINT
from weft.runtime import Runtime
from weft.text import first_few, printable
from weft.train.plan import open_splits
from weft.train.stored_features import StoredFeatures, collect


def old_features(
    run: Path,
    network: nn.Module,
    names: Sequence[str],
    runtime: Runtime,
    workers: int,
    note: Callable[[str], None],
    quiet: bool,
) -> StoredFeatures:
    """Return the features of the images of a run: as it stored them, else computed from its images.

    Raises:
        DataError: they are not stored for the kept model, and the images cannot be read.
    """
    reason = "it has no features.npz"
    if (run / FEATURES).is_file():
        stored = StoredFeatures.read(run / FEATURES)
        if stored.network == fingerprint(network, runtime):
            return stored
        reason = "its features.npz belongs to other weights or another precision"
    recipe = load_recipe(run / "recipe.yaml")
    if recipe.extend is not None:
        raise DataError(f"To extend a run, the features of its images must be stored; {run}: {reason}.")
    try:
        splits = open_splits(recipe, quiet)
    except DataError as error:
        raise DataError(
            f"To extend a run, the features of its images must be stored, or its images must exist; {run}: {reason},"
            f" and {recipe.data.source} cannot be used. {error}"
        ) from error
    if list(splits.classes) != list(names):
        raise DataError(
            f"The classes of {recipe.data.source} must be those of the run {run}; they have changed since. Restore the"
            " data, or train a new run."
        )
    splits = _as_trained(run, splits, str(recipe.data.source), note)
    with counting(len(splits.train) + len(splits.val), quiet=quiet, task_name="features") as count:
        return collect(network, splits, runtime, workers, count)


def _as_trained(run: Path, splits: Splits, source: str, note: Callable[[str], None]) -> Splits:
    """Return the images of the data of a run that the run had, on the sides that they had there.

    Raises:
        DataError: none of its training images is among them.
    """
    if not (run / FINGERPRINT).is_file():
        return splits
    images = Fingerprint.read(run / FINGERPRINT)
    sides = [*images.sides_of(splits.train), *images.sides_of(splits.val)]
    if "train" not in sides:
        raise DataError(
            "To extend a run, the features of its images must be stored, or its images must exist; none of the training"
            f" images of {run} is in {printable(source)}. Restore them, or train a new run."
        )
    known, others = len(sides) - sides.count(""), sides.count("")
    if others or known < len(images.lines):
        note(
            f"{known:,} of the {len(images.lines):,} images of the run are in {printable(source)}; {others:,} others"
            " there are left out."
        )
    everything = JoinedSource(splits.train, splits.val)
    groups = None if splits.groups is None else [*splits.groups, *(splits.val_groups or ())]
    train, val = ([place for place, side in enumerate(sides) if side == name] for name in ("train", "val"))
    return dataclasses.replace(
        splits,
        train=SourcePart(everything, train),
        val=SourcePart(everything, val),
        groups=None if groups is None else [groups[place] for place in train],
        val_groups=None if groups is None else [groups[place] for place in val],
    )


def sides_of_groups(images: StoredFeatures) -> dict[str, str]:
    """Return the side of every group of images, `train` or `val`; `val` for a group on both sides."""
    sides: dict[str, str] = {}
    for group, key, is_held_out in zip(images.groups, images.keys, images.is_held_out, strict=True):
        if group not in ("", f"/{key}") and sides.get(str(group)) != "val":
            sides[str(group)] = "val" if is_held_out else "train"
    return sides


def open_new(
    recipe: Recipe, names: Sequence[str], group_sides: Mapping[str, str], note: Callable[[str], None], quiet: bool
) -> tuple[Recipe, Splits, list[str]]:
    """Open the new images; return the recipe, the images, and the old class names followed by the new ones.

    New images of a group of the old run are on the side of that group. The groups of the old run do not apply to data
    that have none of them; the recipe is then without groups.
    """
    source, data = str(recipe.data.source), recipe.data
    own = class_names(source, image=data.image, label=data.label, follow_links=data.follow_links)
    classes = list(dict.fromkeys([*names, *match_forms([*names, *own], own).values()]))
    check_names(classes)

    def opened(data: Data) -> Splits:
        return open_data(
            source,
            val_fraction=data.val_fraction,
            train_fraction=data.train_fraction,
            group=data.group,
            image=data.image,
            label=data.label,
            group_sides=group_sides,
            seed=recipe.seed,
            max_bad=data.max_bad,
            limit=data.limit,
            follow_links=data.follow_links,
            classes=classes,
            allow_empty_class=True,
            progress=progress,
        )

    with reading(quiet=quiet) as progress:
        try:
            splits = opened(data)
        except GroupError as error:
            if data.group != load_recipe(Path(str(recipe.extend)) / "recipe.yaml").data.group:
                raise
            note(f"The new images are in no groups, since those of the run do not apply. {error}")
            recipe = dataclasses.replace(recipe, data=dataclasses.replace(data, group=None))
            splits = opened(recipe.data)
    trained = {splits.classes[label] for label in splits.train.labels}
    if missing := [name for name in classes[len(names) :] if name not in trained]:
        held_out = {splits.classes[label] for label in splits.val.labels}
        reason = "only held-out images" if missing[0] in held_out else "none that can be read"
        raise DataError(
            f"Every new class must have a training image; '{printable(missing[0])}' of {source} has {reason}. Add"
            " images, or remove its folder."
        )
    sides = (("train", splits.groups or ()), ("val", splits.val_groups or ()))
    if torn := {group for side, groups in sides for group in groups if group_sides.get(group, side) != side}:
        note(
            "The new data's own split has groups on another side than the run, which makes the validation accuracy too"
            f" high: {first_few(sorted(torn))}."
        )
    return recipe, splits, classes


def without_copies(
    old: StoredFeatures, new: StoredFeatures, classes: Sequence[str], source: str, note: Callable[[str], None]
) -> StoredFeatures:
    """Return the new images whose files are not among the old ones; copies could be on both sides of the split.

    Raises:
        DataError: all files are among them.
    """
    label_of = {bytes(row): int(label) for row, label in zip(old.hashes, old.labels, strict=True)}
    known: list[int | None] = [label_of.get(bytes(row)) for row in new.hashes]
    is_new = np.array([label is None for label in known])
    if is_new.all():
        return new
    if not is_new.any():
        raise DataError(
            f"The new data must have a new image; all {len(new.labels):,} of {source} are already in the run. Pass a"
            " folder with more images."
        )
    text = f"Left out: {(~is_new).sum():,} of {len(new.labels):,} images are already in the run"
    other = [
        f"{printable(str(key))} ({printable(classes[before])}, now {printable(classes[int(now)])})"
        for key, before, now in zip(new.keys, known, new.labels, strict=True)
        if before is not None and before != now
    ]
    note(f"{text}{f', {len(other)} of them in another class, such as {other[0]}' if other else ''}.")
    return new.chosen(is_new)
