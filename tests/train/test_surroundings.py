"""Surroundings that a run does not choose: other runs, temporary files, caches, a home, the clock, limits."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import weft
from tests import forked
from tests.train import tiny
from weft.cli import main
from weft.progress import Work, say
from weft.train import train
from weft.train.meter import Meter
from weft.train.reporter import Reporter

LEVIT = {"model": "levit_nano_32", **tiny.ARGUMENTS["levit_nano_32"]}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


@pytest.fixture(scope="session")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(photos, settings={**tiny.EVERYTHING, **LEVIT}, out=out, quiet=True)
    return out


# Other runs

TOGETHER = """
import sys, time
from pathlib import Path
import weft.train.run
from weft.cli import main
ready, go = Path(sys.argv[1]), Path(sys.argv[2])
ready.touch()
while not go.exists():
    time.sleep(0.0005)
sys.exit(main(sys.argv[3:]))
"""


def together(folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Processes that begin at the same moment; exit codes and what they said."""
    processes = [
        forked.Popen(
            [sys.executable, "-c", TOGETHER, str(folder / f"ready{number}"), str(folder / "go"), *arguments],
            env=tiny.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, arguments in enumerate(commands)
    ]
    until = time.monotonic() + 120
    while not all((folder / f"ready{number}").exists() for number in range(len(commands))):
        assert time.monotonic() < until
        time.sleep(0.01)
    (folder / "go").touch()
    output = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, output, strict=True)]


@pytest.mark.slow
def test_of_several_runs_in_one_directory_one_goes_on(photos: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    ended = together(tmp_path, [tiny.command(photos, out)[3:]] * 3)
    assert sorted(code for code, _ in ended) == [0, 2, 2], ended
    for code, output in ended:
        if code:
            assert re.search(r"is in use by process (\d+|unknown)\.|must be new or empty", output), output
            assert output.count("\n") <= 2
    tiny.assert_same_run(whole, out)


def test_of_several_resumes_one_goes_on(
    photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert main([*tiny.command(photos, out)[3:], "--max-time", "0.01", "--quiet"]) == 143
    ended = together(tmp_path, [tiny.command(None, out)[3:]] * 2)
    codes = [code for code, _ in ended]
    assert 0 in codes
    assert set(codes) <= {0, 2}, ended  # 0 and 0: the second one came to a finished run
    tiny.assert_same_run(whole, out)


# Temporary files, caches, a home

NO_FILES = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from weft.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_no_place_for_temporary_files(whole: Path, photos: Path) -> None:
    """As on a machine whose every file system is read-only or full."""
    done = tiny.finish([sys.executable, "-c", NO_FILES, "predict", str(whole), str(photos / "class0" / "000.png")])
    assert done.returncode == 6, done.stderr
    assert re.fullmatch(r"weft: There must be a directory for temporary files; .* Set TMPDIR to .*\n", done.stderr)


@pytest.mark.slow
def test_places_that_cannot_be_written_to(photos: Path, whole: Path, tmp_path: Path) -> None:
    """Below a file there is no directory, for root neither. Python then takes /tmp, libraries go without a cache."""
    (tmp_path / "file").write_text("")
    names = ("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "HOME")
    closed = {name: str(tmp_path / "file" / name.lower()) for name in names}
    picture = str(photos / "class0" / "000.png")
    for arguments in (
        tiny.command(photos, tmp_path / "run", workers=2),
        [sys.executable, "-m", "weft", "evaluate", str(whole), str(photos), "--out", str(tmp_path / "evaluated")],
        [sys.executable, "-m", "weft", "predict", str(whole), picture],
    ):
        done = tiny.fresh(arguments, **closed)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    tiny.assert_same_run(whole, tmp_path / "run")


def test_without_a_home(photos: Path, whole: Path, tmp_path: Path) -> None:
    for arguments in (
        tiny.command(photos, tmp_path / "run"),
        [sys.executable, "-m", "weft", "predict", str(whole), str(photos / "class0" / "000.png")],
    ):
        environment = {key: value for key, value in tiny.environment().items() if key not in ("HOME", "USER")}
        done = forked.run(arguments, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    tiny.assert_same_run(whole, tmp_path / "run")


FEW_FILES = """
import resource, sys
import weft.train.run
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from weft.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_too_many_workers_for_the_system(photos: Path, tmp_path: Path) -> None:
    arguments = tiny.command(photos, tmp_path / "run", workers=60)[3:]
    done = tiny.finish([sys.executable, "-c", FEW_FILES, *arguments, "--quiet"])
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"weft: There must be resources for 60 worker processes; .*Too many open files\. .*\n", done.stderr
    )
    assert not (tmp_path / "run").exists()


# The clock


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock on the wall shows a time hours before or after the last one."""
    now = [time.time()]

    def jump() -> float:
        now.append(now[-1] + (-1) ** len(now) * 10_000.0 * len(now))
        return now[-1]

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * jump()))


@pytest.mark.usefixtures("jumping")
def test_a_clock_that_jumps(photos: Path, whole: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    settings = {**tiny.EVERYTHING, **LEVIT, "save.every_minutes": 1, "save.every_steps": "null"}
    result = train(photos, settings=settings, out=tmp_path / "run", max_time="1h", quiet=True)
    took = time.monotonic() - begun  # by the clock that does not jump
    assert 0 < result.seconds < took
    rows = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]]
    assert all(float(row[8]) > 0 and 0 <= float(row[9]) <= 100 and 0 < float(row[10]) < took for row in rows)
    tiny.assert_same_run(whole, tmp_path / "run")


@pytest.mark.usefixtures("jumping")
def test_progress_when_the_clock_jumps() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Reporter(2, console=console) as reporter:
        for step in range(1, 20):
            reporter.step(1, Meter(step=step, steps=20, seconds=0.0))
            time.sleep(0.01)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "left" in output
    assert not re.search(r"-\d+:|\d{4,}:", output)


def test_no_duration_is_measured_by_the_clock_on_the_wall() -> None:
    root = Path(weft.__file__).parent
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"time\.time(_ns)?\(|datetime\.(utc)?now\(|from time import", file.read_text())
    }
    assert found <= {"train/environment.py"}  # when a run began, for the record


# What a terminal shows


@pytest.mark.parametrize("text", ["[red]no[/red] :bomb: [link=https://example.org]x[/link]", "[/]", "a\u202eb"])
def test_notes_are_not_interpreted(text: str, capfd: Capture) -> None:
    say(f"class {text}")
    shown = text.replace("\u202e", "\\u202e")
    assert capfd.readouterr().err == f"class {shown}\n"
    console = Console(file=io.StringIO(), force_terminal=True, width=120, emoji=False, highlight=False)
    with Work(f"class {text}", console=console) as work:
        work._bar.refresh()
    assert f"class {shown}" in console.file.getvalue()  # type: ignore[attr-defined]
