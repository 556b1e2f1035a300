"""Transforms from upright RGB images to tensors: random for training, deterministic for evaluation.

Both take the result of `open_image`, so that training, evaluation and prediction use the same pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from timm.data import resolve_data_config
from timm.data.auto_augment import RandAugment, posterize, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from weft.data.images.crop import EvalCrop
from weft.errors import UsageError

SMALL_SIZE = 48  # pixels; `crop=auto` shifts up to this size
CUT_MARGIN = 32  # pixels
PADDED_RATIO = 1 / 8  # of the side length, on each side: 4 pixels for 32, as usual for CIFAR


def train_transform(
    size: int | tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str = "bicubic",
    *,
    in_chans: int = 3,
    crop: str = "auto",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    hflip: bool = True,
    color_jitter: float = 0.0,
    rand_augment: str | None = None,
    erase_prob: float = 0.0,
    crop_pct: float | None = None,
    crop_mode: str = "center",
) -> transforms.Compose:
    """Create the training transform: crop, flip, color jitter, RandAugment, random erasing, in this order.

    Args:
        size: side length or (height, width) in pixels.
        mean: mean of each channel, 0 to 1, to subtract.
        std: standard deviation of each channel, to divide by.
        interpolation: `bicubic`, `bilinear`, `lanczos`, `nearest`, or `random` (bilinear or bicubic).
        in_chans: 3, or 1 for gray.
        crop: `resized` crops a random part and resizes it; `shift` resizes the image, pads it and crops `size` at
            random; `cut` resizes to `size` plus 32 pixels and crops `size` at random (fine-tuning as CvT's released
            configuration suggests); `none` resizes and crops as `eval_transform`; `auto` is `shift` for sizes up to
            48 pixels, which `resized` would blur, else `resized`.
        scale: for `resized`, range of the crop's area as a fraction of the image.
        ratio: for `resized`, range of the crop's aspect ratio (width / height).
        hflip: flip horizontally with probability 0.5. Switch it off for digits, text and other directed content.
        color_jitter: strength of brightness, contrast and saturation, 0 to 1.
        rand_augment: RandAugment policy in timm's syntax, such as `rand-m9-mstd0.5-inc1`; also rotates and shears.
        erase_prob: probability of random erasing, 0 to 1.
        crop_pct, crop_mode: for `none`, as in `eval_transform`.

    Returns:
        A transform from a PIL image to a float32 tensor (in_chans, height, width).

    Raises:
        UsageError: an invalid value.
    """
    height_width = (size, size) if isinstance(size, int) else size
    mean, std = _per_channel(mean, in_chans), _per_channel(std, in_chans)
    _check_interpolation(interpolation)
    if crop == "none":
        whole = dict(input_size=(in_chans, *height_width), interpolation=interpolation, mean=mean, std=std)
        steps: list[Any] = [eval_crop({**whole, "crop_pct": crop_pct, "crop_mode": crop_mode})]
    else:
        steps = [_crop(crop, height_width, scale, ratio, interpolation)]
    if hflip:
        steps.append(transforms.RandomHorizontalFlip())
    if color_jitter:
        steps.append(transforms.ColorJitter(color_jitter, color_jitter, color_jitter))
    if rand_augment:
        steps.append(_rand_augment(rand_augment, height_width, mean, interpolation))
    steps += [_Channels(in_chans), transforms.ToTensor(), transforms.Normalize(mean, std)]
    if erase_prob:
        steps.append(RandomErasing(erase_prob, mode="pixel", device="cpu"))
    return transforms.Compose(steps)


def eval_transform(cfg: Mapping[str, Any] | Any) -> transforms.Compose:
    """Create the evaluation transform of a model, as timm does: resize, crop, normalise.

    Args:
        cfg: a model's `pretrained_cfg`, or a mapping with some of its keys: `input_size` (c, h, w), `interpolation`,
            `mean`, `std`, `crop_pct` (fraction of the resized side) and `crop_mode`: `center` resizes the short
            side and crops the centre, `squash` resizes both sides, `border` resizes the long side and pads.

    Returns:
        A transform from a PIL image to a float32 tensor of `input_size`.

    Raises:
        UsageError: an invalid value.
    """
    crop, mean, std = _evaluation(cfg)
    return transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize(mean, std)])


def eval_crop(cfg: Mapping[str, Any] | Any) -> EvalCrop:
    """Return the first step of `eval_transform`, from PIL image to PIL image; it needs no torch.

    Args:
        cfg: as in `eval_transform`.

    Raises:
        UsageError: an invalid value.
    """
    return _evaluation(cfg)[0]


def normalize(pixels: UInt8[np.ndarray, "b h w *c"], cfg: Mapping[str, Any] | Any) -> Float[Tensor, "b c h w"]:
    """Apply the other steps of `eval_transform` to a batch: uint8 pixels to normalised float32."""
    _, mean, std = _evaluation(cfg)
    images = torch.from_numpy(pixels)
    images = images.permute(0, 3, 1, 2).contiguous() if images.ndim == 4 else images[:, None]
    return TF.normalize(images.float().div_(255), list(mean), list(std), inplace=True)


def _evaluation(cfg: Mapping[str, Any] | Any) -> tuple[EvalCrop, tuple[float, ...], tuple[float, ...]]:
    resolved = resolve_data_config(pretrained_cfg=dict(cfg) if isinstance(cfg, Mapping) else asdict(cfg))
    _check_interpolation(resolved["interpolation"])
    in_chans = resolved["input_size"][0]
    mean, std = _per_channel(resolved["mean"], in_chans), _per_channel(resolved["std"], in_chans)
    return EvalCrop.of(resolved, mean), mean, std


class _Channels:
    """Keep RGB, or convert to one channel of luma (ITU-R 601-2); gray images keep their levels exactly."""

    def __init__(self, in_chans: int):
        self.mode = {1: "L", 3: "RGB"}.get(in_chans)
        if self.mode is None:
            raise UsageError(f"in_chans must be 3 (RGB) or 1 (gray) for image files; got {in_chans}.")

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert(self.mode)

    def __repr__(self) -> str:
        return f"Channels({self.mode})"


def _crop(
    crop: str, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], interpolation: str
) -> Any:
    if crop == "auto":
        crop = "shift" if max(size) <= SMALL_SIZE else "resized"
    if crop == "resized":
        return RandomResizedCropAndInterpolation(size, scale=scale, ratio=ratio, interpolation=interpolation)
    if crop == "cut":
        larger = (size[0] + CUT_MARGIN, size[1] + CUT_MARGIN)
        mode = InterpolationMode("bicubic" if interpolation == "random" else interpolation)
        return transforms.Compose([transforms.Resize(larger, mode), transforms.RandomCrop(size)])
    if crop != "shift":
        raise UsageError(f"crop must be auto, resized, shift, cut or none; got '{crop}'.")
    mode = InterpolationMode("bicubic" if interpolation == "random" else interpolation)
    return transforms.Compose([transforms.Resize(size, mode), _Shift(max(round(min(size) * PADDED_RATIO), 1))])


class _Shift:
    """Shift an image at random by up to `margin` pixels in each direction, with edge padding.

    Equal to torchvision's RandomCrop with edge padding, also in its random draws, which takes 1.6 times as long
    (benchmarks/training/kernels.csv).
    """

    def __init__(self, margin: int):
        self.margin = margin

    def __call__(self, image: Image.Image) -> Image.Image:
        pixels = np.asarray(image)
        top, left = (int(torch.randint(2 * self.margin + 1, (1,))) - self.margin for _ in range(2))
        rows = np.arange(top, top + image.height).clip(0, image.height - 1)
        cols = np.arange(left, left + image.width).clip(0, image.width - 1)
        return Image.fromarray(pixels[rows[:, None], cols])

    def __repr__(self) -> str:
        return f"Shift({self.margin})"


def _rand_augment(policy: str, size: tuple[int, int], mean: Sequence[float], interpolation: str) -> RandAugment:
    hparams: dict[str, Any] = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
    }
    if interpolation != "random":
        hparams["interpolation"] = str_to_pil_interp(interpolation)
    try:
        augment = rand_augment_transform(policy, hparams)
    except (AssertionError, ValueError, KeyError) as err:
        raise UsageError(
            f"rand_augment must be a policy such as rand-m9-mstd0.5-inc1; got '{policy}' ({err})."
        ) from err
    for op in augment.ops:
        if op.aug_fn is posterize:
            op.aug_fn = posterize_at_least_one_bit
    return augment


def posterize_at_least_one_bit(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Posterize with at least 1 bit: timm passes 0 at the strongest level, which Pillow 13 refuses."""
    return posterize(image, max(bits_to_keep, 1))


