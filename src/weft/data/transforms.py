"""Random transforms from upright RGB images to tensors, for training; `preprocessing` has the one for evaluation.

Both take the result of `open_image`, so that training, evaluation and prediction use the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from weft.data.preprocessing import Preprocessing, eval_transform
from weft.errors import UsageError
from weft.lazy import LazyModule
from weft.text import reason_of

if TYPE_CHECKING:
    from torchvision.transforms import Compose

transforms: Any = LazyModule("torchvision.transforms")
timm_augment: Any = LazyModule("timm.data.auto_augment")
timm_data: Any = LazyModule("timm.data")

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
) -> Compose:
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
    input_size = (in_chans, size, size) if isinstance(size, int) else (in_chans, *size)
    cfg = dict(input_size=input_size, mean=tuple(mean), std=tuple(std), crop_pct=crop_pct, crop_mode=crop_mode)
    whole = eval_transform({**cfg, "interpolation": interpolation})
    steps = [_crop(crop, whole, scale, ratio, interpolation)]
    if hflip:
        steps.append(transforms.RandomHorizontalFlip())
    if color_jitter:
        steps.append(transforms.ColorJitter(color_jitter, color_jitter, color_jitter))
    if rand_augment:
        steps.append(_rand_augment(rand_augment, whole.size, whole.mean, interpolation))
    steps += [methodcaller("convert", whole.color)]  # gray images keep their levels exactly
    steps += [transforms.ToTensor(), transforms.Normalize(whole.mean, whole.std)]
    if erase_prob:
        steps.append(timm_data.random_erasing.RandomErasing(erase_prob, mode="pixel", device="cpu"))
    return transforms.Compose(steps)


def _crop(
    crop: str, whole: Preprocessing, scale: tuple[float, float], ratio: tuple[float, float], interpolation: str
) -> Any:
    size, margin = whole.size, 0
    if crop == "auto":
        crop = "shift" if max(size) <= SMALL_SIZE else "resized"
    match crop:
        case "none":
            return whole.crop
        case "resized":
            crop_resized = timm_data.transforms.RandomResizedCropAndInterpolation
            return crop_resized(size, scale=scale, ratio=ratio, interpolation=interpolation)
        case "shift":
            window = _Shift(max(round(min(size) * PADDED_RATIO), 1))
        case "cut":
            margin, window = CUT_MARGIN, transforms.RandomCrop(size)
        case _:
            raise UsageError(f"crop must be auto, resized, shift, cut or none; got '{crop}'.")
    mode = transforms.InterpolationMode(whole.interpolation)
    return transforms.Compose([transforms.Resize([side + margin for side in size], mode), window])


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


def _rand_augment(policy: str, size: tuple[int, int], mean: Sequence[float], interpolation: str) -> Any:
    hparams: dict[str, Any] = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
    }
    if interpolation != "random":
        hparams["interpolation"] = timm_data.transforms.str_to_pil_interp(interpolation)
    try:
        augment = timm_augment.rand_augment_transform(policy, hparams)
    except (AssertionError, ValueError, KeyError) as err:
        raise UsageError(
            f"rand_augment must be a policy such as rand-m9-mstd0.5-inc1; got '{policy}' ({reason_of(err)})."
        ) from err
    for op in augment.ops:
        if op.aug_fn is timm_augment.posterize:
            op.aug_fn = posterize_at_least_one_bit
    return augment


def posterize_at_least_one_bit(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """Posterize with at least 1 bit: timm passes 0 at the strongest level, which Pillow 13 refuses."""
    return timm_augment.posterize(image, max(bits_to_keep, 1))
