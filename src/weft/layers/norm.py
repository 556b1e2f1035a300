"""BatchNorm joined to the linear map next to it, under timm's parameter names."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


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
        in_features: channels that come.
        out_features: channels that leave.
        norm_scale: first value of BatchNorm's weight; 0 makes a residual branch start as nothing.
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
