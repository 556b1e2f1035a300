"""Progress: a bar on a terminal, lines at intervals elsewhere, nothing where nothing is known."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import weft
from weft import progress
from weft.progress import Work, quietly, rate, say


class Time:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, soft_wrap=True, highlight=False)


def printed(out: Console) -> list[str]:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def test_a_log_gets_a_line_at_intervals():
    now, out = Time(), console()
    with Work("evaluating", 2000, console=out, now=now) as work:
        for _ in range(20):
            now.seconds += 1.5
            work.advance(50)
    assert printed(out) == [
        "evaluating: 350 of 2,000 images, 0:10 elapsed, 0:50 left, 33 images/s",
        "evaluating: 700 of 2,000 images, 0:21 elapsed, 0:39 left, 33 images/s",
    ]


def test_a_short_task_and_a_quiet_one_print_no_line():
    now, out = Time(), console()
    with Work("evaluating", 20, console=out, now=now) as work:
        now.seconds += 9
        work.advance(20)
    with quietly(), Work("evaluating", 20, console=out, now=now) as work:
        now.seconds += 900
        work.advance(20)
    assert printed(out) == []


def test_what_is_not_known_is_not_stated():
    """No rate of 0, no time left of a task without a total or without a finished unit."""
    now = Time()
    work = Work("reading", console=console(), now=now)
    now.seconds += 20
    assert work.text() == "0:20 elapsed"
    work.update(0, 100)
    assert work.text() == "0 of 100 images, 0:20 elapsed"
    work.update(1)
    assert work.text() == "1 of 100 images, 0:20 elapsed, 33:00 left, 3 images/min"
    assert Work("converting", unit="", console=console(), now=now).text() == "0:00 elapsed"


def test_the_parts_of_a_task_have_their_own_units_and_time():
    now = Time()
    work = Work("converting", console=console(), now=now)
    now.seconds += 20
    work.begin("checking", 10)
    now.seconds += 2
    work.advance(5)
    assert f"{work.name}: {work.text()}" == "checking: 5 of 10 images, 0:02 elapsed, 0:02 left, 2.5 images/s"
    work.begin("writing")
    assert work.text() == "0:00 elapsed"


def test_units_of_an_earlier_process_do_not_count_for_the_rate():
    now = Time()
    work = Work("training", 10, unit="epochs", console=console(), now=now)
    work.begin_at(6)
    now.seconds += 20
    work.update(8)
    assert work.text() == "8 of 10 epochs, 0:20 elapsed, 0:20 left, 0.1 epochs/s"


@pytest.mark.parametrize(
    ("per_second", "text"), [(1234.5, "1,234 images/s"), (9.96, "10.0 images/s"), (0.05, "3 images/min")]
)
def test_a_rate_is_never_nought(per_second, text):
    assert rate(per_second, "images") == text
    assert re.search("[1-9]", rate(per_second / 50, "images"))


def test_a_terminal_gets_a_bar_and_notes_above_it(monkeypatch):
    out = console(terminal=True)
    monkeypatch.setattr(progress, "stderr_console", lambda: out)
    with Work("evaluating", 40) as work:
        work.advance(10)
        say("A note [with brackets].")
        with Work("reading") as inner:  # one bar at a time
            inner.update(7, 70)
    assert progress._shown == []
    shown = "\n".join(printed(out))
    assert "evaluating" in shown
    assert "10 of 40 images, 0:00 elapsed" in shown
    assert "A note [with brackets]." in shown
    assert "7 of 70" not in shown


def test_a_task_without_units_is_not_silent(monkeypatch, capsys):
    """The line comes from a thread, while the task itself is busy."""
    ticked = progress.threading.Event()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    tick = Work.tick
    monkeypatch.setattr(Work, "tick", lambda work: (tick(work), ticked.set()))
    with Work("converting"):
        assert ticked.wait(30)
    assert re.search(r"converting: 0:\d\d elapsed", capsys.readouterr().err)


def test_quiet_is_a_parameter_of_public_functions_that_obey_it():
    """No function passes it on: `say` and `Work` obey the context."""
    found = 0
    for file in Path(weft.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "quiet" in {one.arg for one in node.args.args}:
                raise AssertionError(f"{file} {node.name}: quiet must be a keyword")
            if isinstance(node, ast.FunctionDef) and "quiet" in {one.arg for one in node.args.kwonlyargs}:
                assert "obeys_quiet" in map(ast.unparse, node.decorator_list), (file, node.name)
                assert not node.name.startswith("_"), (file, node.name)
                found += 1
    assert found > 10
