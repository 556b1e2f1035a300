"""Every model by name: its size, its cost, what its paper reports, and where its weights are. Data only, no torch.

Parameters are those of the network as built; MACs are counted by `weft.bench.cost` at the stated size, attention
products included. A test recounts both.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Row(NamedTuple):
    """One model.

    Attributes:
        family: CeiT, CvT, LeViT, Grafted or T2TViT.
        size: image side in pixels.
        params: number of parameters, every head counted.
        macs: multiply-adds of one image in evaluation.
        top1: reported ImageNet-1k top-1 in percent, None where nobody has reported one.
        top1_source: where that number is printed.
        weights_licence: licence of the public weights; '' where there are none.
    """

    family: str
    size: int
    params: int
    macs: int
    top1: float | None
    top1_source: str
    weights_licence: str


ZOO: dict[str, Row] = {
    "ceit_tiny_patch16_224": Row("CeiT", 224, 6_356_904, 1_395_307_008, 76.4, "CeiT paper, main table", "apache-2.0"),
    "ceit_small_patch16_224": Row("CeiT", 224, 24_204_840, 4_759_544_832, 82.0, "CeiT paper, main table", "apache-2.0"),
    "ceit_base_patch16_224": Row(
        "CeiT", 224, 94_405_416, 17_748_854_784, 81.9, "CeiT released README, 100 epochs", "apache-2.0"
    ),
    "ceit_tiny_patch16_384": Row("CeiT", 384, 6_429_864, 5_102_842_368, 78.8, "CeiT paper, main table", "apache-2.0"),
    "ceit_small_patch16_384": Row(
        "CeiT", 384, 24_350_760, 15_980_209_152, 83.3, "CeiT paper, main table", "apache-2.0"
    ),
    "ceit_nano_32": Row("CeiT", 32, 933_704, 50_853_888, None, "", ""),
    "cvt_13": Row("CvT", 224, 19_997_480, 4_566_089_216, 81.6, "CvT paper, Table 3", "apache-2.0"),
    "cvt_21": Row("CvT", 224, 31_622_696, 7_177_985_024, 82.5, "CvT paper, Table 3", "apache-2.0"),
    "cvt_w24": Row(
        "CvT", 384, 277_196_392, 194_221_654_016, 87.7, "CvT paper, Table 3, ImageNet-22k first", "apache-2.0"
    ),
    "cvt_nano_32": Row("CvT", 32, 1_151_016, 24_492_032, None, "", ""),
    "levit_128s": Row("LeViT", 224, 7_777_058, 304_660_832, 76.6, "LeViT paper, Table 3", "apache-2.0"),
    "levit_128": Row("LeViT", 224, 9_213_936, 405_321_728, 78.6, "LeViT paper, Table 3", "apache-2.0"),
    "levit_192": Row("LeViT", 224, 10_947_069, 657_022_080, 80.0, "LeViT paper, Table 3", "apache-2.0"),
    "levit_256": Row("LeViT", 224, 18_893_876, 1_127_257_344, 81.6, "LeViT paper, Table 3", "apache-2.0"),
    "levit_384": Row("LeViT", 224, 39_128_836, 2_351_786_880, 82.6, "LeViT paper, Table 3", "apache-2.0"),
    "levit_nano_32": Row("LeViT", 32, 1_147_264, 16_057_344, None, "", ""),
    "grafted_r50s0_deit_small_12": Row("Grafted", 224, 22_050_664, 4_598_882_304, 79.9, "LeViT paper, Table 1", ""),
    "grafted_r50s1_deit_small_9": Row("Grafted", 224, 17_141_776, 4_230_169_600, 80.6, "LeViT paper, Table 1", ""),
    "grafted_r50s2_deit_small_6": Row("Grafted", 224, 13_136_272, 4_135_649_280, 80.9, "LeViT paper, Table 1", ""),
    "grafted_r50s3_deit_small_3": Row("Grafted", 224, 15_107_856, 4_497_128_448, 80.1, "LeViT paper, Table 1", ""),
    "grafted_r50s4_deit_small_0": Row("Grafted", 224, 25_557_032, 4_089_184_256, 78.4, "LeViT paper, Table 1", ""),
    "t2t_vit_14": Row("T2TViT", 224, 21_465_806, 4_783_468_544, 81.5, "CeiT paper, main table", ""),
    "t2t_vit_19": Row("T2TViT", 224, 39_085_070, 8_479_682_176, 81.9, "CeiT paper, main table", ""),
    "t2t_vit_24": Row("T2TViT", 224, 64_000_974, 13_661_874_688, 82.3, "CeiT paper, main table", ""),
    "t2t_vit_t_14": Row("T2TViT", 224, 21_465_422, 6_088_721_920, 80.7, "CvT paper, Table 3", ""),
    "t2t_vit_t_19": Row("T2TViT", 224, 39_084_686, 9_784_935_552, 81.4, "CvT paper, Table 3", ""),
    "t2t_vit_t_24": Row("T2TViT", 224, 64_000_590, 14_967_128_064, 82.2, "CvT paper, Table 3", ""),
}

PRINTED = {  # parameters and "FLOPs" as the papers print them; docs/deploy.md says why they are not ours
    "ceit_tiny_patch16_224": ("6.4M", "1.2G"),
    "ceit_small_patch16_224": ("24.2M", "4.5G"),
    "ceit_base_patch16_224": ("86.6M", "17.4G"),
    "ceit_tiny_patch16_384": ("6.4M", "3.6G"),
    "ceit_small_patch16_384": ("24.2M", "12.9G"),
    "cvt_13": ("19.98M", "4.53G"),
    "cvt_21": ("31.54M", "7.13G"),
    "cvt_w24": ("276.7M", "193.2G"),
    "levit_128s": ("7.8M", "305M"),
    "levit_128": ("9.2M", "406M"),
    "levit_192": ("10.9M", "658M"),
    "levit_256": ("18.9M", "1120M"),
    "levit_384": ("39.1M", "2353M"),
    "grafted_r50s0_deit_small_12": ("22.0M", "4576M"),
    "grafted_r50s1_deit_small_9": ("17.1M", "4209M"),
    "grafted_r50s2_deit_small_6": ("13.1M", "4136M"),
    "grafted_r50s3_deit_small_3": ("15.1M", "4515M"),
    "grafted_r50s4_deit_small_0": ("25.5M", "4119M"),
    "t2t_vit_14": ("21.5M", "5.2G"),
    "t2t_vit_19": ("39.2M", "8.9G"),
    "t2t_vit_24": ("64.1M", "14.1G"),
    "t2t_vit_t_14": ("22M", "6.1G"),
    "t2t_vit_t_19": ("39M", "9.8G"),
    "t2t_vit_t_24": ("64M", "15.0G"),
}


class Source(NamedTuple):
    """Where the weights of a model are.

    Attributes:
        repo: repository on the Hugging Face hub; '' where there is none.
        file: the authors' own file, tried where the hub fails; its name ends in the beginning of its sha256.
        by_hand: how a person gets the file, where no hub has it.
        size: image side that they were trained at, in pixels.
    """

    repo: str
    file: str = ""
    by_hand: str = ""
    size: int = 224


_CEIT = "one archive for all CeiT on Google Drive, file 1S19SQUic9ILBGNkcJTOy74MGoj-JRM4x"
_LEVIT = "https://dl.fbaipublicfiles.com/LeViT/LeViT-{}.pth"
PUBLIC: dict[str, Source] = {  # licences: ZOO
    "levit_128s": Source("timm/levit_128s.fb_dist_in1k", _LEVIT.format("128S-96703c44")),
    "levit_128": Source("timm/levit_128.fb_dist_in1k", _LEVIT.format("128-b88c2750")),
    "levit_192": Source("timm/levit_192.fb_dist_in1k", _LEVIT.format("192-92712e41")),
    "levit_256": Source("timm/levit_256.fb_dist_in1k", _LEVIT.format("256-13b5763e")),
    "levit_384": Source("timm/levit_384.fb_dist_in1k", _LEVIT.format("384-9bdaf2e2")),
    # transformers runs CvT with another activation than these weights were trained with; here they get their own back.
    "cvt_13": Source("microsoft/cvt-13"),
    "cvt_21": Source("microsoft/cvt-21"),
    "cvt_w24": Source("microsoft/cvt-w24-384-22k", size=384),
    "ceit_tiny_patch16_224": Source("", by_hand=_CEIT),
    "ceit_small_patch16_224": Source("", by_hand=_CEIT),
    "ceit_base_patch16_224": Source("", by_hand=_CEIT),
    "ceit_tiny_patch16_384": Source("", by_hand=_CEIT, size=384),
    "ceit_small_patch16_384": Source("", by_hand=_CEIT, size=384),
}


def list_models(pattern: str = "*") -> list[str]:
    """Names of our models, sorted, that match a shell pattern such as `ceit*`."""
    return sorted(fnmatch.filter(ZOO, pattern))
