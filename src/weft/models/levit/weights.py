"""LeViT weights of other libraries: the released code and timm (linear or convolutional), transformers, vit-pytorch.

All but timm have one flat list of layers; `_placed` assigns them to stages and blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.models.base import activation_name
from weft.models.layout import Layout, State
from weft.models.levit.network import Attention, Block, LeViT

_IN_STAGES = r"^stages\..*\.weight$"


def _placed(state: State, layers: Iterable[tuple[str, str]]) -> State:
    """Moves layers to their places here.

    Args:
        state: their names.
        layers: in order, (prefix of their names, 'attn' | 'mlp' | 'shrink').
    """
    places: dict[str, str] = {}
    stage, block = 0, 0
    after_shrink = False
    for prefix, kind in layers:
        if kind == "shrink":
            stage, block = stage + 1, 0
            places[prefix] = f"stages.{stage}.downsample.attn_downsample"
        elif kind == "mlp" and after_shrink:
            places[prefix] = f"stages.{stage}.downsample.mlp"
        else:
            places[prefix] = f"stages.{stage}.blocks.{block}.{kind}"
            block += kind == "mlp"
        after_shrink = kind == "shrink"
    moved: State = {}
    for name, tensor in state.items():
        parts = name.split(".")
        prefix = next((p for i in range(len(parts), 0, -1) if (p := ".".join(parts[:i])) in places), None)
        moved[name if prefix is None else places[prefix] + name[len(prefix) :]] = tensor
    return moved


def _numbered(state: State, pattern: str) -> list[tuple[int, ...]]:
    """The numbers that a pattern finds in the names, each once, in order."""
    matches = (re.match(pattern, name) for name in state)
    return sorted({tuple(int(number) for number in match.groups()) for match in matches if match})


def _place_released(state: State) -> State:
    def layer(i: int) -> tuple[str, str]:
        if f"blocks.{i}.kv.c.weight" in state:
            return f"blocks.{i}", "shrink"
        return f"blocks.{i}.m", "attn" if f"blocks.{i}.m.qkv.c.weight" in state else "mlp"

    return _placed(state, [layer(i) for (i,) in _numbered(state, r"blocks\.(\d+)\.")])


def _place_transformers(state: State) -> State:
    state = {name.removeprefix("levit."): tensor for name, tensor in state.items()}

    def layer(stage: int, i: int) -> tuple[str, str]:
        prefix = f"encoder.stages.{stage}.layers.{i}"
        if f"{prefix}.keys_values.linear.weight" in state:
            return prefix, "shrink"
        is_attn = f"{prefix}.module.queries_keys_values.linear.weight" in state
        return f"{prefix}.module", "attn" if is_attn else "mlp"

    return _placed(state, [layer(*pair) for pair in _numbered(state, r"encoder\.stages\.(\d+)\.layers\.(\d+)\.")])


def _place_vit(state: State) -> State:
    state = dict(state)
    layers: list[tuple[str, str]] = []
    for part, i in _numbered(state, r"backbone\.(\d+)\.layers\.(\d+)\.0\."):
        prefix = f"backbone.{part}.layers.{i}"
        is_shrink = part % 2 == 1  # one shrinking layer is between two stages
        _join_projections(state, f"{prefix}.0", is_shrink)
        layers += [(f"{prefix}.0", "shrink" if is_shrink else "attn"), (f"{prefix}.1", "mlp")]
    return _placed(state, layers)


def _join_projections(state: State, prefix: str, is_shrink: bool) -> None:
    """Join the separate layers for queries, keys and values of vit-pytorch to the fused layers of weft."""
    biases = state.pop(f"{prefix}.pos_bias.weight")
    heads = biases.shape[1]
    key_dim = state[f"{prefix}.to_k.0.weight"].shape[0] // heads
    state[f"{prefix}.attention_biases"] = biases.T * key_dim**0.5  # there a bias is divided by the scale of the scores
    projections = ("to_k", "to_v") if is_shrink else ("to_q", "to_k", "to_v")
    joined = f"{prefix}.kv" if is_shrink else f"{prefix}.qkv"
    names = [name.partition(".to_k.")[2] for name in state if name.startswith(f"{prefix}.to_k.")]
    for name in names:
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


def _released(name: str, ndim: int) -> Layout:
    return Layout(
        name=name,
        signature=r"blocks\.0\.m\.qkv\.c\.weight",
        ndim=ndim,
        prepare=_place_released,
        rename={
            **{f"patch_embed.{2 * i}": f"stem.conv{i + 1}" for i in range(4)},
            "proj.1": "proj.ln",
            "q.1": "q.ln",
            "mlp.0": "mlp.ln1",
            "mlp.2": "mlp.ln2",
            "c": "linear",
            "l": "linear",
        },
        drop=r"\.attention_bias_idxs$",
        linear=_IN_STAGES,
        asks=_hard_swish,
    )


def _hard_swish(state: State) -> dict[str, Any]:
    return dict(act_layer="hard_swish", attn_act_layer="hard_swish")


def _timm(name: str, ndim: int) -> Layout:
    return Layout(
        name=name,
        signature=r"stages\.0\.blocks\.0\.attn\.qkv\.linear\.weight",
        ndim=ndim,
        drop=r"\.attention_bias_idxs$",  # old files keep them
        linear=_IN_STAGES,
        asks=lambda state: {} if "head_dist.linear.weight" in state else dict(distilled=False),
    )


TRANSFORMERS = Layout(
    name="transformers' LeViT",
    signature=r"(levit\.)?patch_embeddings\.embedding_layer_1\.convolution\.weight",
    prepare=_place_transformers,
    rename={
        "patch_embeddings.embedding_layer_{}": "stem.conv{}",
        "convolution": "linear",
        "batch_norm": "bn",
        "queries_keys_values": "qkv",
        "keys_values": "kv",
        "queries": "q.ln",
        "projection": "proj.ln",
        "linear_up": "ln1",
        "linear_down": "ln2",
        "classifier": "head",
        "classifier_distill": "head_dist",
    },
    drop=r"\.attention_bias_idxs$",
    asks=lambda state: (
        _hard_swish(state) | ({} if "classifier_distill.linear.weight" in state else dict(distilled=False))
    ),
)


def _vit_switches(state: State) -> dict[str, Any]:
    first = "backbone.0.layers.0.0"
    heads = state[f"{first}.pos_bias.weight"].shape[1]
    key_dim, value_dim = (state[f"{first}.{name}.0.weight"].shape[0] // heads for name in ("to_k", "to_v"))
    shrinking = [f"backbone.{i}.layers.0.0.pos_bias.weight" for (i,) in _numbered(state, r"backbone\.(\d+)\.") if i % 2]
    return dict(
        stem="bare",
        stem_chans=state["conv_embedding.0.weight"].shape[0],
        key_dim=key_dim,
        down_num_heads=tuple(state[name].shape[1] for name in shrinking),
        down_attn_ratio=value_dim / key_dim,
        mlp_norm=False,
        head_norm=False,
        act_layer="hard_swish",
        attn_act_layer="gelu",
        distilled="distill_head.weight" in state,
    )


VIT_PYTORCH = Layout(
    name="vit-pytorch's LeViT",
    signature=r"conv_embedding\.0\.weight",
    prepare=_place_vit,
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
    linear=_IN_STAGES,
    asks=_vit_switches,
)

LAYOUTS = (
    _released("the released LeViT", 2),
    _released("the released LeViT, convolutional form", 4),
    _timm("timm's LeViT", 2),
    _timm("timm's LeViT, convolutional form", 4),
    TRANSFORMERS,
    VIT_PYTORCH,
)


def built_values(model: LeViT) -> dict[str, Any]:
    """The switches of a LeViT that its state dict does not show."""
    block = next((module for module in model.modules() if isinstance(module, Block)), None)
    if block is None:  # a depth of 0 throughout
        return {}
    attn = cast("Attention", block.attn)
    return dict(
        act_layer=activation_name(cast("nn.Module", block.mlp.act)),
        attn_act_layer=activation_name(cast("nn.Module", attn.proj.act)),
        key_dim=attn.widths[0],
    )
