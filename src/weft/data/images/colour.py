"""Convert decoded images to upright, opaque 8-bit sRGB: orientation, transparency, bit depth, colour profile."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image, ImageCms

NOTES = {  # conversions of usable images -> description
    "gray": "gray, converted to RGB",
    "palette": "palette, converted to RGB",
    "cmyk": "CMYK, converted to RGB",
    "lab": "Lab, converted to RGB",
    "16-bit": "16 (or 12) bits per channel, scaled to 8",
    "scaled": "float or wide integer, scaled by its declared range",
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
BITS_PER_SAMPLE, PHOTOMETRIC, RANGE_LOW, RANGE_HIGH = 258, 262, 340, 341  # TIFF tags
MODE_NOTES = {"1": "gray", "L": "gray", "LA": "gray", "La": "gray", "P": "palette", "PA": "palette", "CMYK": "cmyk"}
PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK", "Lab": "LAB"}  # ICC colour space -> Pillow's mode


MAX_TRANSFORMS = 16  # cached colour conversions; each has tables of up to 1 MiB
ROWS = 256  # rows of pixels scaled at a time
MAX_PROFILE = 4 << 20  # bytes of a colour profile; large printer profiles have 3 MiB


class NoValueRange(ValueError):
    """Pixels whose values of black and white are unknown. `reason` is `float-pixels` or `integer-pixels`."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    """Properties that Pillow reports only before it loads the pixels.

    Attributes:
        size: (height, width) as stored; of a TIFF after rotation, since Pillow rotates TIFFs while loading.
        is_deep: whether the file has 16 bits per channel, in any mode.
        is_turned: whether loading rotates the image (TIFF).
    """

    size: tuple[int, int]
    is_deep: bool
    is_turned: bool


def read_header(image: Image.Image) -> Header:
    """Return the header of an image; call it before `image.load()` and `image.draft()`."""
    is_deep = any(";16" in str(tile) for tile in getattr(image, "tile", []))  # a raw mode such as "RGB;16B"
    # only TIFFs: a PNG's EXIF may follow its pixels, and Pillow would cache that there is none
    return Header((image.height, image.width), is_deep, image.format == "TIFF" and orientation(image) in UPRIGHT)


def upright_size(image: Image.Image, header: Header) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation."""
    is_sideways = orientation(image) >= 5 and image.format != "TIFF"
    height, width = header.size
    return (width, height) if is_sideways else (height, width)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where it is absent or invalid."""
    try:
        # the base class's method: PNG's own decodes the whole image to find EXIF after the pixels
        value = Image.Image.getexif(image).get(ORIENTATION)
    except Exception:  # EXIF is an untrusted TIFF inside the file; without it the image is still usable
        return 1
    return value if value in UPRIGHT else 1


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert a loaded image to upright, opaque 8-bit sRGB.

    Args:
        image: loaded, in any of Pillow's modes.
        background: RGB colour behind transparent pixels, 0 to 255 each.

    Raises:
        NoValueRange: floating point or wide integer pixels without a declared range.
    """
    colour, alpha = _split_alpha(image)
    colour = _to_srgb(colour, image.info.get("icc_profile"))
    if alpha is not None:
        below = Image.new("RGB", colour.size, background)
        below.paste(colour, mask=alpha)  # as Image.composite, without its copy of the background
        colour = below
    turn = UPRIGHT.get(orientation(image))
    return colour if turn is None else colour.transpose(turn)


def describe(image: Image.Image, header: Header) -> tuple[str, ...]:
    """Return the keys of `NOTES` that apply to a loaded image; the same for a JPEG decoded at a reduced size.

    Raises:
        NoValueRange: as `to_rgb`.
    """
    notes = []
    if image.mode in MODE_NOTES:
        notes.append(MODE_NOTES[image.mode])
    if image.mode == "LAB":
        notes.append("lab")
    if image.mode[0] in "IF":
        notes += ["gray", "16-bit" if _value_range(image)[2] else "scaled"]
    elif header.is_deep:
        notes.append("16-bit")
    if image.has_transparency_data and _split_alpha(image)[1] is not None:
        notes.append("alpha")
    if profile := image.info.get("icc_profile"):
        notes += {"sRGB": [], "other": ["icc"], "unreadable": ["icc-unreadable"]}[_profile_kind(profile, image)]
    if header.is_turned or orientation(image) in UPRIGHT:
        notes.append("exif-rotated")
    return (*notes, *_frames(image))


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Split into colours in an 8-bit mode without alpha, and alpha (None if opaque)."""
    if image.mode[0] in "IF":
        return _to_eight_bits(image)
    if not image.has_transparency_data:
        return (image.convert("RGB") if image.mode in ("P", "YCbCr", "RGBX") else image), None
    is_gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("La", "RGBa"):  # premultiplied alpha
        image = image.convert("LA" if is_gray else "RGBA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    alpha = image.getchannel("A")
    colour = image.getchannel("R") if is_gray else image.convert("RGB")
    return colour, None if alpha.getextrema() == (255, 255) else alpha


def _to_eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Scale gray pixels of more than 8 bits so that the declared black is 0 and white 255; also return the alpha."""
    low, high, _ = _value_range(image)

    def level(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # untrusted floats may be infinite or NaN; NaN becomes black
            scaled = (values.astype(np.float64) - low) * (255 / (high - low))
            return np.rint(np.nan_to_num(scaled, nan=0.0).clip(0, 255)).astype(np.uint8)

    values = np.asarray(image)
    transparent = image.info.get("transparency")
    alpha = None
    if isinstance(transparent, int):
        alpha = Image.fromarray(np.where(values == transparent, np.uint8(0), np.uint8(255)))
    if values.dtype.itemsize == 2:
        table = level(np.arange(1 << 16))
        return Image.fromarray(table[values.astype(np.uint16, copy=False)]), alpha
    levels = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), ROWS):  # in bands: all rows as 64-bit floats would take eight times the memory
        levels[row : row + ROWS] = level(values[row : row + ROWS])
    return Image.fromarray(levels), alpha


