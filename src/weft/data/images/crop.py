"""Resize and crop of the evaluation transform, with Pillow and without torch.

The steps equal `timm.data.create_transform(is_training=False)`; a test compares every pixel. They are implemented here
so that processes that only decode uploads do not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from weft.errors import UsageError

MODES = ("center", "squash", "border")
MAX_RATIO = 1.5  # of the aspects of image and crop, without a note
SIDE_STEP = 32  # the advised sides are multiples; the largest patch and total stride of common networks
MIN_SAME_SHAPE = 0.9  # share of the images that are all wider, or all taller, than the crop for advice on its shape


class Pixels(NamedTuple):
    """Pixels of the evaluation crop of an image.

    Attributes:
        values: uint8, (height, width, 3), or (height, width) for one channel.
        size: (height, width) of the whole image after EXIF orientation.
    """

    values: np.ndarray
    size: tuple[int, int]


@dataclass(frozen=True)
class EvalCrop:
    """Resize, then centre crop.

    Attributes:
        size: (height, width) of the result, in pixels.
        scaled: (height, width) before the crop: `size` divided by `crop_pct`, rounded down, at least 1.
        mode: `center` resizes the short side and crops the centre, `squash` resizes both sides, `border` resizes the
            long side and pads.
        interpolation: `bicubic`, `bilinear`, `lanczos` or `nearest`.
        color: mode of the result: `RGB`, or `L` for one channel of luma (ITU-R 601-2).
        fill: padding colour of `border`, 0 to 255 per channel; a gray image uses the first.
        value_range: black and white of images of more than 8 bits per channel, for `open_image`; None: their bit depth.
    """

    size: tuple[int, int]
    scaled: tuple[int, int]
    mode: str
    interpolation: str
    color: str
    fill: tuple[int, int, int]
    value_range: tuple[int, int] | None = None

    @classmethod
    def of(cls, resolved: Mapping[str, Any], mean: Sequence[float]) -> EvalCrop:
        """Build from the result of `timm.data.resolve_data_config`; `mean` has one value per channel, 0 to 1.

        Raises:
            UsageError: an unknown crop mode, or neither 1 nor 3 channels.
        """
        in_chans, height, width = resolved["input_size"]
        if resolved["crop_mode"] not in MODES:
            raise UsageError(f"crop_mode must be center, squash or border; got '{resolved['crop_mode']}'.")
        if in_chans not in (1, 3):
            raise UsageError(f"in_chans must be 3 (RGB) or 1 (gray) for image files; got {in_chans}.")
        return cls(
            size=(height, width),
            scaled=(max(int(height / resolved["crop_pct"]), 1), max(int(width / resolved["crop_pct"]), 1)),
            mode=resolved["crop_mode"],
            interpolation="bicubic" if resolved["interpolation"] == "random" else resolved["interpolation"],
            color="RGB" if in_chans == 3 else "L",
            fill=(round(255 * mean[0]), round(255 * mean[len(mean) // 2]), round(255 * mean[-1])),
            value_range=tuple(value_range) if (value_range := resolved.get("value_range")) else None,
        )

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the crop, of `size` and mode `color`; gray images keep their levels exactly in both modes."""
        image = image if image.mode == self.color else image.convert(self.color)  # the latter copies
        height, width = self._resized(image.height, image.width)
        if (image.height, image.width) != (height, width):
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = (_offset(side, cut) for side, cut in zip((height, width), self.size, strict=True))
        if height >= self.size[0] and width >= self.size[1]:
            return image.crop((left, top, left + self.size[1], top + self.size[0]))
        fill = self.fill if self.mode == "border" else (0, 0, 0)
        canvas = Image.new(self.color, (self.size[1], self.size[0]), fill if self.color == "RGB" else fill[0])
        canvas.paste(image, (-left, -top))
        return canvas

    def pixels(self, image: Image.Image) -> Pixels:
        """Return the crop as an array, with the size of the whole image."""
        return Pixels(np.array(self(image)), (image.height, image.width))

    def region(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return (left, top, width, height) of the crop as fractions of the image's sides; outside 0 to 1 if padded."""
        factors = [scaled / side for scaled, side in zip(self.scaled, (height, width), strict=True)]
        if self.mode == "center":
            factors = [max(factors)] * 2
        elif self.mode == "border":
            factors = [min(factors)] * 2
        tall, wide = (cut / (side * f) for cut, side, f in zip(self.size, (height, width), factors, strict=True))
        return (1 - wide) / 2, (1 - tall) / 2, wide, tall

    def note(self, sizes: Sequence[tuple[int, int]]) -> str:
        """Return a note if the images have another shape than the crop, which cuts them; else an empty text.

        Args:
            sizes: (height, width) of the images in pixels.
        """
        if self.mode != "center" or not sizes:
            return ""
        height, width = self.size
        ratios = [(w / h) / (width / height) for h, w in sizes]
        ratio = median(max(one, 1 / one) for one in ratios)
        if ratio <= MAX_RATIO:
            return ""
        kept = [min(wide, 1) * min(tall, 1) for _, _, wide, tall in (self.region(*size) for size in sizes)]
        num_wide = sum(one > 1 for one in ratios)
        shape = "wider" if 2 * num_wide > len(sizes) else "taller"
        typical = median(w / h for h, w in sizes)
        side = (height * width / typical) ** 0.5
        fitting = [max(round(one / SIDE_STEP), 1) * SIDE_STEP for one in (side, side * typical)]
        is_one_shape = max(num_wide, len(sizes) - num_wide) >= MIN_SAME_SHAPE * len(sizes)
        advice = f" An input of their shape shows more: --img-size {fitting[0]}x{fitting[1]}." if is_one_shape else ""
        return (
            f"The images are {shape} than the input of {height}x{width}: by a factor of {ratio:.1f} (median)."
            f" Evaluation and prediction see the centre, and {100 * (1 - median(kept)):.0f} % of the area of an image"
            f" is cut off.{advice}"
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) before the crop."""
        if self.mode == "squash":
            return self.scaled
        if self.mode == "center" and self.scaled[0] == self.scaled[1]:
            short = self.scaled[0]  # torchvision's Resize: the long side is rounded down
            return (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
        ratios = height / self.scaled[0], width / self.scaled[1]  # timm's ResizeKeepRatio: both sides are rounded
        ratio = max(ratios) if self.mode == "border" else min(ratios)
        return max(round(height / ratio), 1), max(
            round(width / ratio), 1
        )  # timm's would be 0 for an image of 1x100 pixels


def _offset(side: int, cut: int) -> int:
    """Return the start of a centred crop; negative where the side is shorter, and padded."""
    return round((side - cut) / 2) if side >= cut else -((cut - side) // 2)
