"""train, evaluate and predict from the command line: what goes to stdout, what to stderr, and the exit code."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch

from tests.train.conftest import paint
from weft.cli import main
from weft.recipes.load import recorded_environment
from weft.train.state import load_state

TRAIN = ["--model", "levit_nano_32", "--epochs", "1", "--batch-size", "12", "--device", "cpu"]


def test_train(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(photos), *TRAIN, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"levit_nano_32 on {photos}: held-out top-1 ")
    assert re.search(r"% of 9 images \(95 % CI [\d.]+ to [\d.]+ %\), epoch 1 of 1 \(the best\)$", lines[0])
    assert lines[1] == f"model:  {out / 'best'}"
    assert lines[2] == f"report: {out / 'report' / 'report.html'}"
    assert Path(lines[2].split()[1]).is_file()
    assert "Too few images for a conclusion: with 9," in shown.err
    assert "epoch 1/1  loss " in shown.err
    assert "held out" in shown.err
    assert main(["train", str(photos), *TRAIN, "--out", str(out)]) == 2
    assert "Pass --force" in capsys.readouterr().err
    assert main(["train", str(photos), *TRAIN, "--out", str(out), "--force", "--quiet", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads(shown.out)
    assert (result["out"], result["count"], result["epochs"]) == (str(out), 9, 1)
    assert result["balanced_accuracy"] == pytest.approx(result["top1"])  # three images of each class
    assert 0 <= result["macro_f1"] <= 100


def test_threads_of_a_training(photos, tmp_path, capsys):
    """They are recorded; a resumed run has its own, which its last bits depend on."""
    out, before = tmp_path / "run", torch.get_num_threads()
    try:
        assert main(["train", str(photos), *TRAIN, "--out", str(out), "--quiet", "--threads", "3"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert recorded_environment(out / "recipe.yaml")["threads"] == 3
    assert load_state(out / "state")[0].machine["threads"] == 3
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--threads", "1"]) == 2
    assert "--resume uses the number of threads of the run" in capsys.readouterr().err
    assert torch.get_num_threads() == before


def test_the_data_of_a_recipe_are_used(photos, tmp_path, capsys):
    options = [*TRAIN, "--set", f"data.source={photos}", "--set", "optim.lr=1e-3"]
    assert main(["train", *options, "--out", str(tmp_path / "run"), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "levit_nano_32"


@pytest.mark.slow
def test_evaluate(trained, photos, tmp_path, capsys):
    arguments = ["evaluate", str(trained.out), str(photos)]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "top-1: 100.00 % of 9 images (95 % CI 70.1 to 100.0 %)"
    assert "top-5" not in shown.out  # of three classes
    assert "Too few images for a conclusion: with 9," in shown.out
    assert "Evaluating the held-out images: 9 images." in shown.err
    table = [line.split() for line in shown.out.splitlines()]
    assert ["red", "3", "100.0", "100.0", "100.0"] in table
    assert ["red", "0", "0", "3"] in table
    assert main([*arguments, "--json", "--quiet", "--out", str(tmp_path / "check")]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert json.loads(shown.out)["n"] == 9
    assert (tmp_path / "check" / "report.html").is_file()
    assert main([*arguments, "--csv", "--quiet", "--split", "all"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["class"], row["images"]) for row in rows] == [("blue", "15"), ("green", "15"), ("red", "15")]


def test_evaluate_names_what_it_left_out(trained, tmp_path, capsys):
    folder = paint(tmp_path / "photos", per_class=10, seed=1)
    (folder / "red" / "zero.png").touch()
    assert main(["evaluate", str(trained.out), str(folder), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "of 30 images (95 % CI" in shown
    assert "1 excluded from all results:\n  red/zero.png: zero-byte\n" in shown


def test_predict(trained, photos, capsys):
    """As a table. CSV and JSON: tests/contract/test_same_predictions.py."""
    arguments = ["predict", str(trained.out), str(photos / "red" / "00.png"), f"{photos}/blue/0[12].png"]
    assert main([*arguments, "--top-k", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows[0] == ["image", "rank", "class", "probability", "unknown"]
    assert [row[2] for row in rows[1:]] == ["red", "blue", "blue"]


def test_predict_leaves_out_what_it_cannot_read(trained, photos, tmp_path, capsys):
    (tmp_path / "zero.png").touch()
    arguments = ["predict", str(trained.out), str(tmp_path / "zero.png"), str(photos / "red" / "00.png"), "--csv"]
    assert main(arguments) == 3
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1 + 3
    assert "zero.png" in shown.err.splitlines()[0]
    assert shown.err.splitlines()[-1] == "weft: 1 of 2 images could not be read."
