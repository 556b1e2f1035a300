"""LeViT: a vision transformer in ConvNet's clothing for faster inference (Graham et al. 2021, arXiv 2104.01136)."""

from __future__ import annotations

from weft.models.family import Candidate, Family, PublicWeights, Variant

_FILE = "https://dl.fbaipublicfiles.com/LeViT/LeViT-{}.pth"


FAMILY = Family(
    name="LeViT",
    network="weft.models.levit.network:LeViT",
    # Sizes: Table 2, one value per stage; nano is weft's own.
    variants={
        "levit_128s": Variant(
            dict(embed_dim=(128, 256, 384), key_dim=16, num_heads=(4, 6, 8), depth=(2, 3, 4)),
            weights=PublicWeights("timm/levit_128s.fb_dist_in1k", _FILE.format("128S-96703c44")),
        ),
        "levit_128": Variant(
            dict(embed_dim=(128, 256, 384), key_dim=16, num_heads=(4, 8, 12), depth=(4, 4, 4)),
            weights=PublicWeights("timm/levit_128.fb_dist_in1k", _FILE.format("128-b88c2750")),
        ),
        "levit_192": Variant(
            dict(embed_dim=(192, 288, 384), key_dim=32, num_heads=(3, 5, 6), depth=(4, 4, 4)),
            weights=PublicWeights("timm/levit_192.fb_dist_in1k", _FILE.format("192-92712e41")),
        ),
        "levit_256": Variant(
            dict(embed_dim=(256, 384, 512), key_dim=32, num_heads=(4, 6, 8), depth=(4, 4, 4)),
            weights=PublicWeights("timm/levit_256.fb_dist_in1k", _FILE.format("256-13b5763e")),
        ),
        "levit_384": Variant(
            dict(embed_dim=(384, 512, 768), key_dim=32, num_heads=(6, 9, 12), depth=(4, 4, 4), drop_path_rate=0.1),
            weights=PublicWeights("timm/levit_384.fb_dist_in1k", _FILE.format("384-9bdaf2e2")),
        ),
        "levit_nano_32": Variant(
            dict(
                img_size=32,
                stem_strides=(1, 2, 2),
                embed_dim=(64, 96, 128),
                key_dim=16,
                num_heads=(2, 3, 4),
                depth=(2, 3, 3),
            )
        ),
    },
    default_cfg=dict(first_conv="stem.conv1.linear", classifier=("head.linear", "head_dist.linear")),
    candidates={
        "small": Candidate("LeViT", "levit_nano_32", {"model_args.distilled": False}),
        "large": Candidate("LeViT", "levit_256", {"model_args.distilled": False}),
    },
)
