"""Draw a preview of augmented training images (`weft train --preview`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.data import Splits, open_image
from weft.data.preprocessing import visible
from weft.data.source import pixel_limit
from weft.data.split import stratified_subset
from weft.models.contract import preprocessing
from weft.recipes import Recipe
from weft.report.pages import new_figure, shown
from weft.train.objective import Mixing
from weft.train.plan import training_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = 6  # rows; an even number, since images are mixed in pairs
EPOCHS = 6  # columns, after that of the original images
SIDE = 1.7  # inches of an image
WIDTH = 14  # characters of a class name
MIN_SHARE = 0.005  # smaller shares of a class are left out


def augmented_figure(recipe: Recipe, splits: Splits, model: nn.Module) -> Figure:
    """Draw one row per image, from every class in turn: the original, and its augmented versions in the first epochs.

    The augmentations are those that training will draw. The partners of mixup and cutmix are not: here, the images of
    a column are mixed with each other. The label below an image has its target classes.

    Args:
        recipe: with every decision made.
        splits: the dataset; training images are drawn.
        model: its input size and normalisation are used.
    """
    source, count = splits.train, min(IMAGES, len(splits.train) // 2 * 2)
    indices = stratified_subset([str(i) for i in range(len(source))], source.labels, count, recipe.seed)
    figure = new_figure(SIDE * (EPOCHS + 1), (SIDE + 0.25) * len(indices))
    grid = figure.subplots(len(indices), EPOCHS + 1, squeeze=False)
    for axes, index in zip(grid[:, 0], indices, strict=True):
        data, limit = source.read(index).data, pixel_limit(source)
        axes.imshow(open_image(data, max_pixels=limit, value_range=recipe.data.value_range))
        axes.set_xlabel(shown(splits.classes[source.labels[index]], WIDTH), fontsize="x-small")
    images, mixing = training_images(recipe, source, model), Mixing(recipe, len(splits.classes))
    for epoch in range(EPOCHS):
        augmented, labels = zip(*(images[epoch, index] for index in indices), strict=True)
        mixed, targets = mixing(torch.stack(augmented), torch.tensor(labels), epoch)
        column = grid[:, epoch + 1]
        for axes, image, target in zip(column, visible(mixed, preprocessing(model)), targets, strict=True):
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            if mixing.mixup is not None:
                axes.set_xlabel(_target_text(target, splits.classes, recipe.loss.label_smoothing), fontsize="x-small")
    for title, axes in zip(["original", *(f"epoch {1 + epoch}" for epoch in range(EPOCHS))], grid[0], strict=True):
        axes.set_title(title, fontsize="small")
    for axes in grid.ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)
    return figure


def _target_text(target: Float[Tensor, " classes"], classes: Sequence[str], smoothing: float) -> str:
    """Return the target as text, such as `dog 70 %, cat 30 %`, without label smoothing."""
    shares = ((target - smoothing / len(classes)) / (1 - smoothing)).tolist()
    order = sorted(range(len(classes)), key=lambda number: -shares[number])
    kept = [number for number in order if shares[number] > MIN_SHARE]
    return "\n".join(f"{shown(classes[number], WIDTH)} {shares[number]:.0%}".replace("%", " %") for number in kept)
