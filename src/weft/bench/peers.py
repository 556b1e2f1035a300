"""The same networks in other libraries, with random weights: what ours are measured against."""

from __future__ import annotations

import importlib
from typing import Any

import timm
from torch import Tensor, nn

from weft.errors import UsageError

CVT_DEPTH = {"cvt_13": [1, 2, 10], "cvt_21": [1, 4, 16]}  # the rest is transformers' default, and vit-pytorch's
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


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(f"{package} is needed for this peer. Run: pip install 'weft[peers]'") from error
