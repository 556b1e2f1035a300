"""Devices, processes, number format, and signals that stop a run.

The only place that speaks to Hugging Face Accelerate, which finds the device, joins the processes that torchrun or
SLURM started, and wraps a model for several of them. The loader never goes to it: it would deal out the batches anew.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast, gather_object
from torch import Tensor, nn

from weft.errors import StoppedError, UsageError
from weft.memory import keep_memory
from weft.train.slurm import join_slurm

STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
PATIENCE = datetime.timedelta(minutes=30)  # of processes that wait for each other, as for the first one's evaluation


@dataclass(frozen=True)
class Runtime:
    """Where, with whom and in which number format a model runs.

    Attributes:
        accelerator: the engine.
        precision: 'fp32', or 'bf16' for autocast of matrix products and convolutions.
    """

    accelerator: Accelerator
    precision: str

    @classmethod
    def of(cls, device: str = "auto", precision: str = "fp32", *, deterministic: bool = False) -> Runtime:
        """Reads the options of the command line, and joins the other processes of a run that has several.

        Raises:
            UsageError: an unknown word, or `cuda` on a machine without one.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device must be auto, cpu or cuda; got {device!r}.")
        if precision not in ("fp32", "bf16"):
            raise UsageError(f"precision must be fp32 or bf16; got {precision!r}.")
        has_gpu = torch.cuda.is_available()
        if device == "cuda" and not has_gpu:
            raise UsageError("device cuda needs a GPU that this PyTorch can see; it sees none. Pass --device cpu.")
        on_cpu = device == "cpu" or not has_gpu
        join_slurm(num_gpus=0 if on_cpu else torch.cuda.device_count())
        if on_cpu:
            keep_memory()
        if deterministic and not on_cpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        return cls(_accelerator(on_cpu), precision)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.accelerator.is_main_process

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The number format as a context."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; copies from pinned memory do not wait."""
        return tensor.to(self.device, non_blocking=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it: with several processes, one that averages gradients."""
        if self.world == 1:
            return model
        # of depth-wise kernels, for which two layouts are one; true, harmless, and once per process
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        return self.accelerator.prepare_model(model)

    def without_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Gradients of a wrapped model stay in their process: for all parts of a step but the last."""
        return self.accelerator.no_sync(model)

    def sum(self, values: list[float]) -> list[float]:
        """Numbers added up over all processes."""
        if self.world == 1:
            return values
        device = self.device if self.device.type == "cuda" else "cpu"
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=device), "sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    def max(self, values: list[float]) -> list[float]:
        """The greatest of all processes, number by number."""
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """One object of every process, in their order."""
        return [value] if self.world == 1 else gather_object([value])

    def share_buffers(self, model: nn.Module) -> None:
        """Gives every process the buffers of the first: each has run BatchNorm over images of its own."""
        for buffer in model.buffers() if self.world > 1 else ():
            shared = broadcast(buffer)
            assert isinstance(shared, Tensor)
            buffer.copy_(shared)

    def wait(self) -> None:
        """Until every process has come here."""
        self.accelerator.wait_for_everyone()


def _accelerator(on_cpu: bool) -> Accelerator:
    # Accelerate keeps one state per Python process and refuses another device; a notebook may well ask for one
    if "WORLD_SIZE" not in os.environ and AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        cpu=on_cpu, step_scheduler_with_optimizer=False, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)]
    )


class Stop:
    """Requests to end a run between two steps: Ctrl-C, SIGTERM, SIGHUP (a closed terminal), a time limit.

    A first signal is noted, and the run stops after the step in progress. A later one acts at once, as if this class
    were
    not there, unless it is an echo of the first: launchers such as torchrun and `timeout` signal a process that the
    signal to its group has reached already. Signals that the process ignores, as under nohup, stay ignored. Outside the
    main thread, where Python allows no handlers, no signal is caught. With several processes, one request stops all.

    Args:
        max_seconds: length of the time limit; None for none.
        after_epochs: stop at the end of this epoch, counted from 1; None to continue.
    """

    TIME, SIGHUP, SIGTERM, SIGINT, EPOCHS = 1, 2, 3, 4, 5
    REASONS: ClassVar = {
        TIME: "the time limit is reached",
        SIGHUP: "SIGHUP",
        SIGTERM: "SIGTERM",
        SIGINT: "Ctrl-C",
        EPOCHS: "as many epochs as were asked for",
    }
    CODES: ClassVar = {SIGHUP: 129, SIGTERM: 143}  # exit codes, by the convention of shells
    ECHO_SECONDS: ClassVar = 2.0

    def __init__(self, max_seconds: float | None = None, after_epochs: int | None = None) -> None:
        self.after_epochs = after_epochs
        self.requested: signal.Signals | None = None
        self.deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._at = signal.Signals(number), time.monotonic()
            if number == getattr(signal, "SIGHUP", None):
                self._leave_terminal()
        elif not self._is_echo(number):
            self._give_back()
            signal.raise_signal(number)

    def _is_echo(self, number: int) -> bool:
        # a person presses Ctrl-C twice; only a launcher repeats it
        is_repeated = number != signal.SIGINT or int(os.environ.get("WORLD_SIZE", "1")) > 1
        return is_repeated and time.monotonic() - self._at < self.ECHO_SECONDS

    def _leave_terminal(self) -> None:
        """Send output elsewhere: to write to a terminal that is gone is an error, and there is a state to save."""
        for number in self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def reason(self) -> int:
        """Why to stop now: 0 for going on, else a key of `REASONS`; of several reasons the greatest counts."""
        if self.requested is not None:
            return getattr(self, self.requested.name)
        return self.TIME if self.deadline is not None and time.monotonic() > self.deadline else 0

    @staticmethod
    def leave(reason: int, message: str) -> NoReturn:
        """Raise what a reason means: KeyboardInterrupt, SystemExit for a signal, StoppedError at the time limit."""
        if reason == Stop.SIGINT:
            raise KeyboardInterrupt(message)
        if reason in Stop.CODES:
            raise SystemExit(Stop.CODES[reason])
        raise StoppedError(message)