def _per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """Return one value per channel; for one channel of three values, their mean."""
    if len(values) == 3 and in_chans == 1:
        return (sum(values) / 3,)
    if len(values) != in_chans:
        raise UsageError(f"mean and std must have one value per channel ({in_chans}); got {tuple(values)}.")
    return tuple(values)


def visible(images: Float[Tensor, "*b c h w"], cfg: Mapping[str, Any]) -> Float[Tensor, "*b 3 h w"]:
    """Undo the normalisation: RGB of 0 to 1, clamped. Gray images get three equal channels; of more than three
    channels the first three are used. `cfg` as in `eval_transform`."""
    resolved, channels = resolve_data_config(pretrained_cfg=dict(cfg)), images.shape[-3]
    values = (resolved[key] if channels <= 3 else resolved[key][:1] * channels for key in ("mean", "std"))
    mean, std = (torch.tensor(_per_channel(value, channels))[:, None, None] for value in values)
    colours = (images.float() * std + mean).clamp(0, 1)
    return colours.expand(*colours.shape[:-3], 3, -1, -1) if channels == 1 else colours[..., :3, :, :]


def _check_interpolation(word: str) -> None:
    if word not in ("bicubic", "bilinear", "lanczos", "nearest", "random"):
        raise UsageError(f"interpolation must be bicubic, bilinear, lanczos, nearest or random; got '{word}'.")
