"""Time single operations in several implementations, in alternating turns.

    python benchmarks/training/kernels.py --csv benchmarks/training/kernels.csv

Medians of the milliseconds forward and backward: attention by torch's fused kernel or by two matrix multiplications;
CeiT's stem with channels first or last; CvT's projection in float32 or bfloat16; QuickGELU in three forms; BatchNorm
and GELU of CeiT's feed-forward part, and the linear layer before them; the linear layer and BatchNorm of LeViT; AdamW
fused or by lists of tensors. Rows of this class of processor are replaced in the file, others stay.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

import weft
from weft.layers.activation import QuickGELU
from weft.machine.processor import processor_class

Way = tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]  # name, operation, inputs


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def attention(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> list[Way]:
    qkv = tuple(torch.randn(batch, heads, tokens, dim, dtype=dtype) for _ in range(3))
    return [("fused", F.scaled_dot_product_attention, qkv), ("plain", plain, qkv)]


def layouts(op: Callable[..., Tensor], image: Tensor, *weights: Tensor) -> list[Way]:
    last = image.to(memory_format=torch.channels_last)
    return [("channels first", op, (image, *weights)), ("channels last", op, (last, *weights))]


def norm_gelu(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    grid = tokens.permute(0, 3, 1, 2)  # channels last
    return F.gelu(F.batch_norm(grid, None, None, weight, bias, training=True))


def norm_gelu_by_parts(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance, mean = torch.var_mean(tokens, (0, 1, 2), correction=0)
    return F.gelu((tokens - mean) * (torch.rsqrt(variance + 1e-5) * weight) + bias)


def linear_norm(tokens: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = F.linear(tokens, matrix).flatten(0, 1)
    return F.batch_norm(rows, None, None, weight, bias, training=True)


def linear_norm_recomputed(tokens: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return checkpoint(linear_norm, tokens, matrix, weight, bias, use_reentrant=False)  # type: ignore[return-value]


def linear_norm_by_covariance(tokens: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The statistics of the outputs follow from those of the inputs, of which there are half as many."""
    rows = tokens.flatten(0, 1)
    mean = rows.mean(dim=0)
    covariance = rows.T @ rows / len(rows) - torch.outer(mean, mean)
    scaled = matrix * (weight * torch.rsqrt(((matrix @ covariance) * matrix).sum(dim=1) + 1e-5))[:, None]
    return F.linear(rows, scaled, bias - scaled @ mean)


