"""CeiT weights of the released code."""

from __future__ import annotations

from weft.models.layout import Layout

RELEASED = Layout(
    name="the released CeiT",
    signature=r"blocks\.0\.leff\.conv1\.weight",
    rename={
        "i2t.backbone.conv": "patch_embed.convs.0",
        "i2t.backbone.bn": "patch_embed.norm",
        "i2t.proj": "patch_embed.proj",
        "leff.conv1": "mlp.fc1",
        "leff.bn1": "mlp.norm1",
        "leff.conv2": "mlp.dwconv",
        "leff.bn2": "mlp.norm2",
        "leff.conv3": "mlp.fc2",
        "leff.bn3": "mlp.norm3",
        "pos_layer_embed": "lca.layer_embed",
        "lca.feedforward": "lca.mlp",
    },
    linear=r"\.mlp\.fc[12]\.weight$",
    asks=lambda state: dict(leff_final_act=False, leff_pass_cls=True),
    hidden=("leff_final_act", "leff_pass_cls"),
)

LAYOUTS = (RELEASED,)
