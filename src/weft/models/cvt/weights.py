"""CvT weights of other libraries: the released code and transformers."""

from __future__ import annotations

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
    hidden=("act_layer", "scale_by"),
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
    hidden=("act_layer", "scale_by"),
)

LAYOUTS = (RELEASED, TRANSFORMERS)
