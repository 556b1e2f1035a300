"""Stop a run between two steps on a signal, at a time limit or after an epoch."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn

from weft.errors import StoppedError
from weft.progress import say

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # Windows has no SIGHUP, and only Windows has SIGBREAK (Ctrl-Break)
STOPPING = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Stop:
    """Requests to end a run between two steps: Ctrl-C, SIGTERM, SIGHUP (a closed terminal), a time limit. On Windows
    Ctrl-Break counts as SIGTERM, which no program can send there.

    After the first signal the run stops at the end of the step in progress. A second signal has its default effect
    immediately, unless it is an echo of the first: launchers such as torchrun and `timeout` also signal a process that
    has already received the signal to its group. Signals that the process ignores, as under nohup, stay ignored.
    Outside the main thread, where Python allows no handlers, no signal is caught. With several processes, one request
    stops all.

    Args:
        max_seconds: time limit in seconds; None for no limit.
        after_epochs: stop at the end of this epoch, counted from 1; None for no limit.
    """

    TIME, SIGHUP, SIGTERM, SIGINT, EPOCHS = 1, 2, 3, 4, 5
    SIGBREAK = SIGTERM
    REASONS: ClassVar = {
        TIME: "the time limit is reached",
        SIGHUP: "SIGHUP",
        SIGTERM: "SIGTERM",
        SIGINT: "Ctrl-C",
        EPOCHS: "the requested number of epochs is reached",
    }
    CODES: ClassVar = {SIGHUP: 129, SIGTERM: 143}  # exit codes, by the convention of shells
    ECHO_SECONDS: ClassVar = 10.0  # a handler first waits for the C++ code that is running

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
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore_handlers()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._at = signal.Signals(number), time.monotonic()
            if number == getattr(signal, "SIGHUP", None):
                self._discard_terminal_output()
        elif not self._is_echo(number):
            self._restore_handlers()
            signal.raise_signal(number)

    def _is_echo(self, number: int) -> bool:
        # a second SIGINT in a single process is a user pressing Ctrl-C again, not a launcher
        is_repeated = number != signal.SIGINT or int(os.environ.get("WORLD_SIZE", "1")) > 1
        return is_repeated and time.monotonic() - self._at < self.ECHO_SECONDS

    def _discard_terminal_output(self) -> None:
        """Redirect output to the null device: writing to a closed terminal would fail before the state is saved."""
        for number in self._terminals:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def reason(self) -> int:
        """Reason to stop now, a key of `REASONS`, or 0. Over several processes, the largest one counts."""
        if self.requested is not None:
            return getattr(self, self.requested.name)
        return self.TIME if self.deadline is not None and time.monotonic() > self.deadline else 0

    @staticmethod
    def end(reason: int, message: str) -> NoReturn:
        """Raise the exception of a reason: KeyboardInterrupt, SystemExit for another signal, else StoppedError."""
        if reason == Stop.SIGINT:
            raise KeyboardInterrupt(message)
        if reason in Stop.CODES:
            say(message, always=True)  # the command line prints the messages of other exceptions, not of SystemExit
            raise SystemExit(Stop.CODES[reason])
        raise StoppedError(message)
