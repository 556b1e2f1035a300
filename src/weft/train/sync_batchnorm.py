"""Synchronized BatchNorm: statistics over the batches of all processes.

torch's SyncBatchNorm supports GPUs only; `CpuSyncBatchNorm` replaces it on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm


class _AllReduceSum(torch.autograd.Function):
    """Sum over all processes. The loss of every process depends on every summand, so the backward pass also sums."""

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
    total = _AllReduceSum.apply(value)
    assert isinstance(total, Tensor)
    return total


class CpuSyncBatchNorm(_BatchNorm):
    """BatchNorm over dimension 1 with mean and variance over all processes, whose batch sizes may differ.

    Forward and backward passes are exact: the sums are exchanged by a differentiable operation.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs an input of shape (b, c, ...); got {input.dim()} dimensions.")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        values = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = _sum(values.new_tensor(values.numel() // values.shape[1]))
        mean = _sum(values.sum(dims)) / count
        centered = values - mean.view(shape)
        variance = _sum(centered.square().sum(dims)) / count
        self._update_running_stats(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps) * (1 if self.weight is None else self.weight)
        result = centered * scale.view(shape)
        return (result if self.bias is None else result + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics; `variance` is unbiased, as in torch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm of a model by a synchronized one with the same parameters and names."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            setattr(model, name, _synchronized(child))
        else:
            sync_batchnorm(child, device)
    return model


def _synchronized(norm: Any) -> CpuSyncBatchNorm:
    """Return the synchronized form of a layer. It keeps the tensors, since an optimizer may refer to them."""
    layer = CpuSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    layer.weight, layer.bias = norm.weight, norm.bias
    layer.running_mean, layer.running_var = norm.running_mean, norm.running_var
    layer.num_batches_tracked = norm.num_batches_tracked
    return layer.train(norm.training)
