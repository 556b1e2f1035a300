"""MLP and drop path, under the names of parameters that timm has.

They are here so that running a network imports neither timm nor torchvision, which takes longer than torch.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linear layers with an activation between them.

    Args:
        dim: channels of a token.
        hidden_dim: channels between the linear layers.
        act_layer: class of the activation.
        drop: dropout behind each linear layer, in [0, 1).
    """

    def __init__(self, dim: int, hidden_dim: int, act_layer: type[nn.Module] = nn.GELU, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, drop a residual branch for a random part of the images.

    Args:
        drop_prob: probability that the branch of an image is dropped, in [0, 1); the others are scaled by its inverse.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(len(x), *(1 for _ in x.shape[1:])).bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}"
