"""Convert decoded images to upright, opaque 8-bit sRGB: orientation, transparency, bit depth, colour profile."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageCms

NOTES = {  # conversions of usable images -> description
    "gray": "gray, converted to RGB",
    "palette": "palette, converted to RGB",
    "cmyk": "CMYK, converted to RGB",
    "16-bit": "more than 8 bits per channel, scaled to 8 by the value range of the dataset",
    "alpha": "transparent, composited on the background",
    "icc": "colour profile, converted to sRGB",
    "icc-unreadable": "colour profile that cannot be read or does not fit the channels, ignored",
    "exif-rotated": "rotated by its EXIF orientation",
    "animated": "animated, first frame used",
    "pages": "several pages, first page used",
    "no-end-marker": "JPEG without its end marker; no pixel is missing",
    "extension": "extension does not match the content; the content is used",
}
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {  # EXIF orientation -> operation that corrects it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
VIEWS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # the same operations on an array (h w c), without a copy
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}
GRAY = ("1", "L", "LA", "La")  # modes
MODE_NOTES = {**dict.fromkeys(GRAY, "gray"), "P": "palette", "PA": "palette", "CMYK": "cmyk"}
PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}  # ICC colour space -> Pillow's mode
MAX_TRANSFORMS = 8  # cached colour conversions; each has tables of up to 1 MiB, and its profile as key
MAX_PROFILE = 4 << 20  # bytes of a colour profile; large printer profiles have 3 MiB


class Picture(NamedTuple):
    """The upright, opaque pixels of an image, before the conversion of its colour profile to sRGB, if it needs one."""

    pixels: UInt8[np.ndarray, "h w 3"]
    conversion: ImageCms.ImageCmsTransform | None = None

    def region(self, top: int, left: int, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        """Return a part of the image in sRGB."""
        pixels = np.ascontiguousarray(self.pixels[top : top + height, left : left + width])
        if self.conversion is None:
            return pixels
        return np.array(self.conversion.apply(Image.fromarray(pixels)))

    def whole(self) -> UInt8[np.ndarray, "h w 3"]:
        """Return the whole image in sRGB."""
        return self.region(0, 0, *self.pixels.shape[:2])


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where it is absent or invalid."""
    try:
        # the base class's method: PNG's own decodes the whole image to find EXIF after the pixels
        value = Image.Image.getexif(image).get(ORIENTATION)
    except Exception:  # EXIF is an untrusted TIFF inside the file; without it the image is still usable
        return 1
    return value if value in UPRIGHT else 1


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, list[str]]:
    """Convert a loaded image to upright, opaque sRGB; also return the keys of `NOTES` that apply.

    Args:
        image: loaded, in any of Pillow's modes of 8 bits per channel but Lab.
        background: RGB colour behind transparent pixels, 0 to 255 each.
    """
    colour, alpha = _split_alpha(image)
    colour, notes = _to_srgb(colour, image.info.get("icc_profile"))
    if alpha is not None:
        notes.insert(0, "alpha")
        below = Image.new("RGB", colour.size, background)
        below.paste(colour, mask=alpha)  # as Image.composite, without its copy of the background
        colour = below
    turn = UPRIGHT.get(orientation(image))
    return (colour, notes) if turn is None else (colour.transpose(turn), [*notes, "exif-rotated"])


def frames_note(image: Image.Image) -> list[str]:
    """Return `animated` or `pages` if there is a second frame. Counting all frames would read the whole file."""
    if image.format in ("PNG", "WEBP"):  # stated in the header
        return ["animated"] if getattr(image, "n_frames", 1) > 1 else []
    if image.format not in ("GIF", "TIFF"):
        return []
    try:
        image.seek(1)
    except Exception:  # EOFError if there is none; any other error is in a frame that is not used
        return []
    return ["animated"] if image.format == "GIF" else ["pages"]


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Split into colours in a mode without alpha, and alpha (None if opaque)."""
    if not image.has_transparency_data:
        return (image.convert("RGB") if image.mode in ("P", "YCbCr", "RGBX") else image), None
    is_gray = image.mode in GRAY
    if image.mode == "La":  # gray multiplied by its alpha, which Pillow converts to LA alone
        image = image.convert("LA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    alpha = image.getchannel("A")
    colour = image.getchannel("R") if is_gray else image.convert("RGB")
    return colour, None if alpha.getextrema() == (255, 255) else alpha


def _to_srgb(image: Image.Image, profile: Any) -> tuple[Image.Image, list[str]]:
    """Convert to RGB, by the embedded profile if it fits the channels."""
    if profile:
        mode, transform = _read(profile)
        fits = (mode == "CMYK") == (image.mode == "CMYK") and (mode != "L" or image.mode in GRAY)
        if not mode or not fits:
            return image.convert("RGB"), ["icc-unreadable"]
        if transform is not None:
            return transform.apply(image if image.mode == mode else image.convert(mode)), ["icc"]
    return image.convert("RGB"), []


def conversion_of(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion of the pixels of an RGB image by its colour profile; None if it needs none."""
    mode, transform = _read(image.info.get("icc_profile"))
    return transform if mode == "RGB" else None


def _read(profile: Any) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return input mode and conversion of an embedded profile; an empty mode for none, or one that is not used."""
    is_readable = isinstance(profile, bytes) and 0 < len(profile) <= MAX_PROFILE
    return _transform(profile) if is_readable else ("", None)


@functools.lru_cache(MAX_TRANSFORMS)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return (input mode, conversion): no conversion for sRGB of any name, an empty mode for an unreadable profile."""
    try:
        parsed = ImageCms.getOpenProfile(io.BytesIO(profile))
        mode = PROFILE_MODES[cast(Any, parsed.profile).xcolor_space.strip()]
        transform = ImageCms.buildTransform(parsed, ImageCms.createProfile("sRGB"), mode, "RGB")
        steps = np.append(np.arange(0, 255, 16), 255).astype(np.uint8)
        cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(len(steps), -1, 3)
        colours = Image.fromarray(cube).convert(mode)
        changes = np.asarray(transform.apply(colours)).astype(int) - np.asarray(colours.convert("RGB"))
    except Exception:  # untrusted bytes: Pillow raises OSError, PyCMSError, KeyError, ...
        return "", None
    is_srgb = mode != "CMYK" and abs(changes).max() <= 1
    return mode, None if is_srgb else transform
