"""CvT weights of other libraries: the released code, transformers and vit-pytorch."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from weft.models.base import activation_name
from weft.models.cvt.network import Block, CvT
from weft.models.layout import Layout, State

_VIT_HEAD_DIM = 64  # vit-pytorch's CvT has no other


def _split_kv(state: State) -> State:
    """vit-pytorch's one 1x1 convolution for keys and values: its first half makes the keys; norms are (1, c, 1, 1)."""
    result: State = {}
    for name, tensor in state.items():
        if name.endswith("to_kv.net.2.weight"):
            stem = name.removesuffix("to_kv.net.2.weight")
            result[f"{stem}k.weight"], result[f"{stem}v.weight"] = tensor.chunk(2)
        elif name.endswith((".g", ".b")):
            result[f"{name[:-1]}{'weight' if name.endswith('.g') else 'bias'}"] = tensor.flatten()
        else:
            result[name] = tensor
    return result


def _vit_switches(state: State) -> dict[str, Any]:
    stages = range(len({name.split(".")[1] for name in state if name.startswith("layers.")}))
    kernels = [state[f"layers.{s}.0.weight"].shape[-1] for s in stages]
    inner, dims = zip(*(state[f"layers.{s}.2.layers.0.0.to_q.net.2.weight"].shape[:2] for s in stages), strict=True)
    return dict(
        act_layer="gelu",
        scale_by="head_dim",
        num_heads=tuple(width // _VIT_HEAD_DIM for width in inner),
        # An inner width of its own: with `s3_heads=4`, once the default there, 4 heads of 64 for 384 channels.
        **({} if inner == dims else dict(head_dim=(_VIT_HEAD_DIM,) * len(dims))),
        embed_padding=tuple(kernel // 2 for kernel in kernels),
        global_pool="avg",
        final_norm=False,
        shared_kv=True,
        qkv_bias=False,
    )


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

VIT_PYTORCH = Layout(
    name="vit-pytorch's CvT",
    signature=r"layers\.0\.2\.layers\.0\.0\.to_kv\.net\.0\.weight",
    prepare=_split_kv,
    rename={
        "layers.{}.2.layers.{}.0.norm": "stages.{}.blocks.{}.norm1",
        "layers.{}.2.layers.{}.0": "stages.{}.blocks.{}.attn",
        "layers.{}.2.layers.{}.1.net.0": "stages.{}.blocks.{}.norm2",
        "layers.{}.2.layers.{}.1.net.1": "stages.{}.blocks.{}.mlp.fc1",
        "layers.{}.2.layers.{}.1.net.4": "stages.{}.blocks.{}.mlp.fc2",
        "layers.{}.0.weight": "stages.{}.patch_embed.proj.weight",
        "layers.{}.0.bias": "stages.{}.patch_embed.proj.bias",
        "layers.{}.1": "stages.{}.patch_embed.norm",
        "to_q.net.0": "conv_q.conv",
        "to_q.net.1": "conv_q.bn",
        "to_q.net.2": "q",
        "to_kv.net.0": "conv_k.conv",
        "to_kv.net.1": "conv_k.bn",
        "to_out.0": "proj",
        "to_logits.2": "head",
    },
    linear=r"\.(mlp\.fc[12]|attn\.[qkv]|attn\.proj)\.weight$",
    asks=_vit_switches,
)

LAYOUTS = (RELEASED, TRANSFORMERS, VIT_PYTORCH)


def built_values(model: CvT) -> dict[str, Any]:
    """The switches of a CvT that its state dict does not show."""
    firsts = [cast("Block", cast("nn.ModuleList", stage.blocks)[0]) for stage in model.stages]
    switches: dict[str, Any] = dict(
        act_layer=activation_name(cast("nn.Module", firsts[-1].mlp.act)),
        num_heads=tuple(block.attn.num_heads for block in firsts),
        head_dim=tuple(cast("nn.Linear", block.attn.q).out_features // block.attn.num_heads for block in firsts),
        embed_padding=tuple(cast("Any", stage.patch_embed).proj.padding[0] for stage in model.stages),
    )
    for dim, width, block in zip(model.embed_dim, switches["head_dim"], firsts, strict=True):
        if width != dim:  # with one head of the whole width both scales are the same
            switches["scale_by"] = "embed_dim" if block.attn.scale == dim**-0.5 else "head_dim"
    return switches
