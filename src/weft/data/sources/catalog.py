"""The papers' data sets by name: what they count, and which source has them. No torch.

Source: CeiT (arXiv 2103.11816), section 4, cross-checked with DeiT (arXiv 2012.12877), Table 6; CvT (arXiv 2103.15808),
section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A data set that the papers use.

    Attributes:
        classes, train, val: counts that the papers state; 0 where they state none.
        source: where weft looks for it; empty where it must be given as a folder or as shards.
        note: what to know.
    """

    classes: int
    train: int
    val: int
    source: str
    note: str = ""


CATALOG = {
    "imagenet": Known(1000, 1_281_167, 50_000, "torchvision:ImageNet"),
    "imagenet22k": Known(21_841, 14_000_000, 0, "", "a folder or tar shards; CvT says 22k classes, 14M images"),
    "imagenet_real": Known(1000, 0, 50_000, "", "evaluation only: weft evaluate RUN imagenet --real-labels real.json"),
    "imagenet_v2": Known(1000, 0, 10_000, "", "evaluation only: its folder, classes 0 to 999"),
    "inat18": Known(8142, 437_513, 24_426, "", "a table: weft data inaturalist train.json val.json table.csv"),
    "inat19": Known(1010, 265_240, 3_003, "", "a table: weft data inaturalist train.json val.json table.csv"),
    "cars": Known(196, 8_144, 8_041, "torchvision:StanfordCars", "CeiT's table says 8,133 for training"),
    "flowers": Known(102, 2_040, 6_149, "torchvision:Flowers102", "the official train and val together train"),
    "pets": Known(37, 3_680, 3_669, "torchvision:OxfordIIITPet"),
    "cifar10": Known(10, 50_000, 10_000, "torchvision:CIFAR10"),
    "cifar100": Known(100, 50_000, 10_000, "torchvision:CIFAR100"),
}
