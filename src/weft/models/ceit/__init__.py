"""CeiT: convolution-enhanced image transformers (Yuan et al. 2021, arXiv 2103.11816)."""

from __future__ import annotations

from weft.models.family import Candidate, Family, Peer, PublicWeights, Variant

_ARCHIVE = "one archive for all CeiT on Google Drive, file 1S19SQUic9ILBGNkcJTOy74MGoj-JRM4x"
_PARENTS = {  # no other library has CeiT; DeiT is the network that it extends
    "ceit_tiny_patch16_224": "deit_tiny_patch16_224",
    "ceit_small_patch16_224": "deit_small_patch16_224",
    "ceit_base_patch16_224": "deit_base_patch16_224",
}


def _peers(name: str) -> tuple[Peer, ...]:
    parent = _PARENTS.get(name)
    return () if parent is None else (Peer(f"timm {parent}", "timm", lambda timm: timm.create_model(parent)),)


FAMILY = Family(
    name="CeiT",
    network="weft.models.ceit.network:CeiT",
    # Sizes: the paper's Table 2 and the released ceit_model.py; nano is weft's own.
    variants={
        "ceit_tiny_patch16_224": Variant(
            dict(img_size=224, embed_dim=192, num_heads=3),
            params=6_356_904,
            macs=1_395_307_008,
            top1=76.4,
            top1_source="CeiT paper, main table",
            printed=("6.4M", "1.2G"),
            weights=PublicWeights("", by_hand=_ARCHIVE),
        ),
        "ceit_small_patch16_224": Variant(
            dict(img_size=224, embed_dim=384, num_heads=6),
            params=24_204_840,
            macs=4_759_544_832,
            top1=82.0,
            top1_source="CeiT paper, main table",
            printed=("24.2M", "4.5G"),
            weights=PublicWeights("", by_hand=_ARCHIVE),
        ),
        "ceit_base_patch16_224": Variant(
            dict(img_size=224, embed_dim=768, num_heads=12),
            params=94_405_416,
            macs=17_748_854_784,
            top1=81.9,
            top1_source="CeiT released README, 100 epochs",
            printed=("94.4M", None),  # of the released README; the paper prints DeiT-B's 86.6M and 17.4G
            weights=PublicWeights("", by_hand=_ARCHIVE),
        ),
        "ceit_tiny_patch16_384": Variant(
            dict(img_size=384, embed_dim=192, num_heads=3),
            params=6_429_864,
            macs=5_102_842_368,
            top1=78.8,
            top1_source="CeiT paper, main table",
            printed=("6.4M", "3.6G"),
            weights=PublicWeights("", by_hand=_ARCHIVE, size=384),
            default_cfg=dict(crop_pct=384 / 438),
        ),
        "ceit_small_patch16_384": Variant(
            dict(img_size=384, embed_dim=384, num_heads=6),
            params=24_350_760,
            macs=15_980_209_152,
            top1=83.3,
            top1_source="CeiT paper, main table",
            printed=("24.2M", "12.9G"),
            weights=PublicWeights("", by_hand=_ARCHIVE, size=384),
            default_cfg=dict(crop_pct=384 / 438),
        ),
        "ceit_nano_32": Variant(
            dict(img_size=32, patch_size=4, stem_convs=((3, 1),), stem_chans=32, embed_dim=96, depth=6, num_heads=3),
            params=933_704,
            macs=50_853_888,
        ),
    },
    default_cfg=dict(first_conv="patch_embed.convs.0"),
    layouts="weft.models.ceit.weights:LAYOUTS",
    built_values="weft.models.ceit.weights:built_values",
    attention="weft.models.ceit.attention:attention",
    cam_target="weft.models.ceit.attention:cam_target",
    fold_rules="weft.models.ceit.inference:RULES",
    peers=_peers,
    candidates={
        "small": Candidate("CeiT", "ceit_nano_32"),
        "large": Candidate("CeiT", "ceit_tiny_patch16_224"),
    },
)
