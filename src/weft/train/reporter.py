"""Progress of a training run: on stderr, or in an output of a notebook."""

from __future__ import annotations

import math
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from weft import markup, notebook
from weft.progress import TimeLeft, Work, rate, stderr_console
from weft.runs.directory import EpochRow
from weft.text import one_line
from weft.train.loop import Meter

SILENCE_S = 60  # without a progress bar, as in a log file, print a line at least this often
MAX_ROWS, MAX_NOTES = 12, 20  # epochs in the table of a notebook, lines above it
HEADER = ("epoch", "training loss", "training top-1 %", "held-out top-1 %", "images/s", "")


class Reporter:
    """Show the progress of a training run: a bar on a terminal, a table of epochs in a notebook, lines elsewhere.

    Args:
        epochs: number of epochs of the run.
        quiet: print nothing.
        console: output; stderr by default.
    """

    def __init__(self, epochs: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.epochs, self.quiet = epochs, quiet
        self.console = console or stderr_console()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeLeft(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, state="")
        self._printed_at = time.monotonic()
        self._cell = _Cell() if console is None and not quiet and notebook.in_notebook() else None

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
        if self._cell is not None:
            self._cell.end()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._printed_at = time.monotonic()
        if self._cell is not None:
            self._cell.note(one_line(text))
        elif not self.quiet:
            self.console.print(one_line(text), markup=False)

    def step(self, epoch: int, meter: Meter) -> None:
        """Update after a step."""
        if self._cell is not None:
            self._cell.step(epoch, self.epochs, meter)
            return
        state = f"loss {meter.loss:.3f}  top-1 {meter.top1:.1f} %{_speed(meter.images_per_second)}"
        self._bar.update(
            self._task,
            description=f"epoch {epoch}/{self.epochs}",
            total=self.epochs * meter.steps,
            completed=(epoch - 1) * meter.steps + meter.step,
            state=state,
        )
        if not self.console.is_terminal and time.monotonic() - self._printed_at > SILENCE_S:
            self.note(f"epoch {epoch}/{self.epochs}  step {meter.step}/{meter.steps}  {state}")

    def epoch(self, row: EpochRow, is_best: bool) -> None:
        """Print the results of an epoch, or of the evaluation before the first."""
        if self._cell is not None:
            self._cell.epoch(row, is_best)
            return
        if row.epoch == 0:
            self.note(f"before training: held out {row.val_top1:.2f} %")
            return
        self.note(
            f"epoch {row.epoch:>{len(str(self.epochs))}}/{self.epochs}  loss {row.train_loss:.3f}"
            f"  training top-1 {row.train_top1:5.1f} %"
            + ("" if math.isnan(row.val_top1) else f"  held out {row.val_top1:6.2f} %")
            + (f", balanced {row.val_balanced:.2f} %" if abs(row.val_balanced - row.val_top1) > 1e-6 else "")
            + f"{_speed(row.images_per_second)}{'  (best)' if is_best else ''}"
        )


class _Cell:
    """Progress of a run in one output of a notebook: notes, the table of epochs, and a bar."""

    def __init__(self) -> None:
        self._output = notebook.LiveOutput()
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._rows: list[tuple[EpochRow, bool]] = []
        self._work: Work | None = None  # from the first step
        self._state, self._shown_at = "", time.monotonic()
        self._is_ended = False

    def note(self, text: str) -> None:
        """Add a line above the table."""
        self._notes.append(text)
        self._show()

    def step(self, epoch: int, epochs: int, meter: Meter) -> None:
        """Update the bar after a step."""
        done = (epoch - 1) * meter.steps + meter.step
        if self._work is None:
            self._work = Work("training", epochs * meter.steps, unit="steps", quiet=True)
            self._work.begin_at(done - 1)
        self._work.update(done)
        self._state = f"epoch {epoch}/{epochs}: loss {meter.loss:.3f}, top-1 {meter.top1:.1f} %"
        if time.monotonic() - self._shown_at >= notebook.UPDATE_SECONDS:
            self._show()

    def epoch(self, row: EpochRow, is_best: bool) -> None:
        """Add a row to the table."""
        if is_best:
            self._rows = [(other, False) for other, _ in self._rows]
        self._rows.append((row, is_best))
        self._show()

    def end(self) -> None:
        """Remove the bar."""
        self._is_ended = True
        self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        parts = [notebook.line(text) for text in self._notes]
        if self._rows:
            rows = [_cells(row, is_best) for row, is_best in self._first_rows() + self._rows[-MAX_ROWS:]]
            plain = "\n".join("  ".join(cell for cell in row if cell) for row in rows)
            parts.append((markup.fragment(markup.table(HEADER, rows)), plain))
        if self._work is not None:
            work = self._work
            state = f"training: {work.text(is_end=True)}" if self._is_ended else f"{self._state}; {work.text()}"
            parts.append(notebook.line(state) if self._is_ended else notebook.line(state, work.done, work.total))
        if parts:
            self._output.show("".join(html for html, _ in parts), "\n".join(text for _, text in parts))

    def _first_rows(self) -> list[tuple[EpochRow, bool]]:
        """Return the best epoch, if it is before the last ones."""
        return [(row, is_best) for row, is_best in self._rows[:-MAX_ROWS] if is_best]


def _cells(row: EpochRow, is_best: bool) -> tuple[str, ...]:
    """Return a row of the table of epochs."""
    if row.epoch == 0:
        return ("before training", "", "", f"{row.val_top1:.2f}", "", "best" if is_best else "")
    return (
        f"{row.epoch}",
        f"{row.train_loss:.3f}",
        f"{row.train_top1:.1f}",
        "" if math.isnan(row.val_top1) else f"{row.val_top1:.2f}",
        f"{row.images_per_second:,.0f}" if row.images_per_second >= 1 else "",
        "best" if is_best else "",
    )


def _speed(images_per_second: float) -> str:
    """Return the speed after two spaces; empty if no step was timed, as after a resume at the end of an epoch."""
    return f"  {rate(images_per_second, 'images')}" if images_per_second > 0 else ""
