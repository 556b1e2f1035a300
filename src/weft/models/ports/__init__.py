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
        layouts=f"{_CEIT}:LAYOUTS",
        built_values=f"{_CEIT}:built_values",
        attention=f"{_CEIT}:attention",
        cam_target=f"{_CEIT}:cam_target",
        fold_rules=f"{_CEIT}:RULES",
    ),
    Family(
        name="vit-pytorch CvT",
        network=f"{_CVT}:VitPytorchCvT",
        variants={"port_vit_pytorch_cvt": Variant({})},
        default_cfg=dict(first_conv="stages.0.patch_embed.proj", fixed_input_size=False),
        layouts=f"{_CVT}:LAYOUTS",
        attention=f"{_CVT}:attention",
        cam_target=f"{_CVT}:cam_target",
        fold_rules=f"{_CVT}:RULES",
    ),
    Family(
        name="vit-pytorch LeViT",
        network=f"{_LEVIT}:VitPytorchLeViT",
        variants={"port_vit_pytorch_levit": Variant({})},
        default_cfg=dict(first_conv="stem.conv1"),
        layouts=f"{_LEVIT}:LAYOUTS",
        position_keys=("attention_biases",),
        attention=f"{_LEVIT}:attention",
        cam_target=f"{_LEVIT}:cam_target",
        fold_rules=f"{_LEVIT}:RULES",
    ),
)
