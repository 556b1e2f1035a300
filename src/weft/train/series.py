"""Series of similar images in the data of a run: found before the split, and held out as a whole.

A random split puts images of one series on both sides, and the accuracy is then that for further images of the same
series. They are looked for if neither the data nor the user say which images belong together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from weft.data.decode import BadImage, open_image
from weft.data.groups import NONE, SIMILAR, is_file_of_groups, read_groups
from weft.data.index import in_threads
from weft.data.open import is_library
from weft.data.series import MIN_SILHOUETTE, MIN_SILHOUETTE_PIXELS, find_series, standardised, whitened
from weft.data.source import LostDataError, Source, Splits, lost_error, pixel_limit
from weft.inference.features import has_classifiers, read_features
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.progress import Work, quietly
from weft.report.markup import Card
from weft.text import count
from weft.train.network import load_start_weights
from weft.train.plan import FEATURE_BATCH, Plan, open_splits

MAX_IMAGES = 20_000  # of more, series are only looked for if the user says so
SIDE = 8  # pixels of the small versions
SHOWN, SHOWN_SIDE = 6, 160  # pairs in the report, and pixels of their images


def in_series(plan: Plan) -> Plan:
    """Return the plan with a split that keeps each series of images on one side; the same plan if there are none.

    The images of a split that the data have stay; a note says how many series are on both sides.
    """
    data, splits = plan.recipe.data, plan.splits
    if is_file_of_groups(data.group):
        recipe = dataclasses.replace(plan.recipe, data=dataclasses.replace(data, group=SIMILAR))
        return dataclasses.replace(plan, recipe=recipe, series=read_groups(Path(str(data.group))))
    is_left_open = data.group is None and data.limit is None and len(splits.train) + len(splits.val) <= MAX_IMAGES
    has_own = splits.groups is not None or is_library(str(data.source))
    if has_own or not (is_left_open or data.group == SIMILAR):
        return plan
    series = series_of_images(plan)
    if splits.is_given or not series:
        return dataclasses.replace(plan, notes=(*plan.notes, *_shared(splits, series)))
    recipe = dataclasses.replace(plan.recipe, data=dataclasses.replace(data, group=SIMILAR))
    with quietly():
        grouped = open_splits(recipe, series)
    number = len(set(series.values())) + len(splits.train) + len(splits.val) - len(series)
    note = (
        f"{count(len(splits.train) + len(splits.val), 'image')} in {number:,} series of similar images: every series is"
        f" on one side of the split. The accuracy is for images of other series. A random split: --group {NONE}."
    )
    notes = (*grouped.notes, note, *plan.notes[len(splits.notes) :])
    return dataclasses.replace(plan, recipe=recipe, splits=grouped, notes=notes, series=series)


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
    """Return the series of every image by its key, without images that are alone; empty if there are no series.

    The first process finds them.
    """
    return plan.runtime.gather(_series(plan) if plan.runtime.is_main else None)[0] or {}


def _series(plan: Plan) -> dict[str, str]:
    recipe, images = plan.recipe, SourcePart(plan.splits.train, plan.splits.val)
    has_weights = recipe.pretrained or recipe.start_from is not None
    if has_weights and has_classifiers(plan.network):
        if recipe.start_from is not None:
            load_start_weights(plan.network, recipe.start_from, plan.splits.classes)
        batches = evaluation_batches(images, plan.network, FEATURE_BATCH, recipe.workers)
        with Work("series", len(images)) as work:
            features, _ = read_features(plan.network, batches, plan.runtime, work.advance, is_mirrored=False)
        rows, least = standardised(features[0][:, 0]), MIN_SILHOUETTE
    else:
        rows, least = whitened(_small(images)), MIN_SILHOUETTE_PIXELS
    series, silhouette = find_series(rows, np.array(images.labels))
    sizes = Counter(series.tolist())
    if silhouette < least:
        return {}
    return {key: f"series {one}" for key, one in zip(images.keys, series.tolist(), strict=True) if sizes[one] > 1}


def pairs_of_series(plan: Plan) -> list[Card]:
    """Return a pair of held-out images of each of the largest series, of different classes, for the report."""
    images, groups = plan.splits.val, plan.splits.val_groups
    if plan.recipe.data.group != SIMILAR or groups is None:
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    largest = sorted((places for places in members.values() if len(places) > 1), key=len, reverse=True)
    of_classes = {images.labels[places[0]]: places for places in reversed(largest)}
    cards = []
    for label, places in sorted(of_classes.items(), key=lambda item: -len(item[1]))[:SHOWN]:
        shown = {images.keys[i]: _shown(images, i) for i in (places[0], places[-1])}
        cards.append(Card(shown, [images.classes[label], count(len(places), "held-out image") + " in this series"]))
    return cards


def _shown(images: Source, i: int) -> np.ndarray:
    """Return an image for the report."""
    image = open_image(images.read(i).data, max_pixels=pixel_limit(images), at_least=SHOWN_SIDE)
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return np.asarray(image)


def _small(images: SourcePart) -> np.ndarray:
    """Return the images at 8x8 pixels (n values)."""

    def small(i: int) -> np.ndarray:
        source, place = images.origin(i)
        try:
            sample = source.read(place)
            image = open_image(sample.data, max_pixels=pixel_limit(images), at_least=4 * SIDE)
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
