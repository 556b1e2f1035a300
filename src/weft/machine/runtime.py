"""Device, processes and precision of a computation, by torch.distributed: torchrun starts the processes of a run."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from weft.errors import UsageError
from weft.machine.processor import default_threads, give_threads_to_torch, has_bf16

NO_CUDA = "device cuda needs a GPU that PyTorch can use; there is none. Pass --device cpu."
NO_MPS = (
    "device mps needs the GPU of a Mac with Apple silicon, and a PyTorch that can use it; there is none."
    " Pass --device cpu."
)
TIMEOUT = datetime.timedelta(minutes=30)  # for processes that wait for each other, as for an evaluation by the first


@dataclass(frozen=True)
class Runtime:
    """Device, processes and precision that a model runs with.

    Attributes:
        device: of this process.
        precision: 'fp32', or 'bf16' for autocast of matrix multiplications and convolutions.
        rank: index of this process, from 0.
        world: number of processes that compute together.
    """

    device: torch.device
    precision: str
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, device: str = "auto", precision: str = "fp32", *, deterministic: bool = False) -> Runtime:
        """Create the runtime for the options of the command line, and join the other processes of a run.

        Raises:
            UsageError: an unknown value, or `cuda` or `mps` on a machine without such a GPU.
        """
        if device not in ("auto", "cpu", "cuda", "mps"):
            raise UsageError(f"device must be auto, cpu, cuda or mps; got {device!r}.")
        if precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"precision must be auto, fp32 or bf16; got {precision!r}.")
        give_threads_to_torch()
        has_gpu = torch.cuda.is_available()
        if device == "cuda" and not has_gpu:
            raise UsageError(NO_CUDA)
        if device == "mps":
            _check_mps(precision)
        elif device == "auto":
            device = "cuda" if has_gpu else "cpu"
        if deterministic and device != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        joined = cls(torch.device(device), precision)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            own = _join(device)
            joined = cls(own, precision, distributed.get_rank(), distributed.get_world_size())
        if precision == "auto":
            joined = replace(joined, precision=joined.gather(fastest_precision(device))[0])  # that of the first process
        return joined

    def alone(self) -> Runtime:
        """Return a runtime of this process only, for work that may fail in one process only."""
        return replace(self, world=1)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that computes in `precision`."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device; asynchronous from pinned memory."""
        return tensor.to(self.device, non_blocking=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model for training; with several processes it averages their gradients."""
        if self.world == 1:
            return model
        # depth-wise kernels, whose two memory layouts are the same; harmless
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        on_gpu = self.device.type == "cuda"
        return DistributedDataParallel(model, device_ids=[self.device.index] if on_gpu else None)

    def without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a context without gradient averaging, for all micro-batches of a step except the last."""
        return getattr(model, "no_sync", contextlib.nullcontext)()  # also of a compiled one

    def sum(self, values: list[float]) -> list[float]:
        """Sum numbers over all processes."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Return the maximum of each number over all processes."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: list[float], operation: distributed.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return values
        result = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(result, operation)
        return result.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return one object from every process, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first process to all: each process has updated BatchNorm with images of its own."""
        for buffer in model.buffers() if self.world > 1 else ():
            distributed.broadcast(buffer, src=0)

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        if self.world > 1:
            distributed.barrier()


def fastest_precision(device: str) -> str:
    """Return the precision of `auto` on a type of device: bf16 if it has instructions for it, else fp32.

    `weft.train.timing.find_precision` times training steps in both.
    """
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device == "cpu" and has_bf16() else "fp32"


def _check_mps(precision: str) -> None:
    if not torch.backends.mps.is_available():
        raise UsageError(NO_MPS)
    if "WORLD_SIZE" in os.environ:
        raise UsageError("device mps runs in one process; torchrun started several. Start one, or use the CPU.")
    if precision == "bf16":
        raise UsageError("precision must be fp32 on device mps; got bf16. Pass --precision fp32.")


def _join(device: str) -> torch.device:
    """Join the processes that torchrun (or srun, with its variables) has started; return the device of this one."""
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(local)
    else:
        local = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, default_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
        if device == "cpu":
            atexit.register(_leave)
    return local


def _leave() -> None:
    # With threads of gloo Python may abort when it ends (pytorch/pytorch#190489). A group of NCCL is left as it is: its
    # processes leave together, which they cannot after an error of one.
    if distributed.is_initialized():
        distributed.destroy_process_group()
