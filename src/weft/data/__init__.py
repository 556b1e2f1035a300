"""Image datasets: open, check, transform and load them.

Public names are imported on first use (PEP 562), so that `weft data check --help` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.data.images.decode import BadImage as BadImage
    from weft.data.images.decode import image_size as image_size
    from weft.data.images.decode import open_image as open_image
    from weft.data.index.inventory import Inventory as Inventory
    from weft.data.index.inventory import inspect as inspect
    from weft.data.index.source import Sample as Sample
    from weft.data.index.source import Source as Source
    from weft.data.index.source import Splits as Splits
    from weft.data.index.source import image_size_hint as image_size_hint
    from weft.data.loading.dataset import ImageDataset as ImageDataset
    from weft.data.loading.loader import make_loader as make_loader
    from weft.data.loading.preprocessing import eval_transform as eval_transform
    from weft.data.loading.seeding import mix_seed as mix_seed
    from weft.data.loading.transforms import train_transform as train_transform
    from weft.data.sources.open import open_data as open_data

_HOMES = {
    "BadImage": "weft.data.images.decode",
    "ImageDataset": "weft.data.loading.dataset",
    "Inventory": "weft.data.index.inventory",
    "Sample": "weft.data.index.source",
    "Source": "weft.data.index.source",
    "Splits": "weft.data.index.source",
    "eval_transform": "weft.data.loading.preprocessing",
    "image_size": "weft.data.images.decode",
    "image_size_hint": "weft.data.index.source",
    "inspect": "weft.data.index.inventory",
    "make_loader": "weft.data.loading.loader",
    "mix_seed": "weft.data.loading.seeding",
    "open_data": "weft.data.sources.open",
    "open_image": "weft.data.images.decode",
    "train_transform": "weft.data.loading.transforms",
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
