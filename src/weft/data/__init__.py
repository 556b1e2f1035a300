"""Image datasets: open, check, transform and load them.

Public names are imported on first use (PEP 562), so that `weft data check --help` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.data.images.decode import BadImage as BadImage
    from weft.data.images.decode import image_size as image_size
    from weft.data.images.decode import open_image as open_image
    from weft.data.index.inventory import Inventory as Inventory
    from weft.data.index.source import Sample as Sample
    from weft.data.index.source import Source as Source
    from weft.data.index.source import Splits as Splits
    from weft.data.index.source import image_size_hint as image_size_hint
    from weft.data.index.split import SplitPlan as SplitPlan
    from weft.data.loading.dataset import ImageDataset as ImageDataset
    from weft.data.loading.loader import make_loader as make_loader
    from weft.data.loading.preprocessing import eval_transform as eval_transform
    from weft.data.loading.seeding import mix_seed as mix_seed
    from weft.data.loading.transforms import train_transform as train_transform
    from weft.data.sources.open import inspect as inspect
    from weft.data.sources.open import open_data as open_data

__getattr__, __dir__, __all__ = attach(__name__, __file__)
