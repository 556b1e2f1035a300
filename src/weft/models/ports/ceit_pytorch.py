"""The CeiT of github.com/rishikksh20/CeiT-pytorch, which articles print: the network for its weights.

Unlike the released CeiT: the stem's convolution has a padding of 4 and a bias, its pool no padding; no bias in q, k, v
and in the depthwise convolution; GELU also at the end of LeFF, which leaves the class token as it is; heads of 64
channels at every width; in LCA four heads, a narrower feed-forward and no embedding of the layer; LayerNorms with
an eps of 1e-5.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from weft.layers.mlp import Mlp
from weft.models.ceit.attention import attention as attention
from weft.models.ceit.attention import cam_target as cam_target
from weft.models.ceit.network import Attention, CeiT, LayerwiseClassAttention, LeFF
from weft.models.layout import Layout, State

HEAD_DIM, LCA_HEADS = 64, 4  # its defaults; weights show the number of heads times their width only


class CeiTPytorch(CeiT):
    """CeiT of CeiT-pytorch. Arguments as those of `CeiT`, and:

    Args:
        head_dim: width of a head.
        lca_num_heads, lca_head_dim, lca_mlp_ratio: heads of LCA, their width, and the ratio of its feed-forward.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        patch_size: int = 16,
        stem_chans: int = 32,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        head_dim: int = HEAD_DIM,
        mlp_ratio: float = 4.0,
        leff_kernel: int = 3,
        lca: bool = True,
        lca_num_heads: int = LCA_HEADS,
        lca_head_dim: int = 48,
        lca_mlp_ratio: float = 2.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            img_size, in_chans, num_classes, global_pool, patch_size, stem_chans=stem_chans, embed_dim=embed_dim,
            depth=depth, num_heads=1, mlp_ratio=mlp_ratio, qkv_bias=False, leff_kernel=leff_kernel,
            leff_final_act=True, leff_pass_cls=False, lca=lca, lca_embed=False, drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )  # fmt: skip
        self.patch_embed.convs[0] = nn.Conv2d(in_chans, stem_chans, 7, 2, padding=4)
        self.patch_embed.pool = nn.MaxPool2d(3, 2)
        for block in self.blocks:
            cast("LeFF", block.mlp).dwconv.register_parameter("bias", None)
            _set_heads(cast("Attention", block.attn), embed_dim, num_heads, head_dim)
        if isinstance(self.lca, LayerwiseClassAttention):
            _set_heads(self.lca.attn, embed_dim, lca_num_heads, lca_head_dim)
            self.lca.mlp = Mlp(embed_dim, int(embed_dim * lca_mlp_ratio))
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-5
        self._init_weights()
        self.set_input_size(img_size)  # another grid, with this padding, at some sizes


def _set_heads(attn: Attention, dim: int, num_heads: int, head_dim: int) -> None:
    attn.num_heads, attn.scale = num_heads, head_dim**-0.5
    attn.qkv, attn.proj = nn.Linear(dim, 3 * num_heads * head_dim, bias=False), nn.Linear(num_heads * head_dim, dim)


def _patches_to_kernel(state: State) -> State:
    """Theirs flattens a patch (rows, columns, channels) in front of a linear layer; here it is a convolution."""
    name = "to_patch_embedding.1.weight"
    chans = state["conv.0.weight"].shape[0]
    side = round((state[name].shape[1] // chans) ** 0.5)
    return {**state, name: state[name].unflatten(1, (side, side, chans)).permute(0, 3, 1, 2)}


def _arguments(state: State) -> dict[str, Any]:
    inner, dim = state["transformer.layers.0.0.fn.fn.to_qkv.weight"].shape
    num_heads = max(1, inner // (3 * HEAD_DIM))
    chans = state["conv.0.weight"].shape[0]
    arguments: dict[str, Any] = dict(
        patch_size=4 * round((state["to_patch_embedding.1.weight"].shape[1] // chans) ** 0.5),
        stem_chans=chans,
        embed_dim=dim,
        depth=len({name.split(".")[2] for name in state if name.startswith("transformer.layers.")}),
        num_heads=num_heads,
        head_dim=inner // (3 * num_heads),
        mlp_ratio=state["transformer.layers.0.1.fn.fn.up_proj.0.weight"].shape[0] / dim,
        leff_kernel=state["transformer.layers.0.1.fn.fn.depth_conv.0.weight"].shape[-1],
        lca="LCA.layers.0.1.fn.net.0.weight" in state,
    )
    if not arguments["lca"]:
        return arguments
    lca_inner = state["LCA.layers.0.0.fn.to_qkv.weight"].shape[0] // 3
    heads = dict(lca_num_heads=LCA_HEADS, lca_head_dim=lca_inner // LCA_HEADS)
    return arguments | heads | dict(lca_mlp_ratio=state["LCA.layers.0.1.fn.net.0.weight"].shape[0] / dim)


LAYOUTS = (
    Layout(
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
        asks=_arguments,
        hidden=("num_heads", "lca_num_heads"),
    ),
)
