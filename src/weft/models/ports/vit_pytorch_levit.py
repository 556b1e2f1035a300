"""The LeViT of vit-pytorch (github.com/lucidrains/vit-pytorch), which articles print: the network for its weights.

Unlike the released LeViT: a stem of bare convolutions with 32, 64, 128 channels, without BatchNorm and activations; no
BatchNorm in the MLPs and in front of the heads, but biases; GELU behind attention; a shrinking attention has twice the
heads of the stage before, values as wide as elsewhere, and behind it an MLP of ratio 2.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layout import Layout, State
from weft.models.levit.attention import attention as attention
from weft.models.levit.attention import cam_target as cam_target
from weft.models.levit.inference import fold_stem
from weft.models.levit.network import MLP, Block, Downsample, LeViT, linear
from weft.models.levit.weights import numbered, placed

CHANS = (32, 64, 128)  # of the stem, in front of the first stage


class BareStem(nn.Sequential):
    """Image to map: four 3x3 convolutions with bias."""

    def __init__(self, in_chans: int, embed_dim: int) -> None:
        sizes = zip((in_chans, *CHANS), (*CHANS, embed_dim), strict=True)
        super().__init__(OrderedDict((f"conv{i}", nn.Conv2d(*pair, 3, 2, 1)) for i, pair in enumerate(sizes, start=1)))


class VitPytorchLeViT(LeViT):
    """LeViT of vit-pytorch. Arguments as those of `LeViT`."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: tuple[int, ...] = (256, 384, 512),
        key_dim: int = 32,
        depth: tuple[int, ...] = (4, 4, 4),
        num_heads: tuple[int, ...] = (4, 6, 8),
        attn_ratio: float = 2.0,
        mlp_ratio: float = 2.0,
        distilled: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            img_size, in_chans, num_classes, global_pool, embed_dim=embed_dim, key_dim=key_dim, depth=depth,
            num_heads=num_heads, attn_ratio=attn_ratio, mlp_ratio=mlp_ratio,
            down_num_heads=tuple(2 * heads for heads in num_heads[:-1]), down_attn_ratio=attn_ratio,
            down_mlp_ratio=2.0, attn_act_layer="gelu", distilled=distilled, drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )  # fmt: skip
        self.stem = BareStem(in_chans, embed_dim[0])
        for stage, dim in zip(self.stages, embed_dim, strict=True):
            for module in stage.modules():
                if isinstance(module, (Block, Downsample)):
                    ratio = mlp_ratio if isinstance(module, Block) else 2.0
                    module.mlp = MLP(dim, ratio, linear, nn.Hardswish)

    def make_head(self, num_classes: int) -> nn.Module:
        """Return a linear layer."""
        return super(LeViT, self).make_head(num_classes)


RULES = {BareStem: fold_stem}


def _place(state: State) -> State:
    state = dict(state)
    layers: list[tuple[str, str]] = []
    for part, i in numbered(state, r"backbone\.(\d+)\.layers\.(\d+)\.0\."):
        prefix = f"backbone.{part}.layers.{i}"
        is_shrink = part % 2 == 1  # one shrinking layer is between two stages
        _join_projections(state, f"{prefix}.0", is_shrink)
        layers += [(f"{prefix}.0", "shrink" if is_shrink else "attn"), (f"{prefix}.1", "mlp")]
    return placed(state, layers)


def _join_projections(state: State, prefix: str, is_shrink: bool) -> None:
    """Join the separate layers for queries, keys and values to the fused layers of weft."""
    biases = state.pop(f"{prefix}.pos_bias.weight")
    heads = biases.shape[1]
    key_dim = state[f"{prefix}.to_k.0.weight"].shape[0] // heads
    state[f"{prefix}.attention_biases"] = biases.T * key_dim**0.5  # there a bias is divided by the scale of the scores
    projections = ("to_k", "to_v") if is_shrink else ("to_q", "to_k", "to_v")
    joined = f"{prefix}.kv" if is_shrink else f"{prefix}.qkv"
    for name in [name.partition(".to_k.")[2] for name in state if name.startswith(f"{prefix}.to_k.")]:
        tensors = [state.pop(f"{prefix}.{projection}.{name}") for projection in projections]
        state[f"{joined}.{name}"] = _side_by_side(tensors, heads)
    # A bias in front of BatchNorm only moves its mean.
    bias = state.pop(f"{prefix}.to_out.1.bias")
    state[f"{prefix}.to_out.2.running_mean"] = state[f"{prefix}.to_out.2.running_mean"] - bias


def _side_by_side(tensors: list[Tensor], heads: int) -> Tensor:
    """Per head the rows of every tensor, one after the other; a count is the same in all of them."""
    if tensors[0].ndim == 0:
        return tensors[0]
    return torch.cat([tensor.unflatten(0, (heads, -1)) for tensor in tensors], dim=1).flatten(0, 1)


def _arguments(state: State) -> dict[str, Any]:
    stages = range(0, 1 + max(part for (part,) in numbered(state, r"backbone\.(\d+)\.")), 2)
    heads = tuple(state[f"backbone.{part}.layers.0.0.pos_bias.weight"].shape[1] for part in stages)
    first = "backbone.0.layers.0"
    key_dim, value_dim = (state[f"{first}.0.{name}.0.weight"].shape[0] // heads[0] for name in ("to_k", "to_v"))
    hidden_dim, dim = state[f"{first}.1.net.0.weight"].shape[:2]
    return dict(
        embed_dim=tuple(state[f"backbone.{part}.layers.0.0.to_k.0.weight"].shape[1] for part in stages),
        key_dim=key_dim,
        depth=tuple(len(numbered(state, rf"backbone\.{part}\.layers\.(\d+)\.")) for part in stages),
        num_heads=heads,
        attn_ratio=value_dim / key_dim,
        mlp_ratio=hidden_dim / dim,
        distilled="distill_head.weight" in state,
    )


LAYOUTS = (
    Layout(
        name="vit-pytorch's LeViT",
        signature=r"conv_embedding\.0\.weight",
        prepare=_place,
        rename={
            **{f"conv_embedding.{i}": f"stem.conv{i + 1}" for i in range(4)},
            **{f"{joined}.0": f"{joined}.linear" for joined in ("qkv", "kv")},
            **{f"{joined}.1": f"{joined}.bn" for joined in ("qkv", "kv")},
            "to_q.0": "q.ln.linear",
            "to_q.1": "q.ln.bn",
            "to_out.1": "proj.ln.linear",
            "to_out.2": "proj.ln.bn",
            "net.0": "ln1",
            "net.3": "ln2",
            "mlp_head": "head",
            "distill_head": "head_dist",
        },
        drop=r"\.pos_indices$",
        linear=r"^stages\..*\.weight$",
        asks=_arguments,
    ),
)
