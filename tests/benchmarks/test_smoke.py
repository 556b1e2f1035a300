"""benchmarks/smoke.py: every script is in its table, and it changes no file of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import smoke

MODULES = {  # imported or started by scripts
    *("common/peers.py", "common/records.py", "common/ways.py", "few-images/neighbours.py", "few-images/resnet9.py"),
    *("gpu/cells.py", "gpu/parts.py", "gpu/report.py", "gpu/settings.py", "serving/clients.py", "speed/plot.py"),
    *(f"few-images/tools/{name}.py" for name in ("fastai_fine_tune", "sklearn_timm", "timm_loop")),
}


def test_every_script_has_a_smallest_form() -> None:
    folder = smoke.ROOT / "benchmarks"
    scripts = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert {script.file for script in smoke.SCRIPTS} == scripts - MODULES - {"smoke.py"}


def test_the_calls_name_known_places(tmp_path: Path) -> None:
    places = smoke.prepare(tmp_path)
    for script in smoke.SCRIPTS:
        for call in (*script.calls, *smoke.PREPARE):
            call.format(**places)
    assert len(list(Path(places["photos"]).rglob("*.jpg"))) == 36
    with Image.open(places["photo"]) as image:
        assert image.size == (96, 96)


@pytest.mark.parametrize(("code", "outcome"), [("", ""), ("import sys; sys.exit(3)", "exit code 3")])
def test_a_script_runs_in_the_copy(code: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    command = ["python3", "-c", f"open('written', 'w'); {code}"]
    assert smoke.finished(command, tmp_path / "checkout", tmp_path / "log", 60) == outcome
    assert (tmp_path / "checkout" / "written").exists()


def test_a_script_that_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    command = ["python3", "-c", "import time; time.sleep(600)"]
    assert smoke.finished(command, tmp_path / "checkout", tmp_path / "log", 1) == "out of time"
