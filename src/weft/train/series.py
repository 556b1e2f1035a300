"""Series of similar images in the data of a run: found before the split, and held out as a whole.

A random split puts images of one series on both sides, and the accuracy is then that for further images of the same
series. They are looked for if neither the data nor the user say which images belong together.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from weft.checkpoints.bundled import BUNDLES, bundle_of
from weft.checkpoints.hub import create_model, is_cached
from weft.checkpoints.resolve import PREFIX
from weft.data import image_size_hint
from weft.data.bit_depth import ValueRange
from weft.data.decode import BadImage, open_image
from weft.data.groups import NONE, SIMILAR, is_file_of_groups, read_groups, write_groups
from weft.data.index import in_threads
from weft.data.open import is_library
from weft.data.series import MIN_SILHOUETTE, MIN_SILHOUETTE_PIXELS, find_series, standardised, whitened
from weft.data.source import LostDataError, Source, Splits, lost_error, pixel_limit
from weft.files import writing
from weft.inference.features import read_features
from weft.inference.inputs import SourcePart, images_of, series_of
from weft.inference.measurement import evaluation_batches
from weft.models.families import SMALL_SIDE
from weft.progress import Work, quietly
from weft.recipes import load_recipe
from weft.report.markup import Card
from weft.text import count
from weft.train.plan import FEATURE_BATCH, Plan, make_plan, open_splits
from weft.train.request import FINETUNE, Request

MAX_IMAGES = 20_000  # of more, series are only looked for if the user says so
SIDE = 8  # pixels of the small versions
SHOWN, SHOWN_SIDE = 6, 160  # pairs in the report, and pixels of their images


def in_series(plan: Plan) -> Plan:
    """Return the plan with a split that keeps each series of images on one side; the same plan if there are none.

    The images of a split that the data have stay; a note says how many series are on both sides.
    """
    if is_file_of_groups(plan.recipe.data.group):
        return dataclasses.replace(plan, series=read_groups(Path(str(plan.recipe.data.group))))
    if not is_sought(plan):
        return plan
    series = _series_of_start(plan)
    if series is None:
        series = series_of_images(plan)
    if plan.splits.is_given or not series:
        return dataclasses.replace(plan, notes=(*plan.notes, *_shared(plan.splits, series)))
    with quietly():
        grouped = make_plan(plan.request, series)
    groups = [*(grouped.splits.groups or ()), *(grouped.splits.val_groups or ())]
    note = (
        f"{count(len(groups), 'image')} in {len(set(groups)):,} series of similar images: every series is on one side"
        f" of the split. The accuracy is for images of other series. A random split: --group {NONE}."
    )
    return dataclasses.replace(grouped, notes=(*grouped.notes, note))


def is_sought(plan: Plan) -> bool:
    """Return whether series are looked for: if neither the user nor the data say which images belong together, and the
    images are not too many; and if the user asks for it."""
    data, splits = plan.recipe.data, plan.splits
    if splits.groups is not None or is_library(str(data.source)):
        return False
    is_left_open = data.group is None and data.limit is None and len(splits.train) + len(splits.val) <= MAX_IMAGES
    return is_left_open or data.group == SIMILAR


def group_of_runs(data: str, base: str | Path | None, settings: Mapping[str, Any], file: Path) -> str:
    """Return the setting `data.group` for runs that must hold out the same images: a file with the series, which is
    written here, or `none`; empty if the data or the user decide."""
    of_data = {key: value for key, value in settings.items() if key.startswith("data.")}
    with quietly():
        plan = make_plan(Request(data, base, {**of_data, "data.train_fraction": 1.0}))
    if plan.splits.is_given or plan.recipe.data.group is not None or not is_sought(plan):
        return ""
    if series := series_of_images(plan):
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_groups(file, series)
    return str(file) if series else NONE


def _series_of_start(plan: Plan) -> dict[str, str] | None:
    """Return the series of the run whose weights training starts from, if it has these images; else None."""
    start = plan.recipe.start_from
    images = None if start is None or start.startswith(PREFIX) else images_of(Path(start))
    if images is None or not any(images.sides_of(plan.splits.train)):
        return None
    return series_of(Path(str(start)))


def _shared(splits: Splits, series: Mapping[str, str]) -> list[str]:
    """Return a note if images of one series are on both sides of a split."""
    trained = {series[key] for key in splits.train.keys if key in series}
    if not (leaked := sum(series.get(key) in trained for key in splits.val.keys)):
        return []
    similar = count(leaked, "held-out image is", "held-out images are")
    return [
        f"{similar} similar to training images, of {len(splits.val):,}: they are of one series. The accuracy for images"
        " of other series is lower (docs/series.md)."
    ]


def series_of_images(plan: Plan) -> dict[str, str]:
    """Return the series of every image of the dataset by its key, without images that are alone; empty if there are no
    series. A series has the name of one of its images, so that another image does not change it.

    The first process finds them. They do not depend on the network of the run, so that all runs are split alike.
    """
    return plan.runtime.gather(_series(plan) if plan.runtime.is_main else None)[0] or {}


def _series(plan: Plan) -> dict[str, str]:
    images, name = _all_images(plan), _model(plan)
    if name is None:
        rows, least = whitened(_small(images, plan.recipe.data.value_range)), MIN_SILHOUETTE_PIXELS
    else:
        network: Any = create_model(name, pretrained=True).to(plan.runtime.device)
        network.pretrained_cfg = {**dict(network.pretrained_cfg), "value_range": plan.recipe.data.value_range}
        batches = evaluation_batches(images, network, FEATURE_BATCH, plan.recipe.workers, device=plan.runtime.device)
        with Work("series", len(images)) as work:
            features, _ = read_features(network, batches, plan.runtime, work.advance, is_mirrored=False)
        rows, least = standardised(features[0][:, 0]), MIN_SILHOUETTE
    numbers, silhouette = find_series(rows, np.array(images.labels))
    if silhouette < least:
        return {}
    members = defaultdict[int, list[str]](list)
    for key, number in zip(images.keys, numbers.tolist(), strict=True):
        members[number].append(key)
    return {key: min(keys) for keys in members.values() if len(keys) > 1 for key in keys}


def _all_images(plan: Plan) -> SourcePart:
    """Return the images of the whole dataset, of which a run may use a part."""
    recipe, splits = plan.recipe, plan.splits
    if recipe.data.limit is not None or recipe.data.train_fraction < 1:
        with quietly():
            splits = open_splits(
                dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, limit=None, train_fraction=1.0))
            )
    return SourcePart(splits.train, splits.val)


def _model(plan: Plan) -> str | None:
    """Return the network of the features: one whose public weights are on this disk, or the run's; None for pixels."""
    if min(image_size_hint(plan.splits.train)) < SMALL_SIDE:
        return None
    own, known = plan.recipe.model if plan.recipe.pretrained else None, (*BUNDLES, str(load_recipe(FINETUNE).model))
    return next((name for name in known if is_cached(name) or bundle_of(name)), own)


