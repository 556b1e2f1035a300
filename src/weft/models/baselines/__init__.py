"""Networks that the papers compare with: grafted hybrids (LeViT, Table 1), and DeiT and ResNet from timm."""

from __future__ import annotations

from typing import Any

from weft.models.family import Family, Variant

FAMILY = Family(
    name="Grafted",
    network="weft.models.baselines.network:Grafted",
    # Sizes: Table 1 of the LeViT paper.
    variants={
        "grafted_r50s0_deit_small_12": Variant(
            dict(num_stages=0, depth=12, distilled=False), default_cfg=dict(first_conv="proj", classifier="head")
        ),
        "grafted_r50s1_deit_small_9": Variant(dict(num_stages=1, depth=9)),
        "grafted_r50s2_deit_small_6": Variant(dict(num_stages=2, depth=6)),
        "grafted_r50s3_deit_small_3": Variant(dict(num_stages=3, depth=3)),
        "grafted_r50s4_deit_small_0": Variant(
            dict(num_stages=4, depth=0, distilled=False), default_cfg=dict(classifier="head")
        ),
    },
    default_cfg=dict(first_conv="stem.0", classifier=("head", "head_dist")),
)

CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {  # of timm, for `weft compare`: scale -> label -> recipe settings
    "small": {
        "DeiT": {
            "model": "deit_tiny_patch16_224", "img_size": 32, "model_args.patch_size": 4,
            "model_args.embed_dim": 96, "model_args.depth": 6, "model_args.num_heads": 3,
        },
        "ResNet": {"model": "resnet18", "img_size": 64, "model_args.channels": [32, 64, 128, 256]},
    },
    "large": {"DeiT": {"model": "deit_tiny_patch16_224.fb_in1k"}, "ResNet": {"model": "resnet18.a1_in1k"}},
}  # fmt: skip
