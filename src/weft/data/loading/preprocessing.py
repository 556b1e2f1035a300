"""Preprocessing for inference, with Pillow and NumPy: the same bits with and without torch.

torch is imported only by the functions that return its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from weft.data.images.crop import EvalCrop
from weft.errors import UsageError
from weft.models.contract import data_config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EvalTransform:
    """Crop and normalise; `mean` and `std` have one value per channel, 0 to 1."""

    crop: EvalCrop
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def value_range(self) -> tuple[int, int] | None:
        """Black and white of images of more than 8 bits per channel; for `open_image`."""
        return self.crop.value_range

    def __call__(self, image: Image.Image) -> Float[Tensor, "c h w"]:
        """Transform an upright image."""
        import torch

        return torch.from_numpy(_normalized(np.array(self.crop(image))[None], self.mean, self.std)[0])


def eval_transform(cfg: Mapping[str, Any] | Any) -> EvalTransform:
    """Create the evaluation transform of a model, as timm does: resize, crop, normalise.

    Args:
        cfg: a model's `pretrained_cfg`, or a mapping with some of its keys: `input_size` (c, h, w), `interpolation`,
            `mean`, `std`, `crop_pct` (fraction of the resized side) and `crop_mode`: `center` resizes the short
            side and crops the centre, `squash` resizes both sides, `border` resizes the long side and pads. Its
            `value_range` is for `open_image`.

    Returns:
        A transform from a PIL image to a float32 tensor of `input_size`.

    Raises:
        UsageError: an invalid value.
    """
    return EvalTransform(*evaluation(cfg))


def eval_crop(cfg: Mapping[str, Any] | Any) -> EvalCrop:
    """Return the first step of `eval_transform`, from PIL image to PIL image; it needs no torch.

    Args:
        cfg: as in `weft.data.eval_transform`.

    Raises:
        UsageError: an invalid value.
    """
    return evaluation(cfg)[0]


def normalize(pixels: UInt8[np.ndarray, "b h w *c"], cfg: Mapping[str, Any] | Any) -> Float[np.ndarray, "b c h w"]:
    """Apply the other steps of `eval_transform` to a batch: uint8 pixels to normalised float32."""
    _, mean, std = evaluation(cfg)
    return _normalized(pixels, mean, std)


def _normalized(
    pixels: UInt8[np.ndarray, "b h w *c"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[np.ndarray, "b c h w"]:
    planes = pixels.transpose(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None]
    images = np.ascontiguousarray(planes).astype(np.float32)
    shift, scale = (np.array(values, np.float32)[:, None, None] for values in (mean, std))
    images /= np.float32(255)
    images -= shift
    images /= scale
    return images


def evaluation(cfg: Mapping[str, Any] | Any) -> tuple[EvalCrop, tuple[float, ...], tuple[float, ...]]:
    """Return the crop, the mean and the standard deviation of each channel; `cfg` as in `eval_crop`."""
    resolved = data_config(cfg if isinstance(cfg, Mapping) else asdict(cfg))
    check_interpolation(resolved["interpolation"])
    in_chans = resolved["input_size"][0]
    mean, std = per_channel(resolved["mean"], in_chans), per_channel(resolved["std"], in_chans)
    return EvalCrop.of(resolved, mean), mean, std


def per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Return one value per channel; for one channel of three values, their mean."""
    if len(values) == 3 and in_chans == 1:
        return (sum(values) / 3,)
    if len(values) != in_chans:
        raise UsageError(f"mean and std must have one value per channel ({in_chans}); got {tuple(values)}.")
    return tuple(values)


def visible(images: Float[Tensor, "*b c h w"], cfg: Mapping[str, Any]) -> Float[Tensor, "*b 3 h w"]:
    """Undo the normalisation: RGB of 0 to 1, clamped. Gray images get three equal channels; of more than three
    channels the first three are used. `cfg` as in `eval_crop`."""
    import torch

    resolved, channels = data_config(cfg), images.shape[-3]
    values = (resolved[key] if channels <= 3 else resolved[key][:1] * channels for key in ("mean", "std"))
    mean, std = (torch.tensor(per_channel(value, channels))[:, None, None] for value in values)
    colours = (images.float() * std + mean).clamp(0, 1)
    return colours.expand(*colours.shape[:-3], 3, -1, -1) if channels == 1 else colours[..., :3, :, :]


def check_interpolation(word: str) -> None:
    """Raise a UsageError if the interpolation does not exist."""
    if word not in ("bicubic", "bilinear", "lanczos", "nearest", "random"):
        raise UsageError(f"interpolation must be bicubic, bilinear, lanczos, nearest or random; got '{word}'.")
