"""Time the parts of a block of DeiT-tiny and of LeViT-256: table 6 in the supplement of LeViT (arXiv 2104.01136).

    python benchmarks/speed/levit_block.py

As in the paper: one image of 14x14 tokens, one thread, and Hardswish in place of DeiT's GELU; LeViT's block is that of
the first stage, with BatchNorm merged. The parts of both blocks take turns. Writes levit_block.csv: median microseconds
here and in the paper (one core of a Xeon E5-2698). Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

from weft.machine.processor import processor_class

FILE = Path(__file__).with_name("levit_block.csv")
TOKENS, CALLS = 196, 20
PAPER: dict[str, tuple[int | None, int]] = {  # microseconds: DeiT-tiny, LeViT-256
    "LayerNorm": (49, None),
    "queries and keys": (299, 275),
    "values": (172, 275),
    "product of queries and keys": (228, 159),
    "product of attention and values": (161, 206),
    "projection": (175, 310),
    "MLP": (1390, 1140),
    "all": (2474, 2365),
}


def parts_of(
    dim: int, heads: int, key_dim: int, value_dim: int, hidden_dim: int, is_levit: bool
) -> dict[str, Callable]:
    """Return a function for each part of a block."""
    tokens = torch.randn(1, TOKENS, dim)
    norm = nn.LayerNorm(dim)
    qk, v = nn.Linear(dim, 2 * heads * key_dim), nn.Linear(dim, heads * value_dim)
    proj, bias = nn.Linear(heads * value_dim, dim), torch.randn(heads, TOKENS, TOKENS)
    mlp = nn.Sequential(nn.Linear(dim, hidden_dim), nn.Hardswish(), nn.Linear(hidden_dim, dim))
    queries, values = torch.randn(1, heads, TOKENS, key_dim), torch.randn(1, heads, TOKENS, value_dim)
    keys, joined = torch.randn(1, heads, key_dim, TOKENS), torch.randn(1, TOKENS, heads * value_dim)
    attention = torch.randn(1, heads, TOKENS, TOKENS).softmax(-1)

    def scores() -> Tensor:
        logits = queries @ keys
        return ((logits + bias) if is_levit else logits).softmax(-1)

    parts = {
        "queries and keys": lambda: qk(tokens),
        "values": lambda: v(tokens),
        "product of queries and keys": scores,
        "product of attention and values": lambda: (attention @ values).transpose(1, 2).reshape(joined.shape),
        "projection": lambda: proj(F.hardswish(joined) if is_levit else joined) + tokens,
        "MLP": lambda: mlp(tokens) + tokens,
    }
    return parts if is_levit else {"LayerNorm": lambda: norm(norm(tokens)), **parts}


def main() -> None:
    """Measure every part, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = {"DeiT-tiny": parts_of(192, 3, 64, 64, 768, False), "LeViT-256": parts_of(256, 4, 32, 64, 512, True)}
    times: dict[tuple[str, str], list[float]] = {(name, part): [] for name, parts in blocks.items() for part in parts}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for (name, part), values in times.items():
                begun = time.perf_counter()
                for _ in range(CALLS):
                    blocks[name][part]()
                if turn:  # the first round is a warm-up
                    values.append((time.perf_counter() - begun) / CALLS * 1e6)
    rows = []
    for column, name in enumerate(blocks):
        medians = {part: statistics.median(values) for (block, part), values in times.items() if block == name}
        medians["all"] = sum(medians.values())
        for part, value in medians.items():
            paper = PAPER[part][column]
            row = {
                "block": name,
                "part": part,
                "microseconds": f"{value:.0f}",
                "share": f"{value / medians['all']:.2f}",
            }
            share = "" if paper is None else f"{paper / PAPER['all'][column]:.2f}"
            rows.append({**row, "paper": paper, "paper_share": share, "processor_class": processor_class()})
            print(*rows[-1].values())
    write_csv(FILE, rows)


if __name__ == "__main__":
    main()
