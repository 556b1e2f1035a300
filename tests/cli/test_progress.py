"""Progress of every verb that takes a while: lines on stderr where there is no terminal, none with --quiet."""

import pytest
import torch

from tests.helpers import lively
from weft import create_model, progress
from weft.checkpoints import save_model_dir
from weft.cli import main


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
def test_lines_of_a_log(verb, tasks, trained, photos, tmp_path, monkeypatch, capsys):
    weights = tmp_path / "weights.pth"
    torch.save(create_model("levit_nano_32", num_classes=3).state_dict(), weights)
    run = trained.out
    if verb.startswith("export"):  # as in tests/test_reading.py: equal networks are exported once
        network = lively("levit_nano_32", num_classes=3, depth=[1, 1, 1])
        run = save_model_dir(network, tmp_path / "model", label_names=["blue", "green", "red"])
    places = {"RUN": str(run), "PHOTOS": str(photos), "OUT": str(tmp_path / "out"), "WEIGHTS": str(weights)}
    arguments = [places.get(word, word) for word in verb.split()]
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)  # a line at every step
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    for task in tasks:
        assert any(line.startswith(f"{task}: ") and " elapsed" in line for line in lines), task
    assert main([*arguments, "--quiet", *(["--force"] if "OUT" in verb else [])]) == 0
    assert capsys.readouterr().err == ""
