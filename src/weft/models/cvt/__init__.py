"""CvT: convolutional vision transformers (Wu et al. 2021, arXiv 2103.15808)."""

from __future__ import annotations

from weft.models.family import Family, PublicWeights, Variant

_NANO = dict(  # weft's own
    img_size=32, embed_dim=(32, 64, 128), depth=(1, 2, 4), num_heads=(1, 2, 4), embed_kernel=(3, 3, 3),
    embed_stride=(2, 2, 2), embed_padding=(1, 1, 1),
)  # fmt: skip

FAMILY = Family(
    name="CvT",
    network="weft.models.cvt.network:CvT",
    # Sizes: Table 2, one value per stage. transformers runs the public weights with another activation than they were
    # trained with; weft uses the one of the training.
    variants={
        "cvt_13": Variant(
            dict(embed_dim=(64, 192, 384), depth=(1, 2, 10), num_heads=(1, 3, 6)), PublicWeights("microsoft/cvt-13")
        ),
        "cvt_21": Variant(
            dict(embed_dim=(64, 192, 384), depth=(1, 4, 16), num_heads=(1, 3, 6)), PublicWeights("microsoft/cvt-21")
        ),
        "cvt_w24": Variant(
            dict(img_size=384, embed_dim=(192, 768, 1024), depth=(2, 2, 20), num_heads=(3, 12, 16)),
            PublicWeights("microsoft/cvt-w24-384-22k"),
            dict(crop_pct=1.0, crop_mode="squash"),
        ),
        "cvt_nano_32": Variant(_NANO),
    },
    default_cfg=dict(first_conv="stages.0.patch_embed.proj", fixed_input_size=False),
    candidates={"small": {"model": "cvt_nano_32"}, "large": {"model": "cvt_13"}},
    has_attention=True,
)
