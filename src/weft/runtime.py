"""Device, processes and precision of a computation.

The only module that uses Hugging Face Accelerate, which selects the device, joins the processes that torchrun
started, and wraps a model for data-parallel training. The data loader is never passed to it: Accelerate would
distribute the batches in an order of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast, gather_object
from torch import Tensor, nn

from weft.capabilities import fastest_precision
from weft.devices import NO_CUDA, NO_MPS
from weft.errors import UsageError
from weft.memory import keep_memory
from weft.processor import give_threads_to_torch

TIMEOUT = datetime.timedelta(minutes=30)  # for processes that wait for each other, as for an evaluation by the first


@dataclass(frozen=True)
class Runtime:
    """Device, processes and precision that a model runs with.

    Attributes:
        accelerator: of Hugging Face Accelerate.
        precision: 'fp32', or 'bf16' for autocast of matrix multiplications and convolutions.
        is_alone: this process computes without the others (see `alone`).
        device: of this process.
    """

    accelerator: Accelerator
    precision: str
    is_alone: bool = False
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        # Accelerate's state is that of the process, and reset when a second model is loaded while the first computes
        object.__setattr__(self, "device", self.accelerator.device)

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
        on_cpu = device == "cpu" or (device != "mps" and not has_gpu)
        if on_cpu:
            keep_memory()
        if deterministic and not on_cpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        accelerator = _accelerator(on_cpu)
        if precision == "auto":
            here = fastest_precision(accelerator.device.type) if accelerator.is_main_process else ""
            precision = gather_object([here])[0]  # all processes use that of the first, which measured alone
        return cls(accelerator, precision)

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self.is_alone else self.accelerator.num_processes

    def alone(self) -> Runtime:
        """Return a runtime of this process only, for work that may fail in one process only."""
        return replace(self, is_alone=True)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.accelerator.is_main_process

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
        return self.accelerator.prepare_model(model)

    def without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a context without gradient averaging, for all micro-batches of a step except the last."""
        return self.accelerator.no_sync(model)

    def sum(self, values: list[float]) -> list[float]:
        """Sum numbers over all processes."""
        if self.world == 1:
            return values
        device = self.device if self.device.type == "cuda" else "cpu"
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=device), "sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    def max(self, values: list[float]) -> list[float]:
        """Return the maximum of each number over all processes."""
        if self.world == 1:
            return values
        device = self.device if self.device.type == "cuda" else "cpu"
        highest = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        return highest.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return one object from every process, in the order of ranks."""
        return [value] if self.world == 1 else gather_object([value])

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first process to all: each process has updated BatchNorm with images of its own."""
        for buffer in model.buffers() if self.world > 1 else ():
            shared = broadcast(buffer)
            assert isinstance(shared, Tensor)
            buffer.copy_(shared)

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        self.accelerator.wait_for_everyone()


def _check_mps(precision: str) -> None:
    if not torch.backends.mps.is_available():
        raise UsageError(NO_MPS)
    if "WORLD_SIZE" in os.environ:
        raise UsageError("device mps runs in one process; torchrun started several. Start one, or use the CPU.")
    if precision == "bf16":
        raise UsageError("precision must be fp32 on device mps; got bf16. Pass --precision fp32.")


def _accelerator(on_cpu: bool) -> Accelerator:
    # Accelerate keeps one state per Python process and refuses a second device; a notebook may use one
    if "WORLD_SIZE" not in os.environ and AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=on_cpu, step_scheduler_with_optimizer=False, kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)]
    )
    if on_cpu and accelerator.num_processes > 1:
        atexit.register(_leave)
    return accelerator


def _leave() -> None:
    # With threads of gloo Python may abort when it ends (pytorch/pytorch#190489). A group of NCCL is left as it is: its
    # processes leave together, which they cannot after an error of one.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
