"""Feature map: the features of images in two dimensions, by t-SNE, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import nn

from weft.data import Source
from weft.errors import DataError, UsageError
from weft.inference.features import FeatureReader, unit_length
from weft.inference.inputs import SourcePart, evaluation_batches
from weft.inference.metrics import Evaluation
from weft.pages import new_figure, series_style, shown
from weft.runtime import Runtime

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST, MOST = 10, 2_000  # images of a map; of more, 2,000 are drawn
COMPONENTS = 50  # of PCA, before t-SNE
PERPLEXITY = 30
MAX_CLASSES = 30  # with more, the legend is left out
MAX_NAMES = 10  # misclassified images with their names
NAME_WIDTH = 24


class FeatureMap(NamedTuple):
    """Figure of the features of images, and its caption."""

    figure: Figure
    caption: str


def feature_map(
    network: nn.Module, source: Source, result: Evaluation, runtime: Runtime, batch_size: int = 32, workers: int = 0
) -> FeatureMap | None:
    """Draw the features of the evaluated images in two dimensions; misclassified images have a ring and a name.

    Args:
        network: on the device of `runtime`; its mode is restored.
        source: the images; `result.places` are indices in it.
        result: evaluation of the images.
        runtime: device and precision.
        batch_size, workers: of reading the images.

    Returns:
        The map; None for a network without a linear classifier, fewer than ten images, and images that can no longer be
        read.
    """
    if result.count < FEWEST:
        return None
    drawn = _spread(result.count)
    places = [int(result.places[i]) for i in drawn]
    try:
        with FeatureReader(network, runtime, is_cached=False) as reader:
            batches = evaluation_batches(SourcePart(source, places), network, batch_size, workers)
            features = np.concatenate([reader(images) for images, _ in batches])
    except (DataError, UsageError):
        return None
    if not np.isfinite(features).all():
        return None
    names = {
        mistake.place: f"{shown(Path(mistake.key).name, NAME_WIDTH)}: {shown(mistake.predicted, NAME_WIDTH)}"
        for mistake in result.mistakes[:MAX_NAMES]
    }
    points = two_dimensions(features)
    figure = draw(
        points, result.true[drawn], result.is_correct[drawn], result.classes, [names.get(place, "") for place in places]
    )
    number = f"{len(places):,} of {result.count:,} images" if len(places) < result.count else f"{len(places):,} images"
    return FeatureMap(
        figure,
        f"Features of {number} in two dimensions (t-SNE): colour and marker are the true class, rings are misclassified"
        " images, the most confident with file name and predicted class. Only neighbourhoods have a meaning, distances"
        " between groups do not.",
    )


def _spread(count: int) -> np.ndarray:
    """Return indices below `count`, at most 2,000, at equal distances."""
    return np.linspace(0, count - 1, min(count, MOST)).round().astype(int)


def two_dimensions(features: np.ndarray) -> np.ndarray:
    """Return the t-SNE embedding (images 2) of features (images features), by their cosine similarity."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    points = unit_length(features.astype(np.float64))
    if np.ptp(points, axis=0).max() < 1e-9:  # all images have the same features
        return np.zeros((len(points), 2))
    with threadpool_limits(1):
        if COMPONENTS < min(points.shape):
            points = PCA(COMPONENTS, random_state=0).fit_transform(points)
        perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
        start = "pca" if points.shape[1] >= 2 else "random"
        return TSNE(2, perplexity=perplexity, init=start, random_state=0).fit_transform(points)


def draw(
    points: np.ndarray, labels: np.ndarray, right: np.ndarray, classes: Sequence[str], names: Sequence[str]
) -> Figure:
    """Draw points (images 2) with the marker and colour of their classes.

    Args:
        points: (images 2).
        labels: (images) class indices.
        right: (images) whether each image is classified correctly.
        classes: class names.
        names: text to write next to each image, or an empty text.
    """
    with_legend = len(classes) <= MAX_CLASSES
    figure = new_figure(9 if with_legend else 7, 6.5)
    axes = figure.subplots()
    size = 30 if len(points) <= 500 else 12
    for number, name in enumerate(classes):
        own = points[labels == number]
        colour, marker = series_style(number)
        axes.scatter(
            *own.T, s=size, color=colour, marker=marker, alpha=0.75, linewidths=0, label=shown(name, NAME_WIDTH)
        )
    wrong = points[~right]
    axes.scatter(*wrong.T, s=4 * size, facecolors="none", edgecolors="black", linewidths=1.1, label="misclassified")
    for point, name in zip(points, names, strict=True):
        if name:
            axes.annotate(name, tuple(point), xytext=(6, 5), textcoords="offset points", fontsize=7)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.07)
    if with_legend:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure
