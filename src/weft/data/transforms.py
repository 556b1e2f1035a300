"""Random transforms of upright RGB images for training; `preprocessing` has the one for evaluation.

Both take the pixels of `open_image`, so that training, evaluation and prediction use the same. A transform draws 8-bit
pixels; `weft.data.crops` normalises them where the model is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from weft.data.colour import Picture
from weft.data.crops import Crop, Patch, batch_of, normalized
from weft.data.preprocessing import Preprocessing, eval_transform
from weft.errors import UsageError
from weft.lazy import LazyModule
from weft.text import reason_of

transforms: Any = LazyModule("torchvision.transforms")
timm_augment: Any = LazyModule("timm.data.auto_augment")
timm_data: Any = LazyModule("timm.data")

Window = Callable[[Picture], UInt8[np.ndarray, "h w *c"]]

ATTEMPTS = 10  # to draw a region that fits into the image
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), 0.3  # fractions of the image; smallest ratio of height and width
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
) -> TrainTransform:
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
    window, operations = _window(crop, whole, scale, ratio, interpolation), []
    if color_jitter:
        operations.append(_ColorJitter(color_jitter))
    if rand_augment:
        operations.append(_rand_augment(rand_augment, whole.size, whole.mean, interpolation))
    return TrainTransform(whole, window, operations, hflip=hflip, erase_prob=erase_prob)


class TrainTransform:
    """Draws random crops of images; `train_transform` describes the steps.

    Args:
        whole: size, colours and normalisation of the result.
        window: draws the part of the image, in the size of the result.
        operations: on the Pillow image of this part.
        hflip: flip with probability 0.5.
        erase_prob: probability of a patch of noise.
    """

    def __init__(
        self,
        whole: Preprocessing,
        window: Window,
        operations: Sequence[Callable[[Image.Image], Image.Image]],
        *,
        hflip: bool,
        erase_prob: float,
    ):
        self.mean, self.std, self.color = whole.mean, whole.std, whole.color
        self.window, self.operations, self.hflip, self.erase_prob = window, operations, hflip, erase_prob

    def __call__(self, image: Image.Image) -> Float[Tensor, "c h w"]:
        """Return the augmented, normalised image; `image` is upright RGB."""
        return normalized(batch_of([self.draw(Picture(np.array(image)))], [0]), self.mean, self.std)[0]

    def draw(self, image: Picture) -> Crop:
        """Return the augmented pixels, and the patch that is erased, if any."""
        pixels = self.window(image)
        if self.hflip and torch.rand(1) < 0.5:
            pixels = pixels[:, ::-1]
        if self.operations or self.color != "RGB":
            picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
            for operation in self.operations:
                picture = operation(picture)
            pixels = np.asarray(picture.convert(self.color))  # gray images keep their levels exactly
        return Crop(pixels, self._patch(*pixels.shape[:2]) if self.erase_prob else None)

    def _patch(self, height: int, width: int) -> Patch | None:
        """Draw random erasing (arXiv 1708.04896) with the random numbers of timm's `RandomErasing`."""
        if random.random() > self.erase_prob:
            return None
        for _ in range(ATTEMPTS):
            area = random.uniform(*ERASED_AREA) * height * width
            aspect = math.exp(random.uniform(math.log(ERASED_RATIO), -math.log(ERASED_RATIO)))
            tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if tall < height and wide < width:
                top, left = random.randint(0, height - tall), random.randint(0, width - wide)
                return Patch(top, left, torch.empty(len(self.mean), tall, wide).normal_())
        return None


def _window(
    crop: str, whole: Preprocessing, scale: tuple[float, float], ratio: tuple[float, float], interpolation: str
) -> Window:
    size = whole.size
    if crop == "auto":
        crop = "shift" if max(size) <= SMALL_SIZE else "resized"
    match crop:
        case "none":
            return whole.window
        case "resized":
            modes = ("bilinear", "bicubic") if interpolation == "random" else (interpolation,)
            return _ResizedCrop(size, scale, ratio, modes)
        case "shift":
            return _RandomCrop(size, size, max(round(min(size) * PADDED_RATIO), 1), whole.interpolation)
        case "cut":
            height, width = size
            return _RandomCrop(size, (height + CUT_MARGIN, width + CUT_MARGIN), 0, whole.interpolation)
        case _:
            raise UsageError(f"crop must be auto, resized, shift, cut or none; got '{crop}'.")


class _ResizedCrop:
    """Resize a random region, drawn with the random numbers of timm's `RandomResizedCropAndInterpolation`."""

    def __init__(
        self, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], modes: Sequence[str]
    ):
        self.size, self.scale, self.ratio, self.modes = size, scale, ratio, modes

    def __call__(self, image: Picture) -> np.ndarray:
        region = image.region(*self._box(*image.pixels.shape[:2]))
        return _resized(region, self.size, random.choice(self.modes) if self.modes[1:] else self.modes[0])

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (top, left, height, width) of the region; of the centre if none fits."""
        ends = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(ATTEMPTS):
            area = random.uniform(*self.scale) * height * width
            aspect = math.exp(random.uniform(*ends))
            wide, tall = (max(round(math.sqrt(pixels)), 1) for pixels in (area * aspect, area / aspect))
            if wide <= width and tall <= height:
                return random.randint(0, height - tall), random.randint(0, width - wide), tall, wide
        tall = min(height, max(round(width / min(self.ratio)), 1))
        wide = min(width, max(round(height * max(self.ratio)), 1))
        return (height - tall) // 2, (width - wide) // 2, tall, wide


class _RandomCrop:
    """Resize an image, repeat its edge, and cut out the size at random: torchvision's RandomCrop, also in its draws."""

    def __init__(self, size: tuple[int, int], scaled: tuple[int, int], margin: int, mode: str):
        self.size, self.scaled, self.mode = size, scaled, mode
        # of the padded image: the row and the column of the image that each shows
        self.rows, self.cols = (np.arange(-margin, side + margin).clip(0, side - 1) for side in scaled)

    def __call__(self, image: Picture) -> np.ndarray:
        pixels, (height, width) = _resized(image.whole(), self.scaled, self.mode), self.size
        top = int(torch.randint(len(self.rows) - height + 1, (1,)))
        left = int(torch.randint(len(self.cols) - width + 1, (1,)))
        return pixels.take(self.rows[top : top + height], 0).take(self.cols[left : left + width], 1)


def _resized(pixels: np.ndarray, size: tuple[int, int], mode: str) -> np.ndarray:
    """Resize with antialiasing; PyTorch, which has two of the modes, is faster than Pillow with AVX2."""
    if pixels.shape[:2] == size:
        return pixels
    if mode not in ("bilinear", "bicubic"):
        height, width = size
        return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling[mode.upper()]))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return F.interpolate(image, size, mode=mode, antialias=True)[0].permute(1, 2, 0).numpy()


class _ColorJitter:
    """Brightness, contrast and saturation by random factors, in random order: the pixels of torchvision's."""

    # brightness and contrast map every value by itself: 256 values are blended, and not every pixel
    RAMP = Image.frombytes("L", (256, 1), bytes(range(256)))

    def __init__(self, strength: float):
        jitter = transforms.ColorJitter(strength, strength, strength)
        self.ranges = (jitter.brightness, jitter.contrast, jitter.saturation, None)

    def __call__(self, image: Image.Image) -> Image.Image:
        order, *factors, _ = transforms.ColorJitter.get_params(*self.ranges)
        for number in order.tolist():
            if number < 2:
                level = 0 if number == 0 else _mean_level(image)
                table = Image.blend(Image.new("L", (256, 1), level), self.RAMP, factors[number]).tobytes()
                image = image.point(list(table) * 3)
            elif number == 2:
                image = Image.blend(image.convert("L").convert("RGB"), image, factors[number])
        return image


def _mean_level(image: Image.Image) -> int:
    """Return the mean luma, rounded."""
    counts = image.convert("L").histogram()
    return int(sum(map(int.__mul__, counts, range(256))) / sum(counts) + 0.5)


def _rand_augment(policy: str, size: tuple[int, int], mean: Sequence[float], interpolation: str) -> Any:
    hparams: dict[str, Any] = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
    }
    if interpolation != "random":
        rotation = "bicubic" if interpolation == "lanczos" else interpolation  # Pillow rotates with no wider filter
        hparams["interpolation"] = timm_data.transforms.str_to_pil_interp(rotation)
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
