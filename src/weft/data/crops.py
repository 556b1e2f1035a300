"""Crops on their way from the workers to the model: 8-bit pixels, a quarter of the bytes of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from weft.data.colour import Picture


class Patch(NamedTuple):
    """Values that replace a part of a normalised image; `top` and `left` are its place in pixels."""

    top: int
    left: int
    values: Float[Tensor, "c h w"]


class Crop(NamedTuple):
    """The pixels of one image as the model sees it, and the patch that is erased, if any."""

    pixels: UInt8[np.ndarray, "h w *c"]
    patch: Patch | None = None


class Transform(Protocol):
    """Makes a crop of an image; may use `random`, `numpy.random` and `torch`.

    Attributes:
        mean, std: one value per channel, 0 to 1, to normalise with.
    """

    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...

    def draw(self, image: Picture) -> Crop:
        """Return the pixels, of the same size for all images of a batch."""
        ...


class Crops(NamedTuple):
    """A batch of crops with their labels. All patches are in two tensors, which workers send as two files.

    Attributes:
        pixels: all pixels.
        labels: class indices.
        boxes: of each patch: number of its image, top, left, height and width.
        values: of all patches, one after the other.
        damaged: indices of images in place of which others are in the batch.
    """

    pixels: UInt8[Tensor, "b h w c"]
    labels: Int64[Tensor, " b"]
    boxes: Int64[Tensor, "patches 5"]
    values: Float[Tensor, " values"]
    damaged: Sequence[int] = ()


def batch_of(crops: Sequence[Crop], labels: Sequence[int], damaged: Sequence[int] = ()) -> Crops:
    """Collect crops of one size."""
    pixels = np.stack([crop.pixels for crop in crops])
    patches = [(number, crop.patch) for number, crop in enumerate(crops) if crop.patch is not None]
    boxes = [(number, patch.top, patch.left, *patch.values.shape[1:]) for number, patch in patches]
    values = [patch.values.flatten() for _, patch in patches]
    return Crops(
        torch.from_numpy(pixels if pixels.ndim == 4 else pixels[..., None]),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(boxes, dtype=torch.int64).reshape(-1, 5),
        torch.cat(values) if values else torch.empty(0),
        damaged,
    )


def normalized(
    crops: Crops, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
) -> Float[Tensor, "b c h w"]:
    """Return the images on a device: scaled to 0 to 1, normalised by channel, patches erased."""
    pixels, values = (part.to(device, non_blocking=True) for part in (crops.pixels, crops.values))
    images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    shift, scale = (torch.tensor(one, dtype=torch.float32, device=device)[:, None, None] for one in (mean, std))
    images.div_(255).sub_(shift).div_(scale)
    start = 0
    for number, top, left, height, width in crops.boxes.tolist():
        size = images.shape[1] * height * width
        patch = values[start : start + size].view(-1, height, width)
        images[number, :, top : top + height, left : left + width] = patch
        start += size
    return images
