"""FSDP2: shard weights, gradients, optimizer state and weight average (EMA) over the processes.

torch's fully_shard gathers the weights of one block at a time during computation. It is called directly here, because
Accelerate silently uses another method on machines without a GPU. Every process also keeps one full copy of the
weights for evaluation and saving; it is updated only for these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.errors import UsageError
from weft.recipes import Recipe
from weft.runtime import Runtime

K = TypeVar("K", bound=Hashable)
OPTIMIZERS = ("adamw", "sgd")  # element-wise updates, which give the same result on a shard of a tensor


class ShardedModel:
    """A copy of a model whose weights are sharded over the processes.

    Args:
        model: the full model; equal in all processes.
        recipe: the training recipe.
        runtime: at least two processes.
        is_averaged: also keep a sharded weight average (EMA).

    Attributes:
        network: the sharded copy, which training runs and the optimizer updates.

    Raises:
        UsageError: the recipe has a setting that sharded weights do not support.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, runtime: Runtime, is_averaged: bool) -> None:
        if recipe.optim.opt not in OPTIMIZERS or recipe.optim.clip_mode == "agc" or recipe.compile:
            raise UsageError(
                f"parallel=fsdp supports optim.opt {' or '.join(OPTIMIZERS)}, optim.clip_mode norm or value, and"
                f" compile=false; got {recipe.optim.opt}, {recipe.optim.clip_mode} and {str(recipe.compile).lower()}."
                " Change these settings, or set parallel=ddp."
            )
        self.network = copy.deepcopy(model)
        self.mesh = init_device_mesh(runtime.device.type, (runtime.world,))
        for module in self.network.modules():
            if type(module).__name__ == "Block":  # the name in weft's and timm's networks
                fully_shard(module, mesh=self.mesh)
        fully_shard(self.network, mesh=self.mesh)
        self.average = {name: _local(value).clone() for name, value in self._state().items()} if is_averaged else {}

    def accumulate_gradients(self, accumulate: bool) -> None:
        """Set whether the next backward pass only accumulates gradients, without communication."""
        cast(FSDPModule, self.network).set_requires_gradient_sync(not accumulate)

    def update_average(self, decay: float) -> None:
        """Set average = average * decay + weights * (1 - decay), each process its shard; integers are copied."""
        for name, value in self._state().items():
            if value.is_floating_point():
                self.average[name].lerp_(_local(value), 1 - decay)
            else:
                self.average[name].copy_(_local(value))

    def gather(self, model: nn.Module, average: nn.Module | None) -> None:
        """Update full copies of weights and weight average. All processes must call this together."""
        state = self._state()
        _copy_into(model, _gather_full(state))
        if average is not None:
            shards = {name: _as_dtensor(self.average[name], value) for name, value in state.items()}
            _copy_into(average, _gather_full(shards))

    def scatter(self, model: nn.Module, average: nn.Module | None) -> None:
        """Set the shards of this process from full copies; the inverse of `gather`."""
        weights = model.state_dict()
        averaged = average.state_dict() if average is not None else {}
        with torch.no_grad():
            for name, value in self._state().items():
                value.copy_(self.shard_of(weights[name], value))
                if average is not None:
                    self.average[name].copy_(_local(self.shard_of(averaged[name], value)))

    def shard_of(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this process's shard of a full tensor, sharded like another tensor."""
        if not isinstance(like, DTensor) or full.shape != like.shape:
            return full  # e.g. a step counter or a buffer
        # src_data_rank None: every process shards its own copy, without communication
        return distribute_tensor(full.to(like.device), self.mesh, like.placements, src_data_rank=None)

    def _state(self) -> dict[str, Any]:
        return self.network.state_dict()


def gather_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer state with full moments. All processes must call this together."""
    entries = sorted(state["state"].items())  # a state that was loaded may have another order in another process
    full = _gather_full({(number, name): value for number, entry in entries for name, value in sorted(entry.items())})
    moments = {number: {name: full[number, name] for name in entry} for number, entry in entries}
    return state | {"state": moments}


def _copy_into(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, target in model.state_dict().items():
        target.copy_(values[name])


def _as_dtensor(local: Tensor, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _local(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _gather_full(values: dict[K, Any]) -> dict[K, Any]:
    """Gather all sharded tensors in one collective: one per tensor would cost about 1 ms each on CPUs."""
    sharded = {key: value for key, value in values.items() if isinstance(value, DTensor)}
    if not sharded:
        return values
    world = next(iter(sharded.values())).device_mesh.size()
    sizes = [[_shard_numel(value.shape, world, rank) for value in sharded.values()] for rank in range(world)]
    local = torch.cat([value.to_local().detach().flatten() for value in sharded.values()])
    buffer = local.new_empty(world, sum(sizes[0]))  # the first process has the largest shards
    dist.all_gather_into_tensor(buffer.view(-1), nn.functional.pad(local, (0, buffer.shape[1] - len(local))))
    shards = [row[: sum(size)].split(size) for row, size in zip(buffer, sizes, strict=True)]
    full = {
        key: torch.cat(parts).view(value.shape).to(value.dtype)
        for (key, value), parts in zip(sharded.items(), zip(*shards, strict=True), strict=True)
    }
    return values | full


def _shard_numel(shape: Sequence[int], world: int, rank: int) -> int:
    """Return the number of elements in the shard of a process: rows split as by torch.chunk."""
    rows = -(-shape[0] // world)
    return max(0, min(rows, shape[0] - rank * rows)) * math.prod(shape[1:])
