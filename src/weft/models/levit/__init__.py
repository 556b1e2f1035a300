"""LeViT: a vision transformer in ConvNet's clothing for faster inference (Graham et al. 2021, arXiv 2104.01136)."""

from __future__ import annotations

from weft.models.family import Family, PublicWeights, Variant

# Table 2: C per stage, D, N per stage, X per stage, drop path; end of the name of the authors' file
_SIZES = {
    "levit_128s": ((128, 256, 384), 16, (4, 6, 8), (2, 3, 4), 0.0, "128S-96703c44"),
    "levit_128": ((128, 256, 384), 16, (4, 8, 12), (4, 4, 4), 0.0, "128-b88c2750"),
    "levit_192": ((192, 288, 384), 32, (3, 5, 6), (4, 4, 4), 0.0, "192-92712e41"),
    "levit_256": ((256, 384, 512), 32, (4, 6, 8), (4, 4, 4), 0.0, "256-13b5763e"),
    "levit_384": ((384, 512, 768), 32, (6, 9, 12), (4, 4, 4), 0.1, "384-9bdaf2e2"),
}


def _variant(name: str) -> Variant:
    embed_dim, key_dim, num_heads, depth, drop_path, file = _SIZES[name]
    args = dict(embed_dim=embed_dim, key_dim=key_dim, num_heads=num_heads, depth=depth, drop_path_rate=drop_path)
    url = f"https://dl.fbaipublicfiles.com/LeViT/LeViT-{file}.pth"
    return Variant(args, PublicWeights(f"timm/{name}.fb_dist_in1k", url))


_NANO = dict(  # weft's own
    img_size=32, stem_strides=(1, 2, 2), embed_dim=(64, 96, 128), key_dim=16, num_heads=(2, 3, 4), depth=(2, 3, 3)
)  # fmt: skip

FAMILY = Family(
    name="LeViT",
    network="weft.models.levit.network:LeViT",
    variants={**{name: _variant(name) for name in _SIZES}, "levit_nano_32": Variant(_NANO)},
    default_cfg=dict(first_conv="stem.conv1.linear", classifier=("head.linear", "head_dist.linear")),
    candidates={
        "small": {"model": "levit_nano_32", "model_args.distilled": False},
        "large": {"model": "levit_256", "model_args.distilled": False},
    },
    has_attention=True,
)
