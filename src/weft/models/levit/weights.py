"""LeViT weights of other libraries: the released code and timm (linear or convolutional), transformers.

All but timm have one flat list of layers; `placed` assigns them to stages and blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from weft.models.layout import Layout, State

_IN_STAGES = r"^stages\..*\.weight$"


def placed(state: State, layers: Iterable[tuple[str, str]]) -> State:
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


def numbered(state: State, pattern: str) -> list[tuple[int, ...]]:
    """The numbers that a pattern finds in the names, each once, in order."""
    matches = (re.match(pattern, name) for name in state)
    return sorted({tuple(int(number) for number in match.groups()) for match in matches if match})


def _place_released(state: State) -> State:
    def layer(i: int) -> tuple[str, str]:
        if f"blocks.{i}.kv.c.weight" in state:
            return f"blocks.{i}", "shrink"
        return f"blocks.{i}.m", "attn" if f"blocks.{i}.m.qkv.c.weight" in state else "mlp"

    return placed(state, [layer(i) for (i,) in numbered(state, r"blocks\.(\d+)\.")])


def _place_transformers(state: State) -> State:
    state = {name.removeprefix("levit."): tensor for name, tensor in state.items()}

    def layer(stage: int, i: int) -> tuple[str, str]:
        prefix = f"encoder.stages.{stage}.layers.{i}"
        if f"{prefix}.keys_values.linear.weight" in state:
            return prefix, "shrink"
        is_attn = f"{prefix}.module.queries_keys_values.linear.weight" in state
        return f"{prefix}.module", "attn" if is_attn else "mlp"

    return placed(state, [layer(*pair) for pair in numbered(state, r"encoder\.stages\.(\d+)\.layers\.(\d+)\.")])


def _hard_swish(state: State) -> dict[str, Any]:
    return dict(act_layer="hard_swish", attn_act_layer="hard_swish")


RELEASED = Layout(
    name="the released LeViT",
    signature=r"blocks\.0\.m\.qkv\.c\.weight",
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
    hidden=("act_layer", "attn_act_layer"),
)

TIMM = Layout(
    name="timm's LeViT",
    signature=r"stages\.0\.blocks\.0\.attn\.qkv\.linear\.weight",
    drop=r"\.attention_bias_idxs$",
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
    hidden=("act_layer", "attn_act_layer"),
)

LAYOUTS = (RELEASED, TIMM, TRANSFORMERS)