def _value_range(image: Image.Image) -> tuple[float, float, bool]:
    """Return (black, white, whether the bit depth defines them) of a gray image of more than 8 bits."""
    tags: Any = getattr(image, "tag_v2", {})
    if image.mode.startswith("I;16"):
        white = 2 ** _number(tags.get(BITS_PER_SAMPLE), 16) - 1
        return (white, 0, True) if tags.get(PHOTOMETRIC) == 0 else (0, white, True)  # 0: WhiteIsZero
    low, high = _number(tags.get(RANGE_LOW)), _number(tags.get(RANGE_HIGH))
    if low is None or high is None or not np.isfinite([low, high]).all() or low >= high:
        raise NoValueRange("float-pixels" if image.mode == "F" else "integer-pixels")
    return (high, low, False) if tags.get(PHOTOMETRIC) == 0 else (low, high, False)


def _number(tag: Any, default: Any = None) -> Any:
    """Return the first value of a TIFF tag, which Pillow gives as a number or in a tuple."""
    values: Any = tag if isinstance(tag, tuple) else (tag,)
    return default if not values or values[0] is None else float(values[0])


def _to_srgb(image: Image.Image, profile: Any) -> Image.Image:
    """Convert to RGB, by the embedded profile if it fits the channels."""
    if image.mode == "LAB":
        return _apply(image, _lab_to_srgb())
    mode, transform = _transform(profile) if isinstance(profile, bytes) and profile else ("", None)
    if (
        transform is None
        or (mode == "CMYK") != (image.mode == "CMYK")
        or (mode == "L" and image.mode not in ("1", "L"))
    ):
        return image.convert("RGB")
    return _apply(image if image.mode == mode else image.convert(mode), transform)


def _profile_kind(profile: Any, image: Image.Image) -> str:
    """Return `sRGB` (no conversion needed), `other`, or `unreadable` (also: profile for other channels)."""
    mode, transform = _transform(profile) if isinstance(profile, bytes) else ("", None)
    is_gray = image.mode in ("1", "L", "LA", "La") or image.mode[0] in "IF"
    if not mode or (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and not is_gray):
        return "unreadable"
    return "sRGB" if transform is None else "other"


def _apply(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # None is for inPlace=True only
    return converted


def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return the cached (input mode, conversion): no conversion for sRGB, an empty mode for an unreadable profile."""
    if len(profile) > MAX_PROFILE:
        return "", None
    key = hashlib.sha256(profile).digest()  # hash as key, so that a service does not retain uploaded profiles
    with _transforms_lock:
        if key in _transforms:
            _transforms.move_to_end(key)
            return _transforms[key]
    transform = _build_transform(profile)
    with _transforms_lock:
        _transforms[key] = transform
        while len(_transforms) > MAX_TRANSFORMS:
            _transforms.popitem(last=False)
    return transform


_transforms: OrderedDict[bytes, tuple[str, ImageCms.ImageCmsTransform | None]] = OrderedDict()
_transforms_lock = threading.Lock()


def _build_transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    try:
        parsed = ImageCms.getOpenProfile(io.BytesIO(profile))
        mode = PROFILE_MODES[cast(Any, parsed.profile).xcolor_space.strip()]
        transform = ImageCms.buildTransform(parsed, ImageCms.createProfile("sRGB"), mode, "RGB")
        ramp = _probe(mode)
        is_srgb = mode in ("L", "RGB") and _distance(_apply(ramp, transform), ramp.convert("RGB")) <= 1
    except Exception:  # untrusted bytes: Pillow raises OSError, PyCMSError, KeyError, ...
        return "", None
    return mode, None if is_srgb else transform


@lru_cache(maxsize=1)
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")


def _probe(mode: str) -> Image.Image:
    """Return an image of colours over the RGB cube in steps of 16, to recognise sRGB profiles of any name."""
    steps = np.append(np.arange(0, 255, 16), 255).astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(len(steps), -1, 3)
    return Image.fromarray(cube).convert(mode)


def _distance(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other)).max())


def _frames(image: Image.Image) -> tuple[str, ...]:
    """Return `animated` or `pages` if there is a second frame. Counting all frames would read the whole file."""
    if image.format in ("PNG", "WEBP"):  # stated in the header
        return ("animated",) if getattr(image, "n_frames", 1) > 1 else ()
    if image.format not in ("GIF", "TIFF"):
        return ()
    try:
        image.seek(1)
    except Exception:  # EOFError if there is none; any other error is in a frame that is not used
        return ()
    return ("animated",) if image.format == "GIF" else ("pages",)
