"""Networks are built without random values where weights replace all of them, and not with switches that do not fit."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.errors import UsageError
from weft.models.building import NoRandomInit


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-0.04, 0.04), (0.03, 2.0)])
def test_rejection_sampling_ends_without_random_values(bounds: tuple[float, float]) -> None:
    weight = torch.full((4, 4), float("nan"))  # as uninitialised memory may be
    with NoRandomInit():
        torch.nn.init.trunc_normal_(weight, std=0.02 if bounds[0] < 1 else 1.0, a=bounds[0], b=bounds[1])
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize(
    ("name", "switches", "message"),
    [
        ("ceit_tiny_patch16_224", dict(img_size=12), "got 12x12. Use images of at least 16 pixels"),
        ("ceit_tiny_patch16_224", dict(embed_dim=190), "embed_dim .* got 190 and 3"),
        ("ceit_tiny_patch16_224", dict(leff_kernel=4), "leff_kernel must be odd, .* or 0; got 4"),
        ("ceit_tiny_patch16_224", dict(patch_size=6), "patch_size must be a multiple .* got 6 and 4"),
        (
            "ceit_tiny_patch16_224",
            dict(global_pool="max"),
            "global_pool of CeiT must be one of .*; got 'max'",
        ),
        ("ceit_tiny_patch16_224", dict(leff_kernal=3), "'leff_kernal'. Nearest: leff_kernel"),
        ("ceit_tiny_patch16_224", dict(img_size="224"), "img_size must be .* got '224'"),
        ("cvt_13", dict(img_size=2), "img_size must leave .* got 2x2, which leaves 0x0"),
        ("cvt_13", dict(embed_dim=(64, 190, 384)), r"embed_dim\[1\] .* num_heads\[1\]; got 190 and 3"),
        ("cvt_13", dict(kv_stride=(1, 2)), "kv_stride must have one value per stage, 3 in all; got 2"),
        ("cvt_13", dict(scale_by="dim"), "scale_by must be 'embed_dim' or 'head_dim'; got 'dim'"),
        ("levit_128s", dict(depth=(1, 2)), r"depth must have one value per stage, 3 in all; got 2: \(1, 2\)"),
        ("levit_128s", dict(norm="group"), "norm must be 'batch' or 'layer' .* got 'group'"),
        ("levit_128s", dict(stem="bare"), "stem 'conv' or 'patch'; got 'batch' and 'bare'"),
        ("levit_128s", dict(act_layer="geluu"), "'geluu'. Nearest: gelu, relu, quick_gelu"),
        ("levit_128s", dict(global_pool="max"), "global_pool of LeViT must be .* got 'max'"),
        ("levit_128s", dict(stem="patch", img_size=7), "img_size must leave .* got 7x7"),
        ("grafted_r50s2_deit_small_6", dict(num_stages=5), "num_stages must be 0 to 4, .*; got 5"),
        ("grafted_r50s2_deit_small_6", dict(num_stages=0, depth=0), "num_stages and depth must not both be 0"),
        (
            "grafted_r50s2_deit_small_6",
            dict(img_size=8),
            "img_size must leave .* of 16x16 pixels; got 8x8",
        ),
    ],
)
def test_switches_that_do_not_fit_are_refused(name: str, switches: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        weft.create_model(name, **switches)
