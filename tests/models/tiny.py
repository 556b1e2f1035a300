"""The smallest network of each family: what timm's contract asks depends on its structure, and not on its widths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import weft
from tests.helpers import enliven

FAMILIES: dict[str, dict[str, Any]] = {
    "ceit_nano_32": dict(depth=2, embed_dim=24, num_heads=3),
    "cvt_nano_32": dict(depth=(1, 1, 1), embed_dim=(8, 16, 24), num_heads=(1, 2, 3)),
    "levit_nano_32": dict(depth=(1, 1, 1), embed_dim=(16, 24, 32), num_heads=(1, 2, 2), key_dim=4),
    "grafted_r50s2_deit_small_6": dict(img_size=64, num_stages=1, depth=1, embed_dim=24, num_heads=3),
}
PORTS: dict[str, dict[str, Any]] = {
    "port_ceit_pytorch": dict(img_size=64, depth=2, embed_dim=24, head_dim=8, lca_head_dim=8),
    "port_vit_pytorch_cvt": dict(img_size=64, depth=(1, 1, 1), embed_dim=(8, 16, 24), num_heads=(1, 1, 1)),
    "port_vit_pytorch_levit": dict(
        img_size=64, depth=(1, 1, 1), embed_dim=(16, 24, 32), num_heads=(1, 2, 2), key_dim=4
    ),
}
SWITCHES = {**FAMILIES, **PORTS, "grafted_r50s4_deit_small_0": dict(img_size=64, num_stages=2)}


def built(name: str, **more: Any) -> nn.Module:
    """Build a network, always with the same values; at its own size if it has no small form here."""
    torch.manual_seed(0)
    return weft.create_model(name, **{"num_classes": 5, **SWITCHES.get(name, {}), **more})


def lively(name: str, **more: Any) -> nn.Module:
    """Build a network in evaluation mode whose every part matters to its output."""
    return enliven(built(name, **more)).eval()


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a recipe that trains the small form."""
    return {f"model_args.{key}": value for key, value in SWITCHES[name].items()}
