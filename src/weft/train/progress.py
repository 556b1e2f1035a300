"""Progress on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from weft.text import one_line
from weft.train.loop import Meter
from weft.train.rundir import EpochRow

SILENCE_S = 60  # where there is no bar, as in a log, something is said at least this often


class _TimeLeft(ProgressColumn):
    """Time left of the whole run, at the speed so far."""

    def render(self, task: Task) -> Text:
        return Text(clock(task.time_remaining) + " left", style="cyan")


def say(text: str) -> None:
    """One note for the person."""
    _stderr().print(one_line(text), markup=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


@contextlib.contextmanager
def counting(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; gives the function that moves it by a number of images."""
    with _image_bar(quiet) as bar:
        task = bar.add_task("evaluating", total=total)
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def looking(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; gives the function that sets it to (images looked at, of how many)."""
    with _image_bar(quiet) as bar:
        task = bar.add_task("looking through", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _image_bar(quiet: bool) -> Progress:
    console = _stderr()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("images"))
    disable = quiet or not console.is_terminal
    return Progress(*columns, _TimeLeft(), console=console, transient=True, disable=disable)


class Reporter:
    """Tells how a run goes.

    Args:
        epochs: of the whole run.
        quiet: say nothing.
        console: where to; stderr unless told.
    """

    def __init__(self, epochs: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.epochs, self.quiet = epochs, quiet
        self.console = console or _stderr()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            _TimeLeft(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, state="")
        self._said = time.monotonic()

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._said = time.monotonic()
        if not self.quiet:
            self.console.print(one_line(text), markup=False)

    def step(self, epoch: int, meter: Meter) -> None:
        """After every step."""
        state = f"loss {meter.loss:.3f}  top-1 {meter.top1:.1f} %  {meter.images_per_second:,.0f} images/s"
        self._bar.update(
            self._task,
            description=f"epoch {epoch}/{self.epochs}",
            total=self.epochs * meter.steps,
            completed=(epoch - 1) * meter.steps + meter.step,
            state=state,
        )
        if not self.console.is_terminal and time.monotonic() - self._said > SILENCE_S:
            self.note(f"epoch {epoch}/{self.epochs}  step {meter.step}/{meter.steps}  {state}")

    def epoch(self, row: EpochRow, is_best: bool) -> None:
        """After every epoch."""
        self.note(
            f"epoch {row.epoch:>{len(str(self.epochs))}}/{self.epochs}  loss {row.train_loss:.3f}"
            f"  training top-1 {row.train_top1:5.1f} %  held out {row.val_top1:6.2f} %"
            f"  {row.images_per_second:,.0f} images/s{'  (best)' if is_best else ''}"
        )


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss, or m:ss where that is enough."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