def linear_norm_gelu(tokens: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return norm_gelu(F.linear(tokens, matrix), weight, bias)


def linear_norm_gelu_by_covariance(tokens: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The statistics of the outputs follow from those of the inputs, of which there are a quarter."""
    rows = tokens.flatten(0, 2)
    mean = rows.mean(dim=0)
    covariance = rows.T @ rows / len(rows) - torch.outer(mean, mean)
    scale = weight * torch.rsqrt(((matrix @ covariance) * matrix).sum(dim=1) + 1e-5)
    scaled = matrix * scale[:, None]
    return F.gelu(F.linear(tokens, scaled, bias - scaled @ mean))


def cases() -> Iterator[tuple[str, list[Way]]]:
    for dtype in (torch.float32, torch.bfloat16):
        dtype_name = str(dtype).removeprefix("torch.")
        yield f"attention of ceit_tiny_patch16_224, batch 16, {dtype_name}", attention(16, 3, 197, 64, dtype)
        yield f"attention of ceit_nano_32, batch 128, {dtype_name}", attention(128, 3, 65, 32, dtype)
    image = torch.randn(16, 3, 224, 224)
    yield (
        "first convolution of CeiT, batch 16",
        layouts(partial(F.conv2d, stride=2, padding=3), image, torch.randn(32, 3, 7, 7)),
    )
    grid = torch.randn(16, 32, 112, 112)
    yield "max-pool of CeiT's stem, batch 16", layouts(partial(F.max_pool2d, kernel_size=3, stride=2, padding=1), grid)
    strided = partial(F.conv2d, stride=2, padding=1, groups=64)
    tokens, kernel = torch.randn(16, 64, 56, 56).to(memory_format=torch.channels_last), torch.randn(64, 1, 3, 3)
    yield (
        "strided depthwise convolution of CvT, batch 16",
        [("float32", strided, (tokens, kernel)), ("bfloat16", strided, (tokens.bfloat16(), kernel.bfloat16()))],
    )
    width = 768
    norm = torch.rand(width) + 0.5, torch.randn(width)
    wide, narrow, matrix = torch.randn(16, 14, 14, width), torch.randn(16, 14, 14, 192), torch.randn(width, 192) / 14
    yield (
        "BatchNorm and GELU of CeiT's LeFF, batch 16",
        [
            ("PyTorch's kernels", norm_gelu, (wide, *norm)),
            ("compiled", torch.compile(norm_gelu_by_parts), (wide, *norm)),
            ("operation by operation", norm_gelu_by_parts, (wide, *norm)),
        ],
    )
    yield (
        "linear layer, BatchNorm and GELU of CeiT's LeFF, batch 16",
        [
            ("PyTorch's kernels", linear_norm_gelu, (narrow, matrix, *norm)),
            ("statistics from the covariance of the inputs", linear_norm_gelu_by_covariance, (narrow, matrix, *norm)),
        ],
    )
    inputs = torch.randn(16, 196, 256), torch.randn(512, 256) / 16, torch.rand(512) + 0.5, torch.randn(512)
    yield (
        "linear layer and BatchNorm of LeViT-256's MLP, batch 16",
        [
            ("PyTorch's kernels", linear_norm, inputs),
            ("recomputed in the backward pass", linear_norm_recomputed, inputs),
            ("statistics from the covariance of the inputs", linear_norm_by_covariance, inputs),
        ],
    )
    hidden = torch.randn(16, 3136, 256)
    yield (
        "QuickGELU of CvT's first stage, batch 16",
        [
            ("x sigmoid(1.702 x)", lambda x: x * torch.sigmoid(1.702 * x), (hidden,)),
            ("silu(1.702 x) / 1.702", QuickGELU(), (hidden,)),
            ("silu, the factors in weights", F.silu, (hidden,)),
        ],
    )


def step(op: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass, with gradients of all inputs, also of images."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    begun = time.perf_counter()
    out = op(*leaves)
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    return middle - begun, time.perf_counter() - middle


def optimizers(name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of a step of AdamW for a network, by implementation."""
    times: dict[str, list[tuple[float, float]]] = {}
    ways = {}
    for way in ("fused", "foreach"):
        parameters = [nn.Parameter(value.detach().clone()) for value in weft.create_model(name).parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        ways[way], times[way] = torch.optim.AdamW(parameters, lr=1e-4, **{way: True}), []
    for _ in range(rounds + 3):
        for way, optimizer in ways.items():
            begun = time.perf_counter()
            optimizer.step()
            times[way].append((time.perf_counter() - begun, 0.0))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, ways in cases():
        times = results[name] = {way: [] for way, _, _ in ways}
        for _ in range(args.rounds + 3):
            for way, op, inputs in ways:
                times[way].append(step(op, inputs))
    for name in ("levit_256", "cvt_13", "ceit_tiny_patch16_224"):
        results[f"AdamW, {name}"] = optimizers(name, args.rounds)
    rows = []
    for name, times in results.items():
        for way, pairs in times.items():
            forward, backward = (1000 * statistics.median(column) for column in zip(*pairs[3:], strict=True))
            rows.append(
                {
                    "operation": name,
                    "way": way,
                    "forward_ms": f"{forward:.3g}",
                    "backward_ms": f"{backward:.3g}",
                    "rounds": args.rounds,
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                    "processor": processor_class(),
                }
            )
            print("  ".join(str(value) for value in list(rows[-1].values())[:4]), flush=True)
    if args.csv:
        replace_rows(args.csv, rows, ("processor",))


if __name__ == "__main__":
    main()
