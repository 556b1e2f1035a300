"""Networks that the papers compare with: grafted hybrids (LeViT, Table 1), T2T-ViT, and DeiT and ResNet from timm."""

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

T2T = Family(
    name="T2TViT",
    network="weft.models.baselines.t2t:T2TViT",
    # Sizes: Table 1 of arXiv 2101.11986.
    variants={
        "t2t_vit_14": Variant(
            dict(embed_dim=384, depth=14, num_heads=6),
            params=21_465_806,
            macs=4_783_468_544,
            top1=81.5,
            top1_source="CeiT paper, main table",
            printed=("21.5M", "5.2G"),
        ),
        "t2t_vit_19": Variant(
            dict(embed_dim=448, depth=19, num_heads=7),
            params=39_085_070,
            macs=8_479_682_176,
            top1=81.9,
            top1_source="CeiT paper, main table",
            printed=("39.2M", "8.9G"),
        ),
        "t2t_vit_24": Variant(
            dict(embed_dim=512, depth=24, num_heads=8),
            params=64_000_974,
            macs=13_661_874_688,
            top1=82.3,
            top1_source="CeiT paper, main table",
            printed=("64.1M", "14.1G"),
        ),
        "t2t_vit_t_14": Variant(
            dict(embed_dim=384, depth=14, num_heads=6, token_type="transformer"),
            params=21_465_422,
            macs=6_088_721_920,
            top1=80.7,
            top1_source="CvT paper, Table 3",
            printed=("22M", "6.1G"),
            default_cfg=dict(first_conv="tokens_to_token.attention1.attn.qkv"),
        ),
        "t2t_vit_t_19": Variant(
            dict(embed_dim=448, depth=19, num_heads=7, token_type="transformer"),
            params=39_084_686,
            macs=9_784_935_552,
            top1=81.4,
            top1_source="CvT paper, Table 3",
            printed=("39M", "9.8G"),
            default_cfg=dict(first_conv="tokens_to_token.attention1.attn.qkv"),
        ),
        "t2t_vit_t_24": Variant(
            dict(embed_dim=512, depth=24, num_heads=8, token_type="transformer"),
            params=64_000_590,
            macs=14_967_128_064,
            top1=82.2,
            top1_source="CvT paper, Table 3",
            printed=("64M", "15.0G"),
            default_cfg=dict(first_conv="tokens_to_token.attention1.attn.qkv"),
        ),
    },
    default_cfg=dict(first_conv="tokens_to_token.attention1.kqv", crop_pct=0.9),
    cam_target="weft.models.baselines.t2t:cam_target",
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
