"""benchmarks/smoke.py: every script is in its table, and runs in a copy of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import smoke
from benchmarks.faults import faults
from PIL import Image

MODULES = {  # imported or started by scripts
    *("common/peers.py", "common/records.py", "common/ways.py", "few-images/neighbours.py", "few-images/resnet9.py"),
    *("gpu/cells.py", "gpu/parts.py", "gpu/report.py", "gpu/settings.py", "serving/clients.py", "speed/plot.py"),
    *(f"few-images/tools/{name}.py" for name in ("fastai_fine_tune", "sklearn_timm", "timm_loop")),
}


def test_every_script_has_a_smallest_form() -> None:
    folder = smoke.ROOT / "benchmarks"
    scripts = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    scripts = {path for path in scripts if not path.startswith("tests/")}
    assert {script.file for script in smoke.SCRIPTS} == scripts - MODULES - {"smoke.py"}


def test_the_calls_name_known_places(tmp_path: Path) -> None:
    places = smoke.prepare(tmp_path)
    for script in smoke.SCRIPTS:
        for call in (*script.calls, *smoke.PREPARE):
            call.format(**places)
    assert len(list(Path(places["photos"]).rglob("*.jpg"))) == 36
    with Image.open(places["photo"]) as image:
        assert image.size == (96, 96)


def test_faults_are_drawn_from_files_that_exist() -> None:
    for file in (file for files in faults.ROOMS.values() for file in files):
        assert (smoke.ROOT / "src" / "weft" / file).is_file(), file


@pytest.mark.parametrize(
    ("code", "seconds", "outcome"),
    [("", 120, ""), ("sys.exit(3)", 120, "exit code 3"), ("time.sleep(600)", 1, "out of time")],
)
def test_a_script_runs_in_the_copy_until_its_time_is_up(code: str, seconds: int, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    command = ["python3", "-c", f"import sys, time; open('written', 'w'); {code}"]
    assert smoke.finished(command, tmp_path / "checkout", tmp_path / "log", seconds) == outcome
    assert (tmp_path / "checkout" / "written").exists() or seconds == 1
