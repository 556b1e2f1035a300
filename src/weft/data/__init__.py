"""Where pictures come from: folders, scikit-learn's digits; what is wrong with them; how they become tensors.

`weft data check --help` passes through here, so nothing is imported until it is asked for (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.data.dataset import ImageDataset as ImageDataset
    from weft.data.folder import open_data as open_data
    from weft.data.image import BadImage as BadImage
    from weft.data.image import image_size as image_size
    from weft.data.image import open_image as open_image
    from weft.data.inventory import Inventory as Inventory
    from weft.data.inventory import inspect as inspect
    from weft.data.loader import make_loader as make_loader
    from weft.data.seeding import mix_seed as mix_seed
    from weft.data.source import Sample as Sample
    from weft.data.source import Source as Source
    from weft.data.source import Splits as Splits
    from weft.data.source import image_size_hint as image_size_hint
    from weft.data.transforms import eval_transform as eval_transform
    from weft.data.transforms import train_transform as train_transform

_HOMES = {
    "BadImage": "weft.data.image",
    "ImageDataset": "weft.data.dataset",
    "Inventory": "weft.data.inventory",
    "Sample": "weft.data.source",
    "Source": "weft.data.source",
    "Splits": "weft.data.source",
    "eval_transform": "weft.data.transforms",
    "image_size": "weft.data.image",
    "image_size_hint": "weft.data.source",
    "inspect": "weft.data.inventory",
    "make_loader": "weft.data.loader",
    "mix_seed": "weft.data.seeding",
    "open_data": "weft.data.folder",
    "open_image": "weft.data.image",
    "train_transform": "weft.data.transforms",
}

__all__ = [
    "BadImage",
    "ImageDataset",
    "Inventory",
    "Sample",
    "Source",
    "Splits",
    "eval_transform",
    "image_size",
    "image_size_hint",
    "inspect",
    "make_loader",
    "mix_seed",
    "open_data",
    "open_image",
    "train_transform",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
