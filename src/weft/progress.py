"""Notes and progress: a bar on a terminal, an output of the cell in a notebook, elsewhere lines at intervals."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from weft.errors import is_installed
from weft.report import notebook
from weft.text import one_line

LINE_SECONDS = 10.0  # without a terminal, print a line at least this often
TICK_SECONDS = 1.0
Clock = Callable[[], float]
P = ParamSpec("P")
R = TypeVar("R")
_shown: list[Console] = []  # console of the bar on display
_quiet = contextvars.ContextVar("quiet", default=False)


class Work:
    """Progress of a task that takes a while: a bar on a terminal or in a notebook, else a line at intervals.

    Bar and lines state the elapsed time, and, where the total is known, the time left and the rate. Lines also come
    within a long step. A task that ends within the first interval prints none; in a notebook, one that ends within
    `notebook.UPDATE_SECONDS` shows no bar.

    Args:
        name: what is done, such as "evaluating".
        total: number of units; None while it is unknown.
        unit: plural noun of the units; empty for a task that has no units to show.
        line_seconds: where nothing is shown in place, print a line at least this often; `LINE_SECONDS` by default.
        console: output; stderr by default.
        now: clock in seconds.
    """

    def __init__(
        self,
        name: str,
        total: float | None = None,
        *,
        unit: str = "images",
        line_seconds: float | None = None,
        console: Console | None = None,
        now: Clock = time.monotonic,
    ) -> None:
        self.name, self.total, self.unit, self.quiet, self.now = name, total, unit, is_quiet(), now
        self.line_seconds = LINE_SECONDS if line_seconds is None else line_seconds
        self.console = console or stderr_console()
        self.done = self._done_at_start = 0.0
        self._began = self._printed_at = now()
        self._whole = name, self._began
        is_in_cell = console is None and not self.quiet and not _shown and notebook.in_notebook()
        self._output = notebook.LiveOutput() if is_in_cell else None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[work].state}", style="cyan", markup=False),
            console=self.console,
            transient=True,
            disable=self.quiet or not self.console.is_terminal or bool(_shown),  # one bar at a time
        )
        self._task = self._bar.add_task(one_line(name), total=total, work=self)
        self._has_lines = not self.quiet and not self.console.is_terminal
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._ticker = threading.Thread(target=self._tick, daemon=True) if self._has_lines or self._output else None

    def __enter__(self) -> Self:
        self._bar.start()
        if self._is_on_display:
            _shown.append(self.console)
        if self._ticker is not None:
            self._ticker.start()
        return self

    @property
    def _is_on_display(self) -> bool:
        return not self._bar.disable or self._output is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        self._bar.stop()
        if self._is_on_display:
            _shown.remove(self.console)
        if self._output is not None and self._output.is_shown:
            name, began = self._whole
            text = self.text(is_end=True) if self.name == name else f"{clock(self.now() - began)} elapsed"
            self._output.show(one_line(f"{name}: {text}"))

    def advance(self, count: float = 1) -> None:
        """Add finished units."""
        self.update(self.done + count)

    def update(self, done: float, total: float | None = None, *, name: str | None = None) -> None:
        """Set the number of finished units, and the total and the name if they have changed."""
        self.done, self.total, self.name = done, total or self.total, name or self.name
        self._bar.update(self._task, description=one_line(self.name), completed=done, total=self.total)
        self.tick()

    def begin(self, name: str, total: float | None = None) -> None:
        """Begin the next part of the task: its units and its time count from 0."""
        self.name, self.total, self.done, self._done_at_start, self._began = name, total, 0.0, 0.0, self.now()
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(one_line(name), total=total, work=self)

    def begin_at(self, done: float) -> None:
        """Set the number of units that an earlier process has finished; they do not count for the rate."""
        self._done_at_start = done
        self.update(done)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Print a line if one is due."""
        if not self._has_lines and self._output is None:
            return
        with self._lock:  # of the ticker and the task
            if self.now() - self._printed_at < (self.line_seconds if self._output is None else notebook.UPDATE_SECONDS):
                return
            self._printed_at = self.now()
            text = one_line(f"{self.name}: {self.text()}")
            if self._output is None:
                self.console.print(text, markup=False)
            else:
                self._output.show(text, self.done, self.total)

    @property
    def state(self) -> str:
        """The current text."""
        return self.text()

    def text(self, *, is_end: bool = False) -> str:
        """Return the state: units, elapsed time, time left and rate, as far as they are known."""
        elapsed, gained = self.now() - self._began, self.done - self._done_at_start
        parts = []
        if self.unit and (self.total or self.done):
            of = f" of {self.total:,.0f}" if self.total else ""
            parts.append(f"{self.done:,.0f}{of} {self.unit}")
        parts.append(f"{clock(elapsed)} elapsed")
        if gained > 0 and elapsed > 0:
            if self.total and not is_end:
                parts.append(f"{clock(max(self.total - self.done, 0) * elapsed / gained)} left")
            if self.unit:
                parts.append(rate(gained / elapsed, self.unit))
        return ", ".join(parts)


def say(text: str, *, always: bool = False) -> None:
    """Print one line to stderr, above a bar that is on display; in a notebook, show it below.

    Args:
        text: a note.
        always: print it also within `quietly`, as what ends the program.
    """
    if not is_first_process() or (_quiet.get() and not always):
        return
    if notebook.in_notebook():
        notebook.LiveOutput().show(one_line(text))
        return
    (_shown[-1] if _shown else stderr_console()).print(one_line(text), markup=False)


@contextlib.contextmanager
def quietly(is_quiet: bool = True) -> Iterator[None]:
    """Print no notes and show no progress within, also in threads that run in a copy of the context.

    Args:
        is_quiet: whether to be quiet; False changes nothing, so what is quiet outside stays quiet.
    """
    token = _quiet.set(is_quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(token)


def obeys_quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Let the keyword argument `quiet` of a public function hold for all that the function calls."""

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with quietly(bool(kwargs.get("quiet"))):
            return function(*args, **kwargs)

    return inner


def is_quiet() -> bool:
    """Return whether `quietly` is in effect, or another process speaks: of several, only the first does."""
    return _quiet.get() or not is_first_process()


def is_first_process() -> bool:
    """Return whether this is the first of the processes that torchrun started: the only one that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def stderr_console() -> Console:
    """Return a console on stderr that prints text as it is."""
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Say that PyTorch is imported, which takes seconds: on a terminal while it lasts, elsewhere as one line.

    Nothing is shown if it has been imported or is not installed.
    """
    if "torch" in sys.modules or not is_installed("torch"):
        yield
        return
    with Work("loading PyTorch", unit="") as work:
        if not (work.quiet or work.console.is_terminal):
            say("Loading PyTorch.")
        yield


def rate(per_second: float, unit: str) -> str:
    """Format a rate; a slow one in units per minute, so that it is never 0."""
    if per_second >= 10:
        return f"{per_second:,.0f} {unit}/s"
    return f"{per_second:.1f} {unit}/s" if per_second >= 0.1 else f"{60 * per_second:.2g} {unit}/min"


def clock(seconds: float | None) -> str:
    """Format seconds as m:ss, or h:mm:ss from one hour."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
