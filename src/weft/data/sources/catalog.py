"""Datasets of the papers by name, with their sizes and the source that weft opens. Imports no torch.

Source: CeiT (arXiv 2103.11816), section 4, cross-checked with DeiT (arXiv 2012.12877), Table 6; CvT (arXiv 2103.15808),
section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple


class CatalogEntry(NamedTuple):
    """A dataset that the papers use.

    Attributes:
        classes, train, val: number of classes, training and validation images in the papers; 0 if not stated.
        source: dataset name for `open_data`; empty if the user must pass a folder, table or shards.
        note: remark for the user.
    """

    classes: int
    train: int
    val: int
    source: str
    note: str = ""


CATALOG = {
    "imagenet": CatalogEntry(1000, 1_281_167, 50_000, "torchvision:ImageNet"),
    "imagenet22k": CatalogEntry(21_841, 14_000_000, 0, "", "a folder or tar shards; CvT says 22k classes, 14M images"),
    "imagenet_real": CatalogEntry(
        1000, 0, 50_000, "", "evaluation only: weft evaluate RUN imagenet --real-labels real.json"
    ),
    "imagenet_v2": CatalogEntry(1000, 0, 10_000, "", "evaluation only: its folder, classes 0 to 999"),
    "inat18": CatalogEntry(8142, 437_513, 24_426, "", "a table: weft data inaturalist train.json val.json table.csv"),
    "inat19": CatalogEntry(1010, 265_240, 3_003, "", "a table: weft data inaturalist train.json val.json table.csv"),
    "cars": CatalogEntry(196, 8_144, 8_041, "torchvision:StanfordCars", "CeiT's table says 8,133 for training"),
    "flowers": CatalogEntry(102, 2_040, 6_149, "torchvision:Flowers102", "the official train and val together train"),
    "pets": CatalogEntry(37, 3_680, 3_669, "torchvision:OxfordIIITPet"),
    "cifar10": CatalogEntry(10, 50_000, 10_000, "torchvision:CIFAR10"),
    "cifar100": CatalogEntry(100, 50_000, 10_000, "torchvision:CIFAR100"),
}
