"""Feature map: the features of images in two dimensions, by t-SNE, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.checkpoints.unknown import unit_length
from weft.inference.metrics import MAX_MATRIX, Evaluation
from weft.report.pages import NUM_STYLES, new_figure, series_style, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST, MOST = 10, 2_000  # images of a map; of more, 2,000 are drawn
COMPONENTS = 50  # of PCA, before t-SNE
PERPLEXITY = 30
MAX_CLASSES = 30  # with more, the legend is left out
MAX_NAMES = 10  # misclassified images with their names
NAME_WIDTH = 24


def drawn_of(count: int) -> np.ndarray:
    """Return the indices of the images to draw, of `count`: at most 2,000, at equal distances."""
    return np.linspace(0, count - 1, min(count, MOST)).round().astype(int)


def feature_map(features: np.ndarray, result: Evaluation, rows: np.ndarray) -> tuple[Figure, str] | None:
    """Draw the features of evaluated images in two dimensions; misclassified images have a ring and a name.

    Args:
        features: (images features).
        result: evaluation of these images and others.
        rows: (images) their indices in the columns of `result`.

    Returns:
        The map and its caption; None without features, for fewer than ten images, and if features are not finite.
    """
    if len(rows) < FEWEST or not features.size or not np.isfinite(features).all():
        return None
    names = {
        mistake.place: f"{shown(Path(mistake.key).name, NAME_WIDTH)}: {shown(mistake.predicted, NAME_WIDTH)}"
        for mistake in result.mistakes[:MAX_NAMES]
    }
    named = [names.get(place, "") for place in result.places[rows].tolist()]
    figure = draw(two_dimensions(features), result.true[rows], result.is_correct[rows], result.classes, named)
    number = f"{len(rows):,} of {result.count:,} images" if len(rows) < result.count else f"{len(rows):,} images"
    caption = (
        f"Features of {number} in two dimensions (t-SNE): colour and marker are the true class, rings are misclassified"
        " images, the most confident with file name and predicted class. Only neighbourhoods have a meaning, distances"
        " between groups do not."
    )
    return figure, caption


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
    styles = len(classes) if len(classes) <= MAX_MATRIX else NUM_STYLES
    for number, name in enumerate(classes[:styles]):
        own = points[labels % styles == number]
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
