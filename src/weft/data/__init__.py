"""Where pictures come from: folders, scikit-learn's digits; what is wrong with them; how they become tensors.

`weft data check --help` passes through here, so nothing is imported until it is asked for (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "BadImage": "image",
    "ImageDataset": "dataset",
    "Inventory": "inventory",
    "Sample": "source",
    "Source": "source",
    "Splits": "source",
    "eval_transform": "transforms",
    "image_size": "image",
    "image_size_hint": "source",
    "inspect": "inventory",
    "make_loader": "loader",
    "mix_seed": "seeding",
    "open_data": "folder",
    "open_image": "image",
    "train_transform": "transforms",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.data' has no attribute '{name}'; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"weft.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
