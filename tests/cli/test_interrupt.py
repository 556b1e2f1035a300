"""Ctrl-C, which reaches every process of a terminal's process group: one line, exit code 130, no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.conftest import paint

pytestmark = pytest.mark.slow

START = """
import sys
from weft import progress
progress.LINE_SECONDS = 0.0
from weft.cli import main
sys.exit(main(sys.argv[1:]))
"""


def output(marker: str) -> Callable[[subprocess.Popen[bytes], Path], bool]:
    return lambda process, log: marker in log.read_text()


def has_children(process: subprocess.Popen[bytes], log: Path) -> bool:
    return bool(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many images that reading them takes longer than a signal."""
    folder = paint(tmp_path_factory.mktemp("many") / "photos", per_class=1)
    for file in list(folder.glob("*/*")):
        for copy in range(1500):
            shutil.copy(file, file.with_stem(f"copy{copy}"))
    return folder


@pytest.mark.parametrize(
    ("verb", "is_time"),
    [
        ("evaluate RUN PHOTOS --workers 2", output("reading: ")),
        ("evaluate RUN MANY --workers 2 --split all --batch-size 1", output("evaluating: ")),
        ("export RUN OUT --format openvino --precision int8 --data PHOTOS", output("converting to openvino: ")),
        ("export RUN OUT --format openvino --precision int8 --data PHOTOS", output("calibrating int8: ")),
        ("data check MANY", output("checking: ")),
        ("data prepare MANY OUT --size 8", output("packing: ")),
        ("compare digits --models levit_nano_32 ceit_nano_32 --out OUT", output("training levit-nano-32-seed0")),
        ("compare digits --models levit_nano_32 ceit_nano_32 --budget 1h --out OUT", output("timing training steps")),
        ("study ceit-leff digits --seeds 1 --out OUT", output("training ")),
        pytest.param(
            "bench levit_nano_32 ceit_nano_32",
            has_children,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
        ),
    ],
)
def test_one_line(verb, is_time, trained, photos, many, tmp_path):
    places = {"RUN": trained.out, "PHOTOS": photos, "MANY": many, "OUT": tmp_path / "out"}
    arguments = [str(places.get(word, word)) for word in verb.split()]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 120
        while not is_time(process, log):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = len(log.read_text().splitlines())
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) in (130, -signal.SIGINT)  # a shell shows 130 for both
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text().splitlines()
    assert "Traceback" not in log.read_text()
    assert [line for line in lines[before:] if " elapsed" not in line] == [lines[-1]], lines
    assert lines[-1].startswith("weft: ")
