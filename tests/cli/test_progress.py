"""Progress of every verb that takes a while: lines on stderr where there is no terminal, none with --quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft import create_model, progress
from weft.cli import main
from weft.train import RunResult

Shown = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("verb", "tasks"),
    [
        ("evaluate RUN PHOTOS", ("reading", "evaluating")),
        ("predict RUN PHOTOS", ("classifying",)),
        ("export RUN OUT --format onnx --data PHOTOS", ("reading", "converting to onnx", "checking")),
        pytest.param(
            "export RUN OUT --format onnx --precision int8 --data PHOTOS --max-drop 100",
            ("converting to onnx", "reading images for calibration", "calibrating int8", "checking"),
            marks=pytest.mark.slow,
        ),
        ("convert WEIGHTS OUT --model levit_nano_32", ("converting",)),
        ("data check PHOTOS", ("checking",)),
        ("data prepare PHOTOS OUT --size 8", ("reading", "packing")),
    ],
)
def test_lines_of_a_log(
    verb: str,
    tasks: tuple[str, ...],
    trained: RunResult,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Shown,
) -> None:
    weights = tmp_path / "weights.pth"
    torch.save(create_model("levit_nano_32", num_classes=3).state_dict(), weights)
    places = {"RUN": str(trained.out), "PHOTOS": str(photos), "OUT": str(tmp_path / "out"), "WEIGHTS": str(weights)}
    arguments = [places.get(word, word) for word in verb.split()]
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)  # a line at every step
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    for task in tasks:
        assert any(line.startswith(f"{task}: ") and " elapsed" in line for line in lines), task
    assert main([*arguments, "--quiet", *(["--force"] if "OUT" in verb else [])]) == 0
    assert capsys.readouterr().err == ""
