"""Progress of a training run: a bar, or lines at intervals, and a line for each epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console

from weft.progress import Work, rate
from weft.runs.directory import EpochRow
from weft.text import count, first_few
from weft.train.loop import Meter

NAME = "training"
MOST_WAITING = 20  # percent of the training time, without a word
LESS_WAITING = (
    "Make them smaller once: weft data prepare DATA PACKED; then train on PACKED. Or give it more cores, and processes"
    " that read: --workers N."
)
LEAST_EPOCH_S, LEAST_RUN_S = 30, 120  # with a word; shorter ones need none
SILENCE_S = 60  # without a bar, as in a log file, print a line at least this often


class Reporter(Work):
    """Show the progress of a training run.

    Args:
        epochs: number of epochs of the run.
        console: output; stderr by default.
    """

    def __init__(self, epochs: int, *, console: Console | None = None) -> None:
        super().__init__(NAME, unit="steps", line_seconds=SILENCE_S, console=console)
        self.epochs = epochs

    def step(self, epoch: int, meter: Meter) -> None:
        """Update after a step."""
        done = (epoch - 1) * meter.steps + meter.step
        if not self.done:
            self.begin_at(done - 1)
        name = f"epoch {epoch}/{self.epochs}  loss {meter.loss:.3f}  top-1 {meter.top1:.1f} %"
        speed = _speed(meter.images_per_second) + _waiting(meter.waiting_percent, meter.seconds)
        self.update(done, self.epochs * meter.steps, name=name + speed)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.name = NAME  # the last line is on the whole run
        super().__exit__(kind, error, at)


def epoch_line(row: EpochRow, epochs: int, *, is_best: bool) -> str:
    """Return the results of an epoch as text, or those of the evaluation before the first."""
    if row.epoch == 0:
        return f"before training: held out {row.val_top1:.2f} %"
    return (
        f"epoch {row.epoch:>{len(str(epochs))}}/{epochs}  loss {row.train_loss:.3f}"
        f"  training top-1 {row.train_top1:5.1f} %"
        + ("" if math.isnan(row.val_top1) else f"  held out {row.val_top1:6.2f} %")
        + (f", balanced {row.val_balanced:.2f} %" if abs(row.val_balanced - row.val_top1) > 1e-6 else "")
        + _speed(row.images_per_second)
        + _waiting(row.data_wait, row.seconds)
        + ("  (best)" if is_best else "")
    )


def waiting_lines(history: Sequence[EpochRow]) -> list[str]:
    """Return advice for a run that waited long for its images; empty for another."""
    share = mean_waiting(history)
    if share <= MOST_WAITING or sum(row.seconds for row in history) < LEAST_RUN_S:
        return []
    return [f"Training waited {share:.0f} % of the time for images. {LESS_WAITING}"]


def damaged_lines(keys: Sequence[str]) -> list[str]:
    """Return a note on damaged training images, in place of which others were used; empty without any."""
    if not keys:
        return []
    images = count(len(keys), "training image is", "training images are")
    return [f"{images} damaged, and the next one of the class was used instead: {first_few(keys)}."]


def mean_waiting(history: Sequence[EpochRow]) -> float:
    """Return the percentage of its training time that an epoch waited for images, on average; 0 without epochs."""
    shares = [row.data_wait for row in history if row.epoch]
    return sum(shares) / max(len(shares), 1)


def _waiting(percent: float, seconds: float) -> str:
    """Return the percentage of waiting for images after a comma; empty if it is low, or the time short."""
    return f", waiting for images {percent:.0f} %" if percent > MOST_WAITING and seconds >= LEAST_EPOCH_S else ""


def _speed(images_per_second: float) -> str:
    """Return the speed after two spaces; empty if no step was timed, as after a resume at the end of an epoch."""
    return f"  {rate(images_per_second, 'images')}" if images_per_second > 0 else ""
