"""Preprocessing for evaluation and inference, with Pillow and NumPy: the same bits with and without torch.

The steps equal `timm.data.create_transform(is_training=False)`; a test compares every pixel. They are implemented here
so that processes that only decode uploads do not import torch, which is imported only to return tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from weft.errors import UsageError
from weft.models.contract import data_config

if TYPE_CHECKING:
    from torch import Tensor

    from weft.data.colour import Picture
    from weft.data.crops import Crop

MODES = ("center", "squash", "border")
INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "nearest", "random")
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
class Preprocessing:
    """Resize, crop the centre and normalise, as `eval_transform` configures it. A call takes all steps.

    Attributes:
        size: (height, width) of the result, in pixels.
        scaled: (height, width) before the crop: `size` divided by `crop_pct`, rounded down, at least 1.
        mode: `center`, `squash` or `border`.
        interpolation: `bicubic`, `bilinear`, `lanczos` or `nearest`.
        color: mode of the crop: `RGB`, or `L` for one channel of luma (ITU-R 601-2).
        mean, std: one value per channel, 0 to 1.
        value_range: black and white of images of more than 8 bits per channel, for `open_image`; None: their bit depth.
    """

    size: tuple[int, int]
    scaled: tuple[int, int]
    mode: str
    interpolation: str
    color: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    value_range: tuple[int, int] | None = None

    def __call__(self, image: Image.Image) -> Float[Tensor, "c h w"]:
        """Return the preprocessed image."""
        import torch

        return torch.from_numpy(self.normalize(np.array(self.crop(image))[None])[0])

    def crop(self, image: Image.Image) -> Image.Image:
        """Return the crop, of `size` and mode `color`; gray images keep their levels exactly in both modes."""
        image = image if image.mode == self.color else image.convert(self.color)  # the latter copies
        height, width = self._resized(image.height, image.width)
        if (image.height, image.width) != (height, width):
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = (_offset(side, cut) for side, cut in zip((height, width), self.size, strict=True))
        if height >= self.size[0] and width >= self.size[1]:
            return image.crop((left, top, left + self.size[1], top + self.size[0]))
        levels = [round(255 * value) if self.mode == "border" else 0 for value in self.mean]
        canvas = Image.new(self.color, (self.size[1], self.size[0]), tuple(levels) if len(levels) > 1 else levels[0])
        canvas.paste(image, (-left, -top))
        return canvas

    def window(self, image: Picture) -> UInt8[np.ndarray, "h w *c"]:
        """Return the pixels of the crop."""
        return np.asarray(self.crop(Image.fromarray(image.whole())))

    def draw(self, image: Picture) -> Crop:
        """Return the crop for a batch of a dataset; nothing is random."""
        from weft.data.crops import Crop

        return Crop(self.window(image))

    def pixels(self, image: Image.Image) -> Pixels:
        """Return the crop as an array, with the size of the whole image."""
        return Pixels(np.array(self.crop(image)), (image.height, image.width))

    def normalize(self, pixels: UInt8[np.ndarray, "b h w *c"]) -> Float[np.ndarray, "b c h w"]:
        """Return the normalised float32 planes of a batch of crops."""
        planes = pixels.transpose(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None]
        images = np.ascontiguousarray(planes).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        images /= np.float32(255)
        images -= mean
        images /= std
        return images

    def region(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return (left, top, width, height) of the crop as fractions of the image's sides; outside 0 to 1 if padded."""
        factors = [scaled / side for scaled, side in zip(self.scaled, (height, width), strict=True)]
        if self.mode == "center":
            factors = [max(factors)] * 2
        elif self.mode == "border":
            factors = [min(factors)] * 2
        tall, wide = (cut / (side * f) for cut, side, f in zip(self.size, (height, width), factors, strict=True))
        return (1 - wide) / 2, (1 - tall) / 2, wide, tall

    def note(self, sizes: Sequence[tuple[int, int]] | np.ndarray) -> str:
        """Return a note if the images have another shape than the crop, which cuts them; else an empty text.

        Args:
            sizes: (height, width) of the images in pixels.
        """
        if self.mode != "center" or not len(sizes):
            return ""
        height, width = self.size
        heights, widths = np.array(sizes, np.float64).T
        ratios = (widths / heights) / (width / height)
        ratio = np.median(np.maximum(ratios, 1 / ratios))
        if ratio <= MAX_RATIO:
            return ""
        factors = np.maximum(self.scaled[0] / heights, self.scaled[1] / widths)
        kept = np.median(np.minimum(height / (heights * factors), 1) * np.minimum(width / (widths * factors), 1))
        num_wide = int((ratios > 1).sum())
        shape = "wider" if 2 * num_wide > len(sizes) else "taller"
        typical = float(np.median(widths / heights))
        side = (height * width / typical) ** 0.5
        fitting = [max(round(one / SIDE_STEP), 1) * SIDE_STEP for one in (side, side * typical)]
        is_one_shape = max(num_wide, len(sizes) - num_wide) >= MIN_SAME_SHAPE * len(sizes)
        advice = f" An input of their shape shows more: --img-size {fitting[0]}x{fitting[1]}." if is_one_shape else ""
        return (
            f"The images are {shape} than the input of {height}x{width}: by a factor of {ratio:.1f} (median)."
            f" Evaluation and prediction see the centre, and {100 * (1 - kept):.0f} % of the area of an image"
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
        return max(round(height / ratio), 1), max(round(width / ratio), 1)  # timm's is 0 for an image of 1x100 pixels


def eval_transform(cfg: Mapping[str, Any] | Any) -> Preprocessing:
    """Create the evaluation transform of a model, as timm does: resize, crop, normalise.

    Args:
        cfg: a model's `pretrained_cfg`, or a mapping with some of its keys: `input_size` (c, h, w), `interpolation`,
            `mean`, `std`, `crop_pct` (fraction of the resized side) and `crop_mode`: `center` resizes the short
            side and crops the centre, `squash` resizes both sides, `border` resizes the long side and pads. Its
            `value_range` is for `open_image`.

    Returns:
        A transform from an upright PIL image to a float32 tensor of `input_size`.

    Raises:
        UsageError: an invalid value.
    """
    resolved = data_config(cfg if isinstance(cfg, Mapping) else asdict(cfg))
    (in_chans, height, width), mode = resolved["input_size"], resolved["crop_mode"]
    interpolation, value_range = resolved["interpolation"], resolved.get("value_range")
    if interpolation not in INTERPOLATIONS:
        raise UsageError(f"interpolation must be bicubic, bilinear, lanczos, nearest or random; got '{interpolation}'.")
    mean, std = _per_channel(resolved["mean"], in_chans), _per_channel(resolved["std"], in_chans)
    if mode not in MODES:
        raise UsageError(f"crop_mode must be center, squash or border; got '{mode}'.")
    if in_chans not in (1, 3):
        raise UsageError(f"in_chans must be 3 (RGB) or 1 (gray) for image files; got {in_chans}.")
    return Preprocessing(
        size=(height, width),
        scaled=(max(int(height / resolved["crop_pct"]), 1), max(int(width / resolved["crop_pct"]), 1)),
        mode=mode,
        interpolation="bicubic" if interpolation == "random" else interpolation,
        color="RGB" if in_chans == 3 else "L",
        mean=mean,
        std=std,
        value_range=tuple(value_range) if value_range else None,
    )


def visible(images: Float[Tensor, "*b c h w"], cfg: Mapping[str, Any]) -> Float[Tensor, "*b 3 h w"]:
    """Undo the normalisation: RGB of 0 to 1, clamped. Gray images get three equal channels; of more than three
    channels, which no file has, the first three are used. `cfg` as in `eval_transform`."""
    import torch

    resolved, channels = data_config(cfg), images.shape[-3]
    values = (resolved[key] if channels <= 3 else resolved[key][:1] * channels for key in ("mean", "std"))
    mean, std = (torch.tensor(_per_channel(value, channels))[:, None, None] for value in values)
    colours = (images.float() * std + mean).clamp(0, 1)
    return colours.expand(*colours.shape[:-3], 3, -1, -1) if channels == 1 else colours[..., :3, :, :]


def _per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Return one value per channel; for one channel of three values, their mean."""
    if len(values) == 3 and in_chans == 1:
        return (sum(values) / 3,)
    if len(values) != in_chans:
        raise UsageError(f"mean and std must have one value per channel ({in_chans}); got {tuple(values)}.")
    return tuple(values)


def _offset(side: int, cut: int) -> int:
    """Return the start of a centred crop; negative where the side is shorter, and padded."""
    return round((side - cut) / 2) if side >= cut else -((cut - side) // 2)
