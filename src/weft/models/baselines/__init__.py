"""Networks that the papers compare with: grafted hybrids (LeViT, Table 1), and DeiT and ResNet from timm."""

from __future__ import annotations

from weft.models.family import Candidate, Family, Variant

GRAFTED = Family(
    name="Grafted",
    network="weft.models.baselines.grafted:Grafted",
    # Sizes: Table 1 of the LeViT paper.
    variants={
        "grafted_r50s0_deit_small_12": Variant(
            dict(num_stages=0, depth=12, distilled=False),
            params=22_050_664,
            macs=4_598_882_304,
            top1=79.9,
            top1_source="LeViT paper, Table 1",
            printed=("22.0M", "4576M"),
            default_cfg=dict(first_conv="proj", classifier="head"),
        ),
        "grafted_r50s1_deit_small_9": Variant(
            dict(num_stages=1, depth=9),
            params=17_141_776,
            macs=4_230_169_600,
            top1=80.6,
            top1_source="LeViT paper, Table 1",
            printed=("17.1M", "4209M"),
        ),
        "grafted_r50s2_deit_small_6": Variant(
            dict(num_stages=2, depth=6),
            params=13_136_272,
            macs=4_135_649_280,
            top1=80.9,
            top1_source="LeViT paper, Table 1",
            printed=("13.1M", "4136M"),
        ),
        "grafted_r50s3_deit_small_3": Variant(
            dict(num_stages=3, depth=3),
            params=15_107_856,
            macs=4_497_128_448,
            top1=80.1,
            top1_source="LeViT paper, Table 1",
            printed=("15.1M", "4515M"),
        ),
        "grafted_r50s4_deit_small_0": Variant(
            dict(num_stages=4, depth=0, distilled=False),
            params=25_557_032,
            macs=4_089_184_256,
            top1=78.4,
            top1_source="LeViT paper, Table 1",
            printed=("25.5M", "4119M"),
            default_cfg=dict(classifier="head"),
        ),
    },
    default_cfg=dict(first_conv="stem.0", classifier=("head", "head_dist")),
    feature_levels="weft.models.baselines.grafted:feature_levels",
    cam_target="weft.models.baselines.grafted:cam_target",
    fold_rules="weft.models.baselines.grafted:RULES",
)

CANDIDATES = {  # of timm, for `weft compare`
    "small": (
        Candidate(
            "DeiT",
            "deit_tiny_patch16_224",
            {
                "img_size": 32,
                "model_args.patch_size": 4,
                "model_args.embed_dim": 96,
                "model_args.depth": 6,
                "model_args.num_heads": 3,
            },
        ),
        Candidate("ResNet", "resnet18", {"img_size": 64, "model_args.channels": [32, 64, 128, 256]}),
    ),
    "large": (
        Candidate("DeiT", "deit_tiny_patch16_224.fb_in1k"),
        Candidate("ResNet", "resnet18.a1_in1k"),
    ),
}
