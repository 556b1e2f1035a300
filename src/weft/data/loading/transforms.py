"""From upright RGB pictures to tensors: with chance for training, without for evaluation.

Both begin with what `open_image` gives, so training, evaluation and prediction see the same pixels.
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

SMALL_SIZE = 48  # pixels; up to here pictures are shifted, not zoomed
CUT_MARGIN = 32  # pixels
PADDED_RATIO = 1 / 8  # of the side, on each side: 4 pixels of 32, as is usual for CIFAR


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
    """Augmentation: crop, mirror, colours, RandAugment, erasing, in this order.

    Args:
        size: pixels, an int or (height, width).
        mean: of each channel, in 0 to 1; what is subtracted.
        std: of each channel; what is divided by.
        interpolation: `bicubic`, `bilinear`, `lanczos`, `nearest`, or `random` (bilinear or bicubic).
        in_chans: 3, or 1 for gray.
        crop: `resized` cuts out a random part and resizes it; `shift` resizes the whole, pads and cuts out `size`;
            `cut` resizes both sides to 32 pixels more and cuts out `size` (the fine-tuning that CvT's released
            configuration hints at); `none` leaves nothing to chance and prepares as `eval_transform` does; `auto`
            shifts up to 48 pixels, where a zoom would blur what there is.
        scale: for `resized`, the part's area, as a fraction.
        ratio: for `resized`, the part's width over its height.
        hflip: mirror half of the pictures. Off for digits, characters and everything else that has a direction.
        color_jitter: strength for brightness, contrast and saturation, 0 to 1.
        rand_augment: a policy in timm's words, such as `rand-m9-mstd0.5-inc1`; it may turn and shear pictures, too.
        erase_prob: how likely a rectangle is replaced by noise, 0 to 1.
        crop_pct, crop_mode: for `none`, as in `eval_transform`.

    Returns:
        A transform from a PIL picture to a float32 tensor (in_chans, height, width).

    Raises:
        UsageError: a word or number that does not fit.
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
    """What timm does with a picture before it meets this model: resize, crop, normalise.

    Args:
        cfg: a model's `pretrained_cfg`, or a mapping with some of its keys: `input_size` (c, h, w), `interpolation`,
            `mean`, `std`, `crop_pct` (the crop's part of the resized side) and `crop_mode`: `center` resizes the
            short side and cuts out the centre, `squash` resizes both sides, `border` resizes the long side and pads.

    Returns:
        A transform from a PIL picture to a float32 tensor of `input_size`.

    Raises:
        UsageError: a word or number that does not fit.
    """
    crop, mean, std = _evaluation(cfg)
    return transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize(mean, std)])


def eval_crop(cfg: Mapping[str, Any] | Any) -> EvalCrop:
    """The first step of `eval_transform`, from a PIL image to a PIL image, which needs no torch.

    Args:
        cfg: as there.

    Raises:
        UsageError: as there.
    """
    return _evaluation(cfg)[0]


def normalize(pixels: UInt8[np.ndarray, "b h w *c"], cfg: Mapping[str, Any] | Any) -> Float[Tensor, "b c h w"]:
    """The other steps of `eval_transform`, for a batch: 8-bit pixels to what the network takes."""
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
    """RGB stays, or becomes one channel of luma (ITU-R 601-2); gray pictures keep their levels exactly either way."""

    def __init__(self, in_chans: int):
        self.mode = {1: "L", 3: "RGB"}.get(in_chans)
        if self.mode is None:
            raise UsageError(f"in_chans must be 3 (RGB) or 1 (gray) for pictures from files; got {in_chans}.")

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
    """Moves a picture by up to `margin` pixels either way, and draws its border out to where it was.

    Border: what lies beyond a picture is most likely what lies at its edge, on white paper as on black. torchvision's
    RandomCrop with that padding does the same, draw for draw, in 1.6 times the time (benchmarks/training/kernels.csv).
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
    """timm asks for 0 bits at the strongest level, which older Pillows answered with a black picture and 13 refuses."""
    return posterize(image, max(bits_to_keep, 1))


def _per_channel(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """One value per channel; a model that was made for three and sees one gets their average."""
    if len(values) == 3 and in_chans == 1:
        return (sum(values) / 3,)
    if len(values) != in_chans:
        raise UsageError(f"mean and std must have one value per channel ({in_chans}); got {tuple(values)}.")
    return tuple(values)


def visible(images: Float[Tensor, "*b c h w"], cfg: Mapping[str, Any]) -> Float[Tensor, "*b 3 h w"]:
    """Normalised pictures as colours from 0 to 1, cut off there; gray ones in three equal channels, of more the first
    three. `cfg` as in `eval_transform`."""
    resolved, channels = resolve_data_config(pretrained_cfg=dict(cfg)), images.shape[-3]
    values = (resolved[key] if channels <= 3 else resolved[key][:1] * channels for key in ("mean", "std"))
    mean, std = (torch.tensor(_per_channel(value, channels))[:, None, None] for value in values)
    colours = (images.float() * std + mean).clamp(0, 1)
    return colours.expand(*colours.shape[:-3], 3, -1, -1) if channels == 1 else colours[..., :3, :, :]


def _check_interpolation(word: str) -> None:
    if word not in ("bicubic", "bilinear", "lanczos", "nearest", "random"):
        raise UsageError(f"interpolation must be bicubic, bilinear, lanczos, nearest or random; got '{word}'.")
