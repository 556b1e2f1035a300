"""The measure that chooses the best epoch, and what a run says where top-1 misleads: about rare classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.train.conftest import SHORT
from weft.cli import main
from weft.errors import UsageError
from weft.inference.measurement import measure
from weft.inference.metrics import Evaluation
from weft.runs.directory import EpochRow, best_of, read_metrics, write_metrics
from weft.train import run, train

NAN = float("nan")
SCRIPT = [(90.0, 50.0, 0.4), (80.0, 70.0, 0.5), (85.0, 60.0, 0.3), (70.0, 55.0, 0.6)]


def epoch(number: int, loss: float, top1: float, balanced: float = NAN) -> EpochRow:
    return EpochRow(number, 0, 0.0, 0.0, 0.0, loss, top1, 0.0, 0.0, 0.0, 0.0, balanced)


@pytest.mark.parametrize(
    ("measure", "scores", "best"),
    [
        ("top1", [(0.9, 50, 50), (0.8, 60, 50), (NAN, NAN, NAN), (0.5, 70, 0), (0.6, 70, 0), (0.5, 70, 0)], 4),
        ("top1", [(0.9, 50, 50), (0.8, 95, 50), (0.7, 90, 80), (0.6, 94, 70)], 2),
        ("balanced", [(0.9, 50, 50), (0.8, 95, 50), (0.7, 90, 80), (0.6, 94, 70)], 3),
        ("loss", [(0.9, 50, 50), (0.8, 95, 50), (0.7, 90, 80), (0.6, 94, 70)], 4),
        ("top1", [(NAN, NAN, NAN)], None),
    ],
)
def test_the_best_epoch_is_that_of_the_measure(measure: str, scores: Any, best: int | None, tmp_path: Path) -> None:
    rows = [epoch(number, *values) for number, values in enumerate(scores, 1)]
    write_metrics(tmp_path / "metrics.csv", rows)
    for history in (rows, read_metrics(tmp_path / "metrics.csv")):
        row = best_of(history, measure)
        assert best == (None if row is None else row.epoch)


def test_the_best_epoch_does_not_depend_on_who_asks(tmp_path: Path) -> None:
    """Epoch by epoch as in training, over the whole history, and from metrics.csv, which rounds."""
    random = np.random.default_rng(0)
    for trial in range(20):
        losses = 0.5 + random.integers(0, 3, 12) * random.choice([1e-9, 1e-2], 12)
        losses[random.integers(0, 12)] = np.nan  # outputs that overflowed
        top1 = 50 + random.integers(0, 2, 12) * random.choice([1e-9, 1.0])
        rows = [epoch(number, *values) for number, values in enumerate(zip(losses.tolist(), top1.tolist()), 1)]  # noqa: B905
        saved = [row for place, row in enumerate(rows, 1) if best_of(rows[:place]) is row]  # as `best/` is written
        write_metrics(tmp_path / "metrics.csv", rows)
        read = best_of(read_metrics(tmp_path / "metrics.csv"))
        assert saved[-1] is best_of(rows), trial
        assert read is not None
        assert saved[-1].epoch == read.epoch, trial


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(Evaluation):
    """Evaluations with the top-1, balanced accuracy and loss of a script."""

    script: tuple[float, float, float] = (0.0, 0.0, 0.0)
    top1 = property(lambda self: self.script[0])
    balanced_accuracy = property(lambda self: self.script[1])
    loss = property(lambda self: self.script[2])


def test_the_measure_chooses_the_best_model_and_ends_the_run(photos: Path, tmp_path: Path, monkeypatch) -> None:
    numbers = iter(SCRIPT)
    monkeypatch.setattr(
        run, "measure", lambda *args, **kwargs: Scripted(**vars(measure(*args, **kwargs)), script=next(numbers))
    )
    settings = {"best": "balanced", "patience": 2, "model_args.depth": [1, 1, 1]}
    result = train(photos, out=tmp_path / "run", settings=settings, **{**SHORT, "epochs": 5})
    assert (result.best_epoch, result.epochs, result.top1) == (2, 4, 80.0)
    with pytest.raises(UsageError, match="best"):  # it does not change on resume
        train(resume=result.out, settings={"best": "loss"}, override=True, quiet=True)


def test_a_run_on_rare_classes_says_that_one_is_never_predicted(tmp_path: Path, capsys) -> None:
    random = np.random.default_rng(0)
    for name, number in (("normal", 76), ("rare", 4)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(number):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "data"), "--out", str(out), "--model", "levit_nano_32", "--epochs", "2"]) == 0
    printed = capsys.readouterr()
    assert "balanced accuracy: 50.00 % (mean recall of the classes)" in printed.out
    assert "1 class is never predicted: rare (1 image)." in printed.out
    assert "balanced 50.00 %" in printed.err
    assert main(["evaluate", str(out), str(tmp_path / "data"), "--quiet"]) == 0
    assert "1 class is never predicted: rare (1 image)." in capsys.readouterr().out
