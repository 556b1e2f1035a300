"""Image datasets: open, check, transform and load them.

Public names are imported on first use (PEP 562), so that `weft data check --help` starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.data.dataset import ImageDataset as ImageDataset
    from weft.data.decode import BadImage as BadImage
    from weft.data.decode import image_size as image_size
    from weft.data.decode import open_image as open_image
    from weft.data.inventory import Inventory as Inventory
    from weft.data.loader import make_loader as make_loader
    from weft.data.open import inspect as inspect
    from weft.data.open import open_data as open_data
    from weft.data.preprocessing import eval_transform as eval_transform
    from weft.data.seeding import mix_seed as mix_seed
    from weft.data.source import Sample as Sample
    from weft.data.source import Source as Source
    from weft.data.source import Splits as Splits
    from weft.data.source import image_size_hint as image_size_hint
    from weft.data.split import SplitPlan as SplitPlan
    from weft.data.transforms import train_transform as train_transform

__getattr__, __dir__, __all__ = attach(__name__, __file__)
