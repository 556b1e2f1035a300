"""FSDP2: shard weights, gradients, optimizer state and averages over the processes.

torch's fully_shard gathers the weights of one block at a time while it computes. Accelerate would take another way on
machines without a GPU without saying so, so torch is asked here. One whole copy of the weights stays in every process:
it is what is evaluated and saved, and it is brought up to date only for that.
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
from weft.models.families import family_of
from weft.models.family import resolve
from weft.recipes import Recipe
from weft.train.runtime import Runtime

K = TypeVar("K", bound=Hashable)
OPTIMIZERS = ("adamw", "sgd")  # those that see one weight at a time, and so do not mind seeing a part of it


class Shards:
    """The spread twin of a model.

    Args:
        model: whole; the same in all processes.
        recipe: what is to be done with it.
        runtime: of at least two processes.
        is_averaged: keep an average of the weights, too.

    Attributes:
        network: what training calls and the optimiser moves.

    Raises:
        UsageError: the recipe asks for what parts of weights do not allow.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, runtime: Runtime, is_averaged: bool) -> None:
        if recipe.optim.opt not in OPTIMIZERS or recipe.optim.clip_mode == "agc" or recipe.compile:
            raise UsageError(
                "parallel=fsdp needs an optimiser and a clipping that see one weight at a time, and no compilation: "
                f"optim.opt {' or '.join(OPTIMIZERS)}, optim.clip_mode norm or value, compile=false; got "
                f"{recipe.optim.opt}, {recipe.optim.clip_mode} and {str(recipe.compile).lower()}. Or set parallel=ddp."
            )
        self.network = copy.deepcopy(model)
        self.mesh = init_device_mesh(runtime.device.type, (runtime.world,))
        family = family_of(model)
        units = tuple(resolve(unit) for unit in resolve(family.shard_units)) if family else ()
        for module in self.network.modules():
            if type(module).__name__ == "Block" or isinstance(module, units):  # the name in weft's and timm's networks
                fully_shard(module, mesh=self.mesh)
        fully_shard(self.network, mesh=self.mesh)
        self.average = {name: _part(value).clone() for name, value in self._state().items()} if is_averaged else {}

    def hold_gradients(self, hold: bool) -> None:
        """Whether the gradients of the next backward pass stay where they are, to be added up later."""
        cast(FSDPModule, self.network).set_requires_gradient_sync(not hold)

    def update_average(self, decay: float) -> None:
        """average * decay + weights * (1 - decay), each process its part; integers are copied."""
        for name, value in self._state().items():
            if value.is_floating_point():
                self.average[name].lerp_(_part(value), 1 - decay)
            else:
                self.average[name].copy_(_part(value))

    def gather(self, model: nn.Module, average: nn.Module | None) -> None:
        """Brings whole copies up to date. All processes must come here together."""
        now = self._state()
        _fill(model, _whole(now))
        if average is not None:
            parts = {name: _like(self.average[name], value) for name, value in now.items()}
            _fill(average, _whole(parts))

    def spread(self, model: nn.Module, average: nn.Module | None) -> None:
        """The other way: parts of whole copies."""
        whole = model.state_dict()
        averaged = average.state_dict() if average is not None else {}
        with torch.no_grad():
            for name, value in self._state().items():
                value.copy_(self.part_of(whole[name], value))
                if average is not None:
                    self.average[name].copy_(_part(self.part_of(averaged[name], value)))

    def part_of(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part of a tensor, cut as another is."""
        if not isinstance(like, DTensor) or whole.shape != like.shape:
            return whole  # a counter of steps, a buffer
        # src_data_rank None: every process cuts its own copy, and nothing is sent
        return distribute_tensor(whole.to(like.device), self.mesh, like.placements, src_data_rank=None)

    def _state(self) -> dict[str, Any]:
        return self.network.state_dict()


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with whole moments. All processes must come here together."""
    entries = sorted(state["state"].items())  # one that was read may stand in another order in another process
    whole = _whole({(number, name): value for number, entry in entries for name, value in sorted(entry.items())})
    moments = {number: {name: whole[number, name] for name in entry} for number, entry in entries}
    return state | {"state": moments}


def _fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, place in model.state_dict().items():
        place.copy_(values[name])


def _like(part: Tensor, value: Any) -> Any:
    if not isinstance(value, DTensor):
        return part
    return DTensor.from_local(
        part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _part(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _whole(values: dict[K, Any]) -> dict[K, Any]:
    """Tensors whole that are spread, in one exchange: one for each would cost a millisecond apiece on CPUs."""
    spread = {key: value for key, value in values.items() if isinstance(value, DTensor)}
    if not spread:
        return values
    world = next(iter(spread.values())).device_mesh.size()
    sizes = [[_size(value.shape, world, rank) for value in spread.values()] for rank in range(world)]
    mine = torch.cat([value.to_local().detach().flatten() for value in spread.values()])
    room = mine.new_empty(world, sum(sizes[0]))  # nobody has more than the first process
    dist.all_gather_into_tensor(room.view(-1), nn.functional.pad(mine, (0, room.shape[1] - len(mine))))
    parts = [line[: sum(size)].split(size) for line, size in zip(room, sizes, strict=True)]
    whole = {
        key: torch.cat(part).view(value.shape).to(value.dtype)
        for (key, value), part in zip(spread.items(), zip(*parts, strict=True), strict=True)
    }
    return values | whole


def _size(shape: Sequence[int], world: int, rank: int) -> int:
    """How many numbers of a tensor a process has: rows, as torch.chunk cuts them."""
    rows = -(-shape[0] // world)
    return max(0, min(rows, shape[0] - rank * rows)) * math.prod(shape[1:])
