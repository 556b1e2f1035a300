"""CeiT weights of other libraries: the released code, and CeiT-pytorch (github.com/rishikksh20/CeiT-pytorch)."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from weft.models.ceit.network import CeiT, LeFF
from weft.models.layout import Layout, State

_HEAD_DIM, _LCA_HEADS = 64, 4  # CeiT-pytorch's defaults; its weights do not show them


def _patches_to_kernel(state: State) -> State:
    """CeiT-pytorch flattens a patch (rows, columns, channels) in front of a linear layer; here it is a convolution."""
    name = "to_patch_embedding.1.weight"
    chans = state["conv.0.weight"].shape[0]
    side = round((state[name].shape[1] // chans) ** 0.5)
    return {**state, name: state[name].unflatten(1, (side, side, chans)).permute(0, 3, 1, 2)}


def _pytorch_switches(state: State) -> dict[str, Any]:
    switches: dict[str, Any] = dict(stem_chans=state["conv.0.weight"].shape[0], stem_bias=True, stem_padding=(4, 0))
    switches |= dict(qkv_bias=False, leff_bias=False, leff_final_act=True, leff_pass_cls=False, norm_eps=1e-5)
    rows, dim = state["transformer.layers.0.0.fn.fn.to_qkv.weight"].shape
    if rows != 3 * dim:
        switches |= dict(num_heads=rows // (3 * _HEAD_DIM), head_dim=_HEAD_DIM)
    first = state.get("LCA.layers.0.1.fn.net.0.weight")
    if first is None:
        return switches | dict(lca=False)
    switches |= dict(lca_num_heads=_LCA_HEADS, lca_mlp_ratio=first.shape[0] / first.shape[1], lca_embed=False)
    inner = state["LCA.layers.0.0.fn.to_qkv.weight"].shape[0] // 3
    return switches if inner == dim else switches | dict(lca_head_dim=inner // _LCA_HEADS)


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
    asks=lambda state: dict(stem_padding=None, leff_final_act=False, leff_pass_cls=True, norm_eps=1e-6),
)

CEIT_PYTORCH = Layout(
    name="CeiT-pytorch",
    signature=r"transformer\.layers\.0\.1\.fn\.fn\.up_proj\.0\.weight",
    prepare=_patches_to_kernel,
    rename={
        "conv.0": "patch_embed.convs.0",
        "conv.1": "patch_embed.norm",
        "to_patch_embedding.1": "patch_embed.proj",
        "pos_embedding": "pos_embed",
        "transformer.layers.{}.0.fn.norm": "blocks.{}.norm1",
        "transformer.layers.{}.0.fn.fn.to_qkv": "blocks.{}.attn.qkv",
        "transformer.layers.{}.0.fn.fn.to_out.0": "blocks.{}.attn.proj",
        "transformer.layers.{}.1.fn.norm": "blocks.{}.norm2",
        "transformer.layers.{}.1.fn.fn": "blocks.{}.mlp",
        "mlp.up_proj.0": "mlp.fc1",
        "mlp.up_proj.2": "mlp.norm1",
        "mlp.depth_conv.0": "mlp.dwconv",
        "mlp.depth_conv.1": "mlp.norm2",
        "mlp.down_proj.0": "mlp.fc2",
        "mlp.down_proj.2": "mlp.norm3",
        "LCA.layers.0.0.norm": "lca.norm1",
        "LCA.layers.0.0.fn.to_qkv": "lca.attn.qkv",
        "LCA.layers.0.0.fn.to_out.0": "lca.attn.proj",
        "LCA.layers.0.1.norm": "lca.norm2",
        "LCA.layers.0.1.fn.net.0": "lca.mlp.fc1",
        "LCA.layers.0.1.fn.net.3": "lca.mlp.fc2",
        "mlp_head.0": "norm",
        "mlp_head.1": "head",
    },
    asks=_pytorch_switches,
)

LAYOUTS = (RELEASED, CEIT_PYTORCH)


def built_values(model: CeiT) -> dict[str, Any]:
    """The switches of a CeiT that its state dict does not show."""
    first: Any = model.blocks[0]
    heads = first.attn.num_heads
    switches: dict[str, Any] = dict(norm_eps=first.norm1.eps)
    switches |= dict(num_heads=heads, head_dim=first.attn.proj.in_features // heads)
    mlp = first.mlp
    if isinstance(mlp, LeFF):
        switches |= dict(leff_final_act=isinstance(mlp.final_act, nn.GELU), leff_pass_cls=mlp.pass_cls)
    if model.lca is not None:
        lca: Any = model.lca.attn
        switches |= dict(lca_num_heads=lca.num_heads, lca_head_dim=lca.proj.in_features // lca.num_heads)
    if len(model.patch_embed.convs):
        conv, pool = cast("nn.Conv2d", model.patch_embed.convs[0]), model.patch_embed.pool
        padding = (int(conv.padding[0]), int(cast("int", pool.padding)) if isinstance(pool, nn.MaxPool2d) else 1)
        switches["stem_padding"] = None if padding == (conv.kernel_size[0] // 2, 1) else padding
    return switches