def pairs_of_series(plan: Plan) -> list[Card]:
    """Return a pair of held-out images of each of the largest series, of different classes, for the report."""
    images, groups = plan.splits.val, plan.splits.val_groups
    if not plan.series or groups is None:
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    largest = sorted((places for places in members.values() if len(places) > 1), key=len, reverse=True)
    of_classes = {images.labels[places[0]]: places for places in reversed(largest)}
    cards = []
    for label, places in sorted(of_classes.items(), key=lambda item: -len(item[1]))[:SHOWN]:
        value_range = plan.recipe.data.value_range
        shown = {images.keys[i]: _shown(images, i, value_range) for i in (places[0], places[-1])}
        cards.append(Card(shown, [images.classes[label], count(len(places), "held-out image") + " in this series"]))
    return cards


def _shown(images: Source, i: int, value_range: ValueRange | None) -> np.ndarray:
    """Return an image for the report."""
    data = images.read(i).data
    image = open_image(data, max_pixels=pixel_limit(images), at_least=SHOWN_SIDE, value_range=value_range)
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return np.asarray(image)


def _small(images: SourcePart, value_range: ValueRange | None) -> np.ndarray:
    """Return the images at 8x8 pixels (n values)."""

    def small(i: int) -> np.ndarray:
        source, place = images.origin(i)
        try:
            sample = source.read(place)
            limit = pixel_limit(images)
            image = open_image(sample.data, max_pixels=limit, at_least=4 * SIDE, value_range=value_range)
        except (BadImage, LostDataError) as error:
            if getattr(source, "takes_next", None):  # training reports it
                return np.zeros(3 * SIDE**2, np.uint8)
            raise lost_error(source, source.keys[place], error) if isinstance(error, BadImage) else error from None
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)).ravel()

    with Work("series", len(images)) as work:
        rows = []
        for row in in_threads(small, range(len(images))):
            rows.append(row)
            work.advance(1)
    return np.stack(rows)
