"""Activations by their names in timm; QuickGELU, and an MLP that needs no extra time for it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import unknown
from weft.layers.mlp import Mlp
from weft.layers.norm import with_weights

QUICK = 1.702


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), as silu(1.702 x) / 1.702: one fused kernel and two multiplications; the plain form takes
    three passes forward and five back, and keeps two tensors."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(QUICK * x) * (1 / QUICK)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "quick_gelu": QuickGELU,
    "hard_swish": nn.Hardswish,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


def activation(name: str) -> type[nn.Module]:
    """Return the class of an activation, by its name in timm."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


class QuickMlp(Mlp):
    """MLP with QuickGELU, whose two factors are multiplied into the weights around it instead of the map.

    Args:
        dim: channels of a token.
        hidden_dim: channels between the linear layers.
        drop: dropout behind each, in [0, 1).
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float) -> None:
        super().__init__(dim, hidden_dim, act_layer=QuickGELU, drop=drop)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        bias = None if self.fc1.bias is None else self.fc1.bias * QUICK
        hidden = F.silu(F.linear(x, self.fc1.weight * QUICK, bias))
        return self.drop2(F.linear(self.drop1(hidden), self.fc2.weight / QUICK, self.fc2.bias))


def fold_mlp(quick: QuickMlp) -> nn.Module:
    """Return a plain MLP with SiLU that has the factors in its weights."""
    mlp = Mlp(1, 1, act_layer=nn.SiLU)
    fc1, fc2 = quick.fc1, quick.fc2
    mlp.fc1 = with_weights(fc1, fc1.weight.double() * QUICK, None if fc1.bias is None else fc1.bias.double() * QUICK)
    mlp.fc2 = with_weights(fc2, fc2.weight.double() / QUICK, fc2.bias)
    return mlp


RULES = {QuickMlp: fold_mlp}
