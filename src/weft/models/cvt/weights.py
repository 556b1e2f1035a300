"""CvT weights of other libraries: the released code and transformers."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from weft.layers.activation import activation_name
from weft.models.cvt.network import Block, CvT
from weft.models.layout import Layout

RELEASED = Layout(
    name="the released CvT",
    signature=r"stage0\.patch_embed\.proj\.weight",
    rename={
        "stage{}": "stages.{}",
        **{f"attn.conv_proj_{x}": f"attn.conv_{x}" for x in "qkv"},
        **{f"attn.proj_{x}": f"attn.{x}" for x in "qkv"},
    },
    asks=lambda state: dict(act_layer="quick_gelu", scale_by="embed_dim"),
)

_WORDS = {"q": "query", "k": "key", "v": "value"}
_PROJECTION = "attention.attention.convolution_projection_{}.convolution_projection"

TRANSFORMERS = Layout(
    name="transformers' CvT",
    signature=r"(cvt\.)?encoder\.stages\.0\.embedding\.convolution_embeddings\.projection\.weight",
    rename={
        "cvt.encoder": "encoder",
        "encoder.stages.{}": "stages.{}",
        "embedding.convolution_embeddings.projection": "patch_embed.proj",
        "embedding.convolution_embeddings.normalization": "patch_embed.norm",
        "layers.{}": "blocks.{}",
        **{f"{_PROJECTION.format(word)}.convolution": f"attn.conv_{x}.conv" for x, word in _WORDS.items()},
        **{f"{_PROJECTION.format(word)}.normalization": f"attn.conv_{x}.bn" for x, word in _WORDS.items()},
        **{f"attention.attention.projection_{word}": f"attn.{x}" for x, word in _WORDS.items()},
        "attention.output.dense": "attn.proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "layernorm": "norm",
        "classifier": "head",
    },
    asks=lambda state: dict(act_layer="gelu", scale_by="embed_dim"),
)

LAYOUTS = (RELEASED, TRANSFORMERS)


def built_values(model: CvT) -> dict[str, Any]:
    """The switches of a CvT that its state dict does not show."""
    firsts = [cast("Block", cast("nn.ModuleList", stage.blocks)[0]) for stage in model.stages]
    switches: dict[str, Any] = dict(act_layer=activation_name(cast("nn.Module", firsts[-1].mlp.act)))
    for block in firsts:
        if block.attn.num_heads > 1:  # with one head both scales are the same
            dim = block.attn.proj.out_features
            switches["scale_by"] = "embed_dim" if block.attn.scale == dim**-0.5 else "head_dim"
    return switches
