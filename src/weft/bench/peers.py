"""The same networks in other libraries, with random weights: what ours are measured against."""

from __future__ import annotations

import importlib
from typing import Any

import timm
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.models.registry import create_model

CVT_DEPTH = {"cvt_13": [1, 2, 10], "cvt_21": [1, 4, 16]}  # the rest is transformers' default, and vit-pytorch's
PVT_DEPTHS = {  # the rest is transformers' default
    "pvt_tiny": [2, 2, 2, 2],
    "pvt_small": [3, 4, 6, 3],
    "pvt_medium": [3, 4, 18, 3],
    "pvt_large": [3, 8, 27, 3],
}
PARENTS = {  # nobody else has CeiT; DeiT is what it grew from
    "ceit_tiny_patch16_224": "deit_tiny_patch16_224",
    "ceit_small_patch16_224": "deit_small_patch16_224",
    "ceit_base_patch16_224": "deit_base_patch16_224",
}


class Logits(nn.Module):
    """transformers' models answer with an object; this is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (b c h w) to logits (b num_classes)."""
        return self.model(images).logits


def peer_of(name: str) -> tuple[str, nn.Module]:
    """transformers' CvT, timm's LeViT, and for CeiT timm's DeiT of its size: what it is called, and the network.

    Raises:
        UsageError: there is none, or its library is not installed.
    """
    if name in CVT_DEPTH:
        transformers = _library("transformers")
        config = transformers.CvtConfig(depth=CVT_DEPTH[name], num_labels=1000)
        return f"transformers {name}", Logits(transformers.CvtForImageClassification(config))
    theirs = PARENTS.get(name, name)
    if not timm.is_model(theirs):
        raise UsageError(f"{name} has no peer that is known here; levit_*, cvt_13, cvt_21 and ceit_*_224 have.")
    return f"timm {theirs}", timm.create_model(theirs)


def peers_of(name: str) -> list[tuple[str, nn.Module]]:
    """`peer_of`, and vit-pytorch's network where it has one of this shape.

    Raises:
        UsageError: as `peer_of`.
    """
    peers = [peer_of(name)]
    if name in CVT_DEPTH:
        _, s2_depth, s3_depth = CVT_DEPTH[name]
        network = _library("vit_pytorch.cvt").CvT(num_classes=1000, s2_depth=s2_depth, s3_depth=s3_depth)
        peers.append((f"vit-pytorch {name}", network))
    if name == "levit_256":  # its README's sizes; 8 % fewer parameters than the paper's
        words: dict[str, Any] = dict(dim=(256, 384, 512), depth=4, heads=(4, 6, 8), mlp_mult=2)
        network = _library("vit_pytorch.levit").LeViT(image_size=224, num_classes=1000, **words)
        peers.append((f"vit-pytorch {name}", network))
    return peers


def network_of(builds: str) -> nn.Module:
    """The network behind a row of the papers' tables (`weft.models.papers`), of whichever library has it.

    Raises:
        UsageError: nobody has it, or its library is not installed.
    """
    if builds in PVT_DEPTHS:
        transformers = _library("transformers")
        config = transformers.PvtConfig(depths=PVT_DEPTHS[builds], num_labels=1000)
        return Logits(transformers.PvtForImageClassification(config))
    if builds == "vit_huge_patch16_384":  # timm has it with smaller patches
        return timm.create_model("vit_huge_patch14_224", patch_size=16, img_size=384)
    return create_model(builds)


def _library(name: str) -> Any:
    need("peers", name.partition(".")[0])
    return importlib.import_module(name)
