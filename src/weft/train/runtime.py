"""The machine under a run: device, number format, randomness, and how a person or a scheduler stops it."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError


@dataclass(frozen=True)
class Runtime:
    """Where and in which number format a model runs.

    Attributes:
        device: where.
        precision: 'fp32', or 'bf16' for autocast of matrix products and convolutions.
    """

    device: torch.device
    precision: str

    @classmethod
    def of(cls, device: str = "auto", precision: str = "fp32") -> Runtime:
        """Reads the options of the command line.

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
        return cls(torch.device("cuda" if has_gpu and device != "cpu" else "cpu"), precision)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The number format as a context."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; copies from pinned memory do not wait."""
        return tensor.to(self.device, non_blocking=True)


class StopSignals:
    """Turns the first Ctrl-C or SIGTERM into a request that a loop can meet between two steps.

    The second one acts at once, as if this were not here. Outside the main thread, where Python allows no handlers,
    nothing is caught.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raises what the signal means: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
        if self.requested is signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
