"""Networks that articles print under the names of the papers: for weights that were trained with them.

Each is in a file of its own with everything that is special about it. `weft models 'port_*'` lists them.
"""

from __future__ import annotations

from weft.models.family import Family, Variant

FAMILIES = (
    Family(
        name="CeiT-pytorch",
        network="weft.models.ports.ceit_pytorch:CeiTPytorch",
        variants={"port_ceit_pytorch": Variant({})},
        default_cfg=dict(first_conv="patch_embed.convs.0"),
        has_attention=True,
    ),
    Family(
        name="vit-pytorch CvT",
        network="weft.models.ports.vit_pytorch_cvt:VitPytorchCvT",
        variants={"port_vit_pytorch_cvt": Variant({})},
        default_cfg=dict(first_conv="stages.0.patch_embed.proj", fixed_input_size=False),
        has_attention=True,
    ),
    Family(
        name="vit-pytorch LeViT",
        network="weft.models.ports.vit_pytorch_levit:VitPytorchLeViT",
        variants={"port_vit_pytorch_levit": Variant({})},
        default_cfg=dict(first_conv="stem.conv1"),
        has_attention=True,
    ),
)
