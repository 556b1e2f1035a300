"""Datasets with the classes of a model, and which of their images an evaluation uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.data import Sample, Source, SplitPlan, Splits, open_data
from weft.data.fingerprint import Fingerprint
from weft.data.groups import read_groups
from weft.data.source import pixel_limit
from weft.errors import DataError, UsageError, unknown
from weft.inference.arguments import InferenceOptions, run_folder
from weft.models.imagenet import ImageNetClasses, recognized
from weft.progress import Work, say
from weft.recipes import Recipe
from weft.runs.directory import FINGERPRINT, SERIES
from weft.text import first_few, printable


def name_of(source: Source, index: int) -> str:
    """Return the printable name of an image, even if its file no longer exists."""
    return printable(source.keys[index])


def open_labelled(
    data: str | Path,
    classes: list[str] | None,
    num_classes: int,
    options: InferenceOptions,
    trained_with: Recipe | None,
    *,
    split: str = "all",
    images: Fingerprint | None = None,
    series: Mapping[str, str] | None = None,
) -> Splits:
    """Open a dataset with the classes of a model, split as the training run split it. Of data with a split of their
    own, only the images that `split` names are checked.

    The classes of a public model also match WordNet ids, and other ImageNet names than those that weft prints.

    Args:
        split: as in `evaluate`; `test` is held out in place of the validation split.
        images: of the training run, if they are known: with their hashes, those of the data are needed to find them.
        series: of the training run, if it found some.

    Raises:
        DataError: the dataset cannot be read, or has other classes.
    """
    imagenet, recipe = recognized(classes), trained_with or Recipe()
    trained, checks = recipe.data, recipe.data
    plan = replace(split_plan(recipe, series), train_fraction=1.0, limit=options.limit)
    if trained_with is not None and not _is_same(data, trained.source):
        checks = Recipe().data
        plan = replace(plan, folds=None, fold=1, group=None)  # which mean nothing here
    with Work("reading") as work:
        splits = open_data(
            data,
            plan,
            image=trained.image,
            label=trained.label,
            classes=classes,
            match=None if imagenet is None else functools.partial(match_imagenet, imagenet),
            evaluate_only=True,
            test=split == "test",
            check="decode" if images is not None and images.has_hashes else checks.check,
            only={"train": "train", "all": None}.get(split, "val"),
            max_bad=checks.max_bad,
            max_pixels=options.max_pixels or trained.max_pixels,
            cache_bytes=trained.cache_gb << 30,
            follow_links=trained.follow_links or options.follow_links,
            progress=work.update,
        )
    for text in splits.notes[1:]:  # the first one counts training images
        say(text)
    if classes is None:
        say(
            "The weights have no class names: their outputs are matched with the folders in order, first"
            f" '{printable(splits.classes[0])}', last '{printable(splits.classes[-1])}'."
        )
    if len(splits.classes) != num_classes:
        raise DataError(
            f"Data must have the model's classes; it has {len(splits.classes)}, the model {num_classes} without names."
            " Evaluate a model directory that names its classes."
        )
    return splits


def split_plan(recipe: Recipe, series: Mapping[str, str] | None = None) -> SplitPlan:
    """Return the split that a recipe asks for; `series` are those that the training found, by key."""
    data = recipe.data
    return SplitPlan(
        val_fraction=data.val_fraction,
        folds=data.folds,
        fold=data.fold or 1,
        seed=recipe.split_seed,
        group=data.group,
        series=series or {},
        train_fraction=data.train_fraction,
        limit=data.limit,
    )


def class_number(name: str, classes: Sequence[str]) -> int:
    """Return the index of a class by its name; of ImageNet's classes also by WordNet id or another of its names.

    Raises:
        UsageError: no class has this name, or several.
    """
    if name in classes:
        return list(classes).index(name)
    imagenet = recognized(classes)
    places = imagenet.find(name) if imagenet else []
    if imagenet and len(places) > 1:
        raise UsageError(f"The name of a class must mean one class; {_meanings(name, imagenet, places)}. Pass an id.")
    if not places:
        raise unknown("class", name, classes, "config.json of the model, or timm.data.ImageNetInfo for a public model")
    return places[0]


def match_imagenet(imagenet: ImageNetClasses, names: Sequence[str]) -> dict[str, str]:
    """Match the class names of a dataset with those of a model with ImageNet classes.

    Args:
        imagenet: the classes of the model.
        names: class names of the dataset: WordNet ids, ImageNet names, or all of them numbers of outputs.

    Returns:
        Mapping from each name to the name of the model's class.

    Raises:
        DataError: a name means no class of the model, or several.
    """
    count = len(imagenet.names)
    if all(name.isascii() and name.isdecimal() for name in names):
        places_of = {name: [int(name)] if len(name) < 10 and int(name) < count else [] for name in names}
    else:
        places_of = {name: imagenet.find(name) for name in names}
    if others := [name for name, places in places_of.items() if not places]:
        raise DataError(
            f"Every class of the data must be one of the model's {count:,} ImageNet classes, by WordNet id (n01440764),"
            f" name (tench) or number; {len(others):,} of {len(names):,} are not: {first_few(others)}. Rename these"
            " folders, or train a model on your own classes with weft train."
        )
    for name, places in places_of.items():
        if len(places) > 1:
            raise DataError(
                f"Every class of the data must mean one ImageNet class; {_meanings(name, imagenet, places)}. Rename the"
                " folder to one of these WordNet ids."
            )
    return {name: imagenet.names[places[0]] for name, places in places_of.items()}


def _meanings(name: str, imagenet: ImageNetClasses, places: Sequence[int]) -> str:
    meanings = (f"{imagenet.names[place].partition(' (')[0]} ({imagenet.ids[place]})" for place in places)
    return f"'{printable(name)}' means {' or '.join(meanings)}"


def images_of(run: Path) -> Fingerprint | None:
    """Return the images that a model was trained with, if it or its export is in its run directory."""
    file = _recorded(run, FINGERPRINT)
    return None if file is None else Fingerprint.read(file)


def series_of(run: Path) -> dict[str, str]:
    """Return the series that the training of a model found in its images, by key; empty if it found none."""
    file = _recorded(run, SERIES)
    return {} if file is None else read_groups(file)


def _recorded(run: Path, name: str) -> Path | None:
    """Return a file of the run directory of a model or of its export; None for another model, or without the file."""
    if not run.exists():  # the name of a public model
        return None
    folders = (run_folder(run), run.resolve().parent, run.resolve().parent.parent)
    own = next((folder for folder in folders if (folder / "recipe.yaml").is_file()), None)
    return own / name if own is not None and (own / name).is_file() else None


class Selected(NamedTuple):
    """Images to evaluate.

    Attributes:
        split: `train`, `val`, `test`, `all`, or `new`: held-out images of the training, and others that it did not
            have.
        source: the images.
        excluded: (name, reason) of the unreadable ones.
        trained_on: number of training images of the model among them; None if it is not known.
    """

    split: str
    source: Source
    excluded: list[tuple[str, str]]
    trained_on: int | None


def select_split(
    splits: Splits, split: str, data: str | Path, trained_with: Recipe | None, images: Fingerprint | None
) -> Selected:
    """Select the images to evaluate. Of images of the training run, the sides are those of the run.

    `auto` selects the validation set if the dataset defines one, else the images that the model was not trained on.

    Args:
        splits: the dataset.
        split: as in `evaluate`.
        data: name of the dataset.
        trained_with: recipe of the model, if it is known.
        images: of the training run, if they are known.

    Raises:
        DataError: `auto`, and the model was trained on all images.
    """
    if not splits.is_given and images is not None and split in ("auto", "train", "val"):
        sides = [*images.sides_of(splits.train), *images.sides_of(splits.val)]
        if split == "auto" and any(sides):
            return _not_trained_on(splits, sides, data)
        if places := [place for place, side in enumerate(sides) if side == split]:
            part = SourcePart(splits.train, splits.val, places=places)
            return Selected(split, part, _bad(splits, split), len(places) if split == "train" else 0)
    if split == "auto":
        is_same = trained_with is not None and images is None and _is_same(data, trained_with.data.source)
        split = "val" if splits.is_given or is_same else "all"
    side = "val" if split == "test" else split  # opened as the held-out one
    source = {"train": splits.train, "val": splits.val, "all": SourcePart(splits.train, splits.val)}[side]
    parts = {"train": (), "val": (splits.val,), "all": (splits.train, splits.val)}[side]
    trained_on = None if images is None else sum(images.sides_of(part).count("train") for part in parts)
    return Selected(split, source, _bad(splits, side), trained_on)


def _not_trained_on(splits: Splits, sides: list[str], data: str | Path) -> Selected:
    """Select the images of both parts whose side in the training run was not `train`."""
    places = [place for place, side in enumerate(sides) if side != "train"]
    if not places:
        raise DataError(
            f"An evaluation needs images that the model was not trained on; {printable(str(data))} has none. Pass other"
            " images, or --split train."
        )
    split = "val" if all(sides[place] for place in places) else "new"
    is_val = places == list(range(len(splits.train), len(sides)))
    bad = _bad(splits, "val" if is_val and split == "val" else "all")
    return Selected(split, SourcePart(splits.train, splits.val, places=places), bad, 0)


def _bad(splits: Splits, split: str) -> list[tuple[str, str]]:
    return [(printable(item.key), item.reason) for item in splits.bad if split == "all" or item.split in ("", split)]


def _is_same(data: str | Path, source: str | None) -> bool:
    return source is not None and (str(data) == source or Path(data).resolve() == Path(source).resolve())


class SourcePart:
    """Some images of one source, or of several with the same classes one after the other, in the order of `places`.

    Args:
        sources: with the classes of the first.
        places: indices in all images of the sources; None for all of them.
    """

    def __init__(self, *sources: Source, places: Sequence[int] | None = None) -> None:
        self.sources, self.classes = sources, sources[0].classes
        self.places = range(sum(map(len, sources))) if places is None else places
        self.labels = [source.labels[i] for source, i in map(self._find, self.places)]
        self.keys = [source.keys[i] for source, i in map(self._find, self.places)]
        self.max_pixels = max(map(pixel_limit, sources))

    def __len__(self) -> int:
        return len(self.places)

    def read(self, i: int) -> Sample:
        """Read image `i`."""
        source, place = self.origin(i)
        return source.read(place)

    def origin(self, i: int) -> tuple[Source, int]:
        """Return the source of image `i`, and its index there."""
        return self._find(self.places[i])

    def _find(self, place: int) -> tuple[Source, int]:
        """Return the source of an image, and its index there."""
        for source in self.sources:
            if place < len(source):
                return source, place
            place -= len(source)
        raise IndexError(place)
