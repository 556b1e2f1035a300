"""The CvT of vit-pytorch (github.com/lucidrains/vit-pytorch), which articles print: the network for its weights.

Unlike the released CvT: keys and values share one depthwise convolution; heads of 64 channels at every width (four
of them for the 384 channels of the last stage in older versions); scores are scaled by that width; no bias in q, k, v;
an exact GELU; no class token, and no norm in front of the mean.
"""

from __future__ import annotations

from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from weft.layers.tokens import to_map
from weft.models.base import per_stage
from weft.models.cvt.attention import attention as attention
from weft.models.cvt.attention import cam_target as cam_target
from weft.models.cvt.network import Block, ConvAttention, CvT
from weft.models.layout import Layout, State

HEAD_DIM = 64


class SharedConvAttention(ConvAttention):
    """Attention whose keys and values share their depthwise convolution; arguments as those of `ConvAttention`."""

    def __init__(self, dim: int, num_heads: int, kernel_size: int, kv_stride: int, drop_rate: float) -> None:
        super().__init__(dim, num_heads, True, kernel_size, kv_stride, False, HEAD_DIM**-0.5, 0, drop_rate)
        del self.conv_v
        inner = num_heads * HEAD_DIM
        self.q, self.k, self.v = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.proj = nn.Linear(inner, dim)

    def project(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        fmap = to_map(tokens, grid)
        kv = cast("nn.Module", self.conv_k)(fmap)
        return cast("nn.Module", self.conv_q)(fmap), kv, kv


class VitPytorchCvT(CvT):
    """CvT of vit-pytorch. Arguments as those of `CvT`; each head has 64 channels."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: tuple[int, ...] = (64, 192, 384),
        depth: tuple[int, ...] = (1, 2, 10),
        num_heads: tuple[int, ...] = (1, 3, 6),
        mlp_ratio: float | tuple[float, ...] = 4.0,
        embed_kernel: tuple[int, ...] = (7, 3, 3),
        embed_stride: tuple[int, ...] = (4, 2, 2),
        proj_kernel: int | tuple[int, ...] = 3,
        kv_stride: int | tuple[int, ...] = 2,
        drop_rate: float = 0.0,
        drop_path_rate: float | tuple[float, ...] = 0.0,
    ) -> None:
        super().__init__(
            img_size, in_chans, num_classes, global_pool, embed_dim, depth, (1,) * len(embed_dim), mlp_ratio,
            embed_kernel, embed_stride, tuple(kernel // 2 for kernel in embed_kernel), proj_kernel=proj_kernel,
            kv_stride=kv_stride, act_layer="gelu", drop_rate=drop_rate, drop_path_rate=drop_path_rate,
        )  # fmt: skip
        rows = per_stage(len(embed_dim), dim=embed_dim, heads=num_heads, kernel=proj_kernel, stride=kv_stride)
        for stage, row in zip(self._stages(), rows, strict=True):
            for block in cast("list[Block]", list(stage.blocks)):
                block.attn = SharedConvAttention(row.dim, row.heads, row.kernel, row.stride, drop_rate)
        self.norm = nn.Identity()
        self._init_weights()


def _split_kv(state: State) -> State:
    """Theirs has one 1x1 convolution for keys and values: its first half makes the keys; norms are (1, c, 1, 1)."""
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


def _arguments(state: State) -> dict[str, Any]:
    """Strides are in no tensor."""
    stages = range(len({name.split(".")[1] for name in state if name.startswith("layers.")}))
    embeds = [state[f"layers.{s}.0.weight"].shape for s in stages]
    inner = [state[f"layers.{s}.2.layers.0.0.to_q.net.2.weight"].shape[0] for s in stages]
    hidden = [state[f"layers.{s}.2.layers.0.1.net.1.weight"].shape[0] for s in stages]
    return dict(
        embed_dim=tuple(shape[0] for shape in embeds),
        depth=tuple(len({n.split(".")[4] for n in state if n.startswith(f"layers.{s}.2.layers.")}) for s in stages),
        num_heads=tuple(width // HEAD_DIM for width in inner),
        mlp_ratio=tuple(width / shape[0] for width, shape in zip(hidden, embeds, strict=True)),
        embed_kernel=tuple(shape[-1] for shape in embeds),
        proj_kernel=tuple(state[f"layers.{s}.2.layers.0.0.to_q.net.0.weight"].shape[-1] for s in stages),
    )


LAYOUTS = (
    Layout(
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
        asks=_arguments,
    ),
)
