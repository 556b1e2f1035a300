"""What a person sees: a bar where there is a terminal, lines where there is a log, nothing where they asked for it."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from weft.progress import clock, quietly, say
from weft.runs.directory import EpochRow
from weft.train import reporter
from weft.train.meter import Meter
from weft.train.reporter import Reporter, epoch_line

METER = Meter(5, 10, 200, 300.0, 84, seconds=2.0, waiting=0.5, seen=2469)
ROW = EpochRow(2, 20, 1e-3, 1.25, 61.5, 0.9, 70.125, 99.0, 1234.5, 12.4, 8.0)


def reported(*, terminal: bool, quiet: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, soft_wrap=True, highlight=False)
    with quietly(quiet), Reporter(3, console=console) as progress:
        progress.step(2, METER)
        progress._bar.refresh()
        say("A note [with brackets].")
    return console.file.getvalue()


def test_the_line_of_an_epoch() -> None:
    assert epoch_line(ROW, 3, is_best=True) == (
        "epoch 2/3  loss 1.250  training top-1  61.5 %  held out  70.12 %  1,234 images/s  (best)"
    )
    assert epoch_line(ROW._replace(epoch=0), 3, is_best=True) == "before training: held out 70.12 %"


def test_an_epoch_without_evaluation_or_timed_step_states_neither() -> None:
    shown = ROW._replace(val_loss=math.nan, val_top1=math.nan, val_top5=math.nan)
    assert epoch_line(shown, 3, is_best=False) == "epoch 2/3  loss 1.250  training top-1  61.5 %  1,234 images/s"
    shown = ROW._replace(images_per_second=0.0)
    assert epoch_line(shown, 3, is_best=False) == "epoch 2/3  loss 1.250  training top-1  61.5 %  held out  70.12 %"
    assert epoch_line(ROW._replace(images_per_second=0.3), 3, is_best=False).endswith("70.12 %  0.3 images/s")


def test_a_terminal_gets_a_bar_as_well() -> None:
    shown = reported(terminal=True)
    assert "epoch 2/3  loss 1.500  top-1 42.0 %  1,234 images/s" in shown
    assert "15 of 30 steps" in shown
    assert " left" in shown
    assert "A note [with brackets]." in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal: bool) -> None:
    shown = reported(terminal=terminal, quiet=True)
    assert "epoch" not in shown
    assert "note" not in shown


def test_a_long_epoch_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(terminal=False) == ""
    monkeypatch.setattr(reporter, "SILENCE_S", -1)
    assert "epoch 2/3  loss 1.500  top-1 42.0 %  1,234 images/s: 15 of 30 steps" in reported(terminal=False)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (5.4, "0:05"), (61, "1:01"), (3725, "1:02:05")])
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text
