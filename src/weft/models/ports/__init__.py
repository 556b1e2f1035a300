"""Networks that articles print under the names of the papers: for weights that were trained with them.

Each is in a file of its own with everything that is special about it. `weft models 'port_*'` lists them.
"""

from __future__ import annotations

from weft.models.family import Family, Variant

_CEIT, _CVT, _LEVIT = (f"weft.models.ports.{name}" for name in ("ceit_pytorch", "vit_pytorch_cvt", "vit_pytorch_levit"))

FAMILIES = (
    Family(
        name="CeiT-pytorch",
        network=f"{_CEIT}:CeiTPytorch",
        variants={"port_ceit_pytorch": Variant({})},
        default_cfg=dict(first_conv="patch_embed.convs.0"),
    ),
    Family(
        name="vit-pytorch CvT",
        network=f"{_CVT}:VitPytorchCvT",
        variants={"port_vit_pytorch_cvt": Variant({})},
        default_cfg=dict(first_conv="stages.0.patch_embed.proj", fixed_input_size=False),
    ),
    Family(
        name="vit-pytorch LeViT",
        network=f"{_LEVIT}:VitPytorchLeViT",
        variants={"port_vit_pytorch_levit": Variant({})},
        default_cfg=dict(first_conv="stem.conv1"),
        position_keys=("attention_biases",),
    ),
)
