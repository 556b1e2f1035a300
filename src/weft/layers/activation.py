"""The one activation that timm writes in a way that costs twice what it need."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

QUICK = 1.702


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), as silu(1.702 x) / 1.702: one fused kernel and two products where the plain form takes
    three passes forward and five back, and keeps two tensors."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(QUICK * x) * (1 / QUICK)
