"""CeiT: convolution-enhanced image transformers (Yuan et al. 2021, arXiv 2103.11816)."""

from __future__ import annotations

from weft.models.family import Family, PublicWeights, Variant

_WEIGHTS = PublicWeights("", by_hand="one archive for all CeiT on Google Drive, file 1S19SQUic9ILBGNkcJTOy74MGoj-JRM4x")
_CROP_384 = dict(crop_pct=384 / 438)

FAMILY = Family(
    name="CeiT",
    network="weft.models.ceit.network:CeiT",
    # Sizes: the paper's Table 2 and the released ceit_model.py; nano is weft's own.
    variants={
        "ceit_tiny_patch16_224": Variant(dict(img_size=224, embed_dim=192, num_heads=3), _WEIGHTS),
        "ceit_small_patch16_224": Variant(dict(img_size=224, embed_dim=384, num_heads=6), _WEIGHTS),
        "ceit_base_patch16_224": Variant(dict(img_size=224, embed_dim=768, num_heads=12), _WEIGHTS),
        "ceit_tiny_patch16_384": Variant(dict(img_size=384, embed_dim=192, num_heads=3), _WEIGHTS, _CROP_384),
        "ceit_small_patch16_384": Variant(dict(img_size=384, embed_dim=384, num_heads=6), _WEIGHTS, _CROP_384),
        "ceit_nano_32": Variant(
            dict(img_size=32, patch_size=4, stem_convs=((3, 1),), stem_chans=32, embed_dim=96, depth=6, num_heads=3)
        ),
    },
    default_cfg=dict(first_conv="patch_embed.convs.0"),
    candidates={"small": {"model": "ceit_nano_32"}, "large": {"model": "ceit_tiny_patch16_224"}},
    has_attention=True,
)
