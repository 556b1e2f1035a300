"""BatchNorm next to a linear map, under timm's parameter names, and the rules that merge the two.

In evaluation BatchNorm is a factor and a term per channel, so it can be part of the weights before or behind it.
`RULES` say what folding puts in the place of each module (see weft.deploy.folding).
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Map = TypeVar("Map", nn.Linear, nn.Conv2d)


def absorb(linear: Map, norm: nn.Module) -> Map:
    """Return a linear layer or convolution with the BatchNorm behind it merged into its weights, always with a bias.

    If `norm` is Identity, `linear` itself is returned.
    """
    if isinstance(norm, nn.Identity):
        return linear
    factor, term = affine_of(norm)
    weight = linear.weight.double() * factor.reshape(-1, *[1] * (linear.weight.ndim - 1))
    bias = term if linear.bias is None else linear.bias.double() * factor + term
    return with_weights(linear, weight, bias)


def affine_of(norm: nn.Module) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Return the affine map of a BatchNorm in evaluation, as factor and term of each channel, in float64."""
    assert isinstance(norm, _BatchNorm), type(norm)
    assert norm.running_mean is not None, "no statistics to fold"
    assert norm.running_var is not None, "no statistics to fold"
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    term = -norm.running_mean.double() * factor
    return factor, term if norm.bias is None else term + norm.bias.double()


def with_weights(linear: Map, weight: Tensor, bias: Tensor | None) -> Map:
    """Return a copy with other weights, cast to its dtype."""
    other = copy.copy(linear)
    other._parameters = dict(linear._parameters)
    other.weight = nn.Parameter(weight.detach().to(linear.weight.dtype), requires_grad=False)
    cast_bias = None if bias is None else nn.Parameter(bias.detach().to(linear.weight.dtype), requires_grad=False)
    other.register_parameter("bias", cast_bias)
    return other


def scaled_rows(linear: nn.Linear, factor: Float[Tensor, " rows"]) -> nn.Linear:
    """Return a linear layer whose outputs are multiplied by `factor`."""
    factor = factor.double().to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.double() * factor
    return with_weights(linear, linear.weight.double() * factor[:, None], bias)


class ConvNorm(nn.Module):
    """Convolution without bias, then BatchNorm."""

    def __init__(self, in_chans: int, out_chans: int, kernel_size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.linear = nn.Conv2d(in_chans, out_chans, kernel_size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_chans)

    def forward(self, fmap: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        return self.bn(self.linear(fmap))


class LinearNorm(nn.Module):
    """Linear layer without bias, then BatchNorm over all tokens of the batch.

    Args:
        in_features: input channels.
        out_features: output channels.
        norm_scale: initial weight of BatchNorm; with 0, a residual branch is zero at initialization.
    """

    def __init__(self, in_features: int, out_features: int, norm_scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.bn = nn.BatchNorm1d(out_features)
        nn.init.constant_(self.bn.weight, norm_scale)

    def forward(self, tokens: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        tokens = self.linear(tokens)
        return self.bn(tokens.flatten(0, 1)).reshape_as(tokens)


class NormLinear(nn.Module):
    """BatchNorm, then a linear layer with bias: a head."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(in_features)
        self.linear = nn.Linear(in_features, out_features)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Float[Tensor, "b c"]) -> Float[Tensor, "b d"]:
        return self.linear(self.bn(features))


def fold_norm(module: ConvNorm | LinearNorm) -> nn.Module:
    """Return the convolution or linear layer with BatchNorm merged into it."""
    linear: Any = module.linear
    return absorb(linear, module.bn)


def fold_head(module: NormLinear) -> nn.Module:
    """Return the linear layer; here BatchNorm comes first, so its term goes through the weights."""
    factor, term = affine_of(module.bn)
    weight = module.linear.weight.double()
    return with_weights(module.linear, weight * factor, module.linear.bias.double() + weight @ term)


RULES = {ConvNorm: fold_norm, LinearNorm: fold_norm, NormLinear: fold_head}
