"""What a person sees of a run: a bar where there is a terminal, lines where there is a log, nothing if quiet."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from weft.cli import main
from weft.progress import Work, clock, say
from weft.runs.directory import EpochRow
from weft.train import reporter
from weft.train.loop import Meter
from weft.train.reporter import Reporter, epoch_line, waiting_lines

METER = Meter(5, 10, 200, 300.0, 84, seconds=2.0, waiting=0.5, seen=2469)
ROW = EpochRow(2, 20, 1e-3, 1.25, 61.5, 0.9, 70.125, 99.0, 1234.5, 12.4, 8.0)
STEP = "epoch 2/3  loss 1.500  top-1 42.0 %  1,234 images/s"


def reported(*, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, soft_wrap=True, highlight=False)
    with Reporter(3, console=console) as progress:
        progress.step(2, METER)
        progress._bar.refresh()
        say("A note [with brackets].")
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "epoch 2/3  loss 1.250  training top-1  61.5 %  held out  70.12 %  1,234 images/s  (best)"),
        ({"epoch": 0}, "before training: held out 70.12 %"),
        ({"val_top1": math.nan}, "epoch 2/3  loss 1.250  training top-1  61.5 %  1,234 images/s  (best)"),
        (
            {"images_per_second": 0.0},  # no step was timed
            "epoch 2/3  loss 1.250  training top-1  61.5 %  held out  70.12 %  (best)",
        ),
        (
            {"seconds": 30.0, "data_wait": 44.6, "val_top1": math.nan},
            "epoch 2/3  loss 1.250  training top-1  61.5 %  1,234 images/s, waiting for images 45 %  (best)",
        ),
    ],
)
def test_the_line_of_an_epoch_states_what_is_known(changes: dict[str, float], expected: str) -> None:
    assert epoch_line(ROW._replace(**changes), 3, is_best=True) == expected


@pytest.mark.parametrize(
    ("wait", "seconds", "advised"), [(50.0, 40.0, True), (50.0, 39.0, False), (15.0, 900.0, False), (0.0, 0.0, False)]
)
def test_advice_for_a_run_that_waits_for_images(wait: float, seconds: float, advised: bool) -> None:
    history = [ROW._replace(epoch=epoch, data_wait=wait, seconds=seconds) for epoch in range(3)]
    lines = waiting_lines(history)
    assert len(lines) == advised
    if advised:
        assert lines[0].startswith("Training waited 50 % of the time for images. ")


def test_a_bar_has_notes_above_it_and_says_that_training_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = reported(terminal=True)
    assert all(text in shown for text in (STEP, "15 of 30 steps", " left", "A note [with brackets]."))
    assert "waiting" not in shown
    monkeypatch.setattr(reporter, "LEAST_EPOCH_S", METER.seconds)
    assert f"{STEP}, waiting for images 25 %" in reported(terminal=True)


def test_a_run_that_waited_says_so_at_its_end(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporter, "LEAST_RUN_S", 0)
    monkeypatch.setattr(reporter, "MOST_WAITING", -1)
    assert (
        main(["train", str(photos), "--model", "levit_nano_32", "--epochs", "1", "--out", str(tmp_path / "run")]) == 0
    )
    assert re.search(r"Training waited \d+ % of the time for images\. ", capsys.readouterr().out)
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert re.search(r"<dt>waiting for images</dt><dd>\d+ % of the training time</dd>", page)


def test_a_long_epoch_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(terminal=False) == ""
    monkeypatch.setattr(reporter, "SILENCE_S", -1)
    assert f"{STEP}: 15 of 30 steps" in reported(terminal=False)


@pytest.mark.parametrize("text", ["[red]no[/red] :bomb: [link=https://example.org]x[/link]", "[/]", "a\u202eb"])
def test_the_name_of_a_bar_is_not_interpreted(text: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, emoji=False, highlight=False)
    with Work(f"class {text}", console=console) as work:
        work._bar.refresh()
    assert "class " + text.replace("\u202e", "\\u202e") in console.file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (5.4, "0:05"), (61, "1:01"), (3725, "1:02:05")])
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text
