"""Synchronized BatchNorm: statistics over the batch of all processes.

On GPUs that is torch's SyncBatchNorm. It refuses CPUs, where this file's own takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm


class _Sum(torch.autograd.Function):
    """The sum over all processes. Every loss depends on every summand, so gradients add up, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def _sum(value: Tensor) -> Tensor:
    total = _Sum.apply(value)
    assert isinstance(total, Tensor)
    return total


class SharedBatchNorm(_BatchNorm):
    """BatchNorm over dimension 1, with mean and variance over all processes; each may bring another number of images.

    The sums are exchanged by an operation that has a gradient, so the backward pass is exact as well.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs (b, c, ...); got {input.dim()} dimensions.")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        values = input if input.dtype == torch.float64 else input.float()
        others = [place for place in range(input.dim()) if place != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = _sum(values.new_tensor(values.numel() // values.shape[1]))
        mean = _sum(values.sum(others)) / count
        centered = values - mean.view(shape)
        variance = _sum(centered.square().sum(others)) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps) * (1 if self.weight is None else self.weight)
        result = centered * scale.view(shape)
        return (result if self.bias is None else result + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics; the variance is the unbiased one, as in torch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def share_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Puts BatchNorm with shared statistics in the place of every other, with the same parameters and names."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            setattr(model, name, _shared(child))
        else:
            share_batchnorm(child, device)
    return model


def _shared(norm: Any) -> SharedBatchNorm:
    """The same layer, sharing. It takes over the very tensors, which an optimiser may hold already."""
    layer = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    layer.weight, layer.bias = norm.weight, norm.bias
    layer.running_mean, layer.running_var = norm.running_mean, norm.running_var
    layer.num_batches_tracked = norm.num_batches_tracked
    return layer.train(norm.training)
