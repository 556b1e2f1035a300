"""A small residual network for images of 32 pixels, which learns CIFAR-10 in a few epochs (the shape of ResNet-9)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SETTINGS = {  # for weft.train.train
    "augment.mix_prob": 0.0,
    "optim.opt": "sgd",
    "optim.lr": 0.1,
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-4,
    "schedule.warmup_epochs": 2,
}


def conv(inner: int, outer: int, pool: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution, max pooling, BatchNorm and ReLU."""
    layers = [nn.Conv2d(inner, outer, 3, 1, 1, bias=False), nn.MaxPool2d(pool), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers)


class Residual(nn.Sequential):
    """Two convolutions with a residual."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ResNet9(nn.Module):
    """Image (b 3 32 32) -> logits (b 10); seven convolutions of `dim` to 8 `dim` channels, then a linear layer."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(3, dim),
            conv(dim, 2 * dim, pool=2),
            Residual(conv(2 * dim, 2 * dim), conv(2 * dim, 2 * dim)),
            conv(2 * dim, 4 * dim, pool=2),
            conv(4 * dim, 8 * dim, pool=2),
            Residual(conv(8 * dim, 8 * dim), conv(8 * dim, 8 * dim)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image.contiguous(memory_format=torch.channels_last)))
