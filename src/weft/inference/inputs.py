"""Inputs of inference: settings, image files, and datasets with the classes of a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from weft.data import ImageDataset, Sample, Source, SplitPlan, Splits, eval_transform, make_loader, open_data
from weft.data.fingerprint import Fingerprint
from weft.data.loader import ImageLoader
from weft.data.order import WHOLE, Share
from weft.data.source import pixel_limit
from weft.errors import DataError, UsageError, unknown
from weft.inference.arguments import image_files as image_files
from weft.inference.arguments import recipe_of as recipe_of
from weft.inference.arguments import run_folder as run_folder
from weft.inference.arguments import settings_of as settings_of
from weft.models.contract import preprocessing
from weft.models.imagenet import ImageNetClasses, recognized
from weft.progress import Work, say
from weft.recipes import Recipe
from weft.runs.directory import FINGERPRINT
from weft.text import first_few, printable


def evaluation_batches(
    source: Source, model: nn.Module, batch_size: int, workers: int, *, share: Share = WHOLE
) -> ImageLoader:
    """Load all images in their order, with the preprocessing of a model; with several processes, the share of this one.

    Raises:
        DataError: `source` is empty.
    """
    if len(source) == 0:
        raise DataError("An evaluation needs at least one image; got none. Give every class two images or more.")
    transform = eval_transform(preprocessing(model))
    images = ImageDataset(source, transform, value_range=transform.value_range)
    return make_loader(images, batch_size, shuffle=False, workers=workers, share=share)


def name_of(source: Source, index: int) -> str:
    """Return the printable name of an image, even if its file no longer exists."""
    return printable(source.keys[index])


def open_labelled(
    data: str | Path,
    classes: list[str] | None,
    num_classes: int,
    settings: Recipe,
    trained_with: Recipe | None,
    *,
    test: bool = False,
) -> Splits:
    """Open a dataset with the classes of a model, split as the training run split it.

    The classes of a public model also match WordNet ids, and other ImageNet names than those that weft prints. `test`
    holds out the test split in place of the validation split.

    Raises:
        DataError: the dataset cannot be read, or has other classes.
    """
    imagenet = recognized(classes)
    splits = open_as_trained(
        data,
        settings,
        trained_with,
        allow_empty_class=True,
        classes=classes,
        match=None if imagenet is None else functools.partial(match_imagenet, imagenet),
        evaluate_only=True,
        test=test,
    )
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


def open_as_trained(data: str | Path, settings: Recipe, trained_with: Recipe | None, **arguments: Any) -> Splits:
    """Open a dataset, split as the training run split it.

    Args:
        data, settings, trained_with: as in `open_labelled`.
        arguments: more arguments of `open_data`.

    Raises:
        DataError: the dataset cannot be read.
    """
    as_trained = trained_with or settings
    is_same = trained_with is None or _is_same(data, trained_with.data.source)
    plan = replace(split_plan(as_trained), train_fraction=1.0, limit=settings.data.limit)
    if not is_same:  # the folds and groups mean nothing
        plan = replace(plan, folds=None, fold=1, group=None)
    with Work("reading") as work:
        splits = open_data(
            data,
            plan,
            image=as_trained.data.image,
            label=as_trained.data.label,
            max_bad=(as_trained if is_same else settings).data.max_bad,
            max_pixels=settings.data.max_pixels or as_trained.data.max_pixels,
            follow_links=as_trained.data.follow_links or settings.data.follow_links,
            progress=work.update,
            **arguments,
        )
    for text in splits.notes[1:]:  # the first one counts training images
        say(text)
    return splits


def split_plan(recipe: Recipe) -> SplitPlan:
    """Return the split that a recipe asks for."""
    data = recipe.data
    return SplitPlan(
        val_fraction=data.val_fraction,
        folds=data.folds,
        fold=data.fold or 1,
        seed=recipe.split_seed,
        group=data.group,
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
    if not run.exists():  # the name of a public model
        return None
    for folder in (run_folder(run), run.resolve().parent, run.resolve().parent.parent):
        if (folder / FINGERPRINT).is_file():
            return Fingerprint.read(folder / FINGERPRINT)
    return None


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
    """Select the images to evaluate.

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
    if split == "auto":
        split = "val"
        if not splits.is_given and images is not None:
            sides = [*images.sides_of(splits.train), *images.sides_of(splits.val)]
            if any(sides):
                return _not_trained_on(splits, sides, data)
            split = "all"
        elif not splits.is_given and (trained_with is None or not _is_same(data, trained_with.data.source)):
            split = "all"
    side = "val" if split == "test" else split  # opened as the held-out one
    source = {"train": splits.train, "val": splits.val, "all": JoinedSource(splits.train, splits.val)}[side]
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
    return Selected(split, SourcePart(JoinedSource(splits.train, splits.val), places), bad, 0)


def _bad(splits: Splits, split: str) -> list[tuple[str, str]]:
    return [(printable(item.key), item.reason) for item in splits.bad if split == "all" or item.split in ("", split)]


def _is_same(data: str | Path, source: str | None) -> bool:
    return source is not None and (str(data) == source or Path(data).resolve() == Path(source).resolve())


class JoinedSource:
    """Two sources with the same classes, one after the other."""

    def __init__(self, first: Source, second: Source) -> None:
        self.first, self.second = first, second
        self.classes, self.labels = first.classes, [*first.labels, *second.labels]
        self.keys = [*first.keys, *second.keys]
        self.max_pixels = max(pixel_limit(first), pixel_limit(second))

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def read(self, i: int) -> Sample:
        """Read image `i`."""
        return self.first.read(i) if i < len(self.first) else self.second.read(i - len(self.first))


class SourcePart:
    """Some images of a source, in the order of `places`."""

    def __init__(self, source: Source, places: Sequence[int]) -> None:
        self.source, self.places, self.classes = source, places, source.classes
        self.labels = [source.labels[place] for place in places]
        self.keys = [source.keys[place] for place in places]
        self.max_pixels = pixel_limit(source)

    def __len__(self) -> int:
        return len(self.places)

    def read(self, i: int) -> Sample:
        """Read image `i`."""
        return self.source.read(self.places[i])
