"""The same networks in other libraries, with random weights: what ours are measured against."""

from __future__ import annotations

from typing import Any

import timm
from torch import Tensor, nn

from weft.errors import UsageError

CVT_DEPTH = {"cvt_13": [1, 2, 10], "cvt_21": [1, 4, 16]}  # the rest is transformers' default
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
        try:
            from transformers import CvtConfig, CvtForImageClassification
        except ImportError as error:
            raise UsageError("transformers is needed for this peer. Run: pip install 'weft[peers]'") from error
        words: dict[str, Any] = dict(depth=CVT_DEPTH[name], num_labels=1000)
        return f"transformers {name}", Logits(CvtForImageClassification(CvtConfig(**words)))
    theirs = PARENTS.get(name, name)
    if not timm.is_model(theirs):
        raise UsageError(f"{name} has no peer that is known here; levit_*, cvt_13, cvt_21 and ceit_*_224 have.")
    return f"timm {theirs}", timm.create_model(theirs)
