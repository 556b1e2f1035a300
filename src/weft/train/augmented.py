"""Preview of augmented training images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from weft.data import Splits, open_image
from weft.data.index.source import stratified_subset
from weft.data.loading.transforms import visible
from weft.recipes import Recipe
from weft.train.build import preprocessing, training_images
from weft.train.objective import Mixing
from weft.train.page import shown

PICTURES = 6  # rows; an even number, since they are mixed in pairs
EPOCHS = 6  # columns, beside the pictures as they are
SIDE = 1.7  # inches of a picture
WIDTH = 14  # letters of a class
LEAST = 0.005  # a smaller share of a class is left out


def augmented_figure(recipe: Recipe, splits: Splits, model: nn.Module) -> Figure:
    """A row for each of some pictures, in turn from every class: as it is, and as it comes in the first epochs.

    The variations are those that training will draw. Which pictures are mixed with each other is not: here, those of a
    column are, and below each stands what it is then taught as.

    Args:
        recipe: with everything decided.
        splits: whose training side is looked at.
        model: whose size and normalisation are taken.
    """
    source, count = splits.train, min(PICTURES, len(splits.train) // 2 * 2)
    places = stratified_subset([str(place) for place in range(len(source))], source.labels, count, recipe.seed)
    figure = Figure(figsize=(SIDE * (EPOCHS + 1), (SIDE + 0.25) * len(places)), layout="constrained")
    grid = figure.subplots(len(places), EPOCHS + 1, squeeze=False)
    for axes, place in zip(grid[:, 0], places, strict=True):
        axes.imshow(open_image(source.read(place).data))
        axes.set_xlabel(shown(splits.classes[source.labels[place]], WIDTH), fontsize="x-small")
    images, mixing = training_images(recipe, source, model), Mixing(recipe, len(splits.classes))
    for epoch in range(EPOCHS):
        varied, labels = zip(*(images[epoch, place] for place in places), strict=True)
        mixed, targets = mixing(torch.stack(varied), torch.tensor(labels), epoch)
        column = grid[:, epoch + 1]
        for axes, image, target in zip(column, visible(mixed, preprocessing(model)), targets, strict=True):
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            if mixing.mixup is not None:
                axes.set_xlabel(_taught(target, splits.classes, recipe.loss.label_smoothing), fontsize="x-small")
    for title, axes in zip(["as it is", *(f"epoch {1 + epoch}" for epoch in range(EPOCHS))], grid[0], strict=True):
        axes.set_title(title, fontsize="small")
    for axes in grid.ravel():
        _bare(axes)
    return figure


def _taught(target: Float[Tensor, " classes"], classes: Sequence[str], smoothing: float) -> str:
    """`dog 70 %, cat 30 %`: the shares before they were smoothed."""
    shares = ((target - smoothing / len(classes)) / (1 - smoothing)).tolist()
    order = sorted(range(len(classes)), key=lambda number: -shares[number])
    kept = [number for number in order if shares[number] > LEAST]
    return "\n".join(f"{shown(classes[number], WIDTH)} {shares[number]:.0%}".replace("%", " %") for number in kept)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)
