"""Cross-validation: a run per fold, each the same as on its own, and one evaluation over all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train import tiny
from weft.cli import main
from weft.data import SplitPlan, open_data
from weft.errors import StoppedError, UsageError
from weft.recipes import load_recipe
from weft.train import RunResult, evaluate, train
from weft.train.run import Run

GROUP = r"(\d)\.png"
SETTINGS = {"data.folds": 3, "data.group": GROUP, "batch_size": 6, "save.every_steps": 1, "model_args.depth": [1, 1, 1]}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise", per_class=9)


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("run") / "run"
    return train(photos, "levit_nano_32", settings=SETTINGS, folds=3, group=GROUP, epochs=1, out=out, quiet=True)


@pytest.fixture
def folds(whole: RunResult) -> Any:
    return whole.cross_validation


def tables(out: Path) -> list[str]:
    return [(out / place / "steps.csv").read_text() for place in (".", "folds/2", "folds/3")]


def stop_in_second_fold(patch: pytest.MonkeyPatch, step: int) -> None:
    after_step = Run._after_step

    def stop(self: Run, *arguments: Any) -> None:
        if self.out.name == "2" and self.learner.step == step:
            self.stop.deadline = 0.0
        after_step(self, *arguments)

    patch.setattr(Run, "_after_step", stop)


def test_the_options_of_the_command_line(photos, tmp_path):
    words = ["--folds", "2", "--group", GROUP, "--epochs", "2", "--batch-size", "6", "--quiet"]
    network = ["--model", "levit_nano_32", "--set", "model_args.depth=[1,1,1]"]
    assert main(["train", str(photos), *network, *words, "--out", str(tmp_path / "run")]) == 0
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (recipe.data.folds, recipe.data.group) == (2, GROUP)
    assert [(tmp_path / "run" / "folds" / name / "steps.csv").exists() for name in "23"] == [True, False]
    report = (tmp_path / "run" / "folds" / "report" / "report.html").read_text()
    assert "<dt>last epoch of each fold</dt>" in report


def test_every_image_is_held_out_once(whole: RunResult, folds: Any, photos: Path) -> None:
    assert [fold.count for fold in folds.folds] == [9, 9, 9]
    pooled = folds.evaluation
    assert pooled.count == pooled.confusion.sum() == 27
    assert np.array_equal(pooled.confusion, sum(fold.confusion for fold in folds.folds))
    assert pooled.top1 == pytest.approx(100 * sum(fold.is_correct.sum() for fold in folds.folds) / 27)
    plans = [SplitPlan(folds=3, fold=fold, group=GROUP) for fold in (1, 2, 3)]
    assert len({key for plan in plans for key in open_data(photos, plan).val.keys}) == 27
    record = json.loads((whole.out / "cross_validation.json").read_text())
    assert (record["n"], [fold["n"] for fold in record["folds"]]) == (27, [9, 9, 9])
    assert [row["epoch"] for row in record["by_epoch"]] == [1]
    assert record["by_epoch"][0]["top1"] == pytest.approx(record["top1"], abs=1e-3)  # the only epoch is the best
    assert record["top1_interval"] == list(pooled.interval[1:])


def test_evaluate_holds_the_same_images_out(whole: RunResult, folds: Any, photos: Path) -> None:
    for folder, fold in zip((whole.out, whole.out / "folds" / "2"), folds.folds, strict=False):
        again = evaluate(folder, photos, quiet=True)
        assert again.count == 9
        assert np.array_equal(again.confusion, fold.confusion)


def test_a_fold_is_the_same_on_its_own(whole: RunResult, photos: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"data.fold": 2}
    alone = train(photos, "levit_nano_32", settings=settings, epochs=1, out=tmp_path / "run", quiet=True)
    assert alone.cross_validation is None
    assert (tmp_path / "run" / "steps.csv").read_text() == tables(whole.out)[1]


def test_a_cross_validation_that_stops_in_a_fold_goes_on(
    whole: RunResult, folds: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the run, and resuming it finishes all folds."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_in_second_fold(patch, 2)
        with pytest.raises(StoppedError, match=rf"resume with: weft train --resume {re.escape(str(out))}$"):
            train(photos, "levit_nano_32", settings=SETTINGS, epochs=1, out=out, quiet=True)
    assert not (out / "folds" / "3").exists()
    result: Any = train(resume=out, quiet=True)
    assert result.cross_validation.evaluation.top1 == folds.evaluation.top1
    assert tables(out) == tables(whole.out)


@pytest.mark.slow
def test_more_epochs_train_in_every_fold(whole: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the second fold is stopped within them, and resumed without the number of epochs."""
    out = Path(shutil.copytree(whole.out, tmp_path / "run"))
    with monkeypatch.context() as patch:
        stop_in_second_fold(patch, 4)
        with pytest.raises(StoppedError):
            train(resume=out, epochs=2, override=True, quiet=True)
    result: Any = train(resume=out, quiet=True)
    assert [len(table.splitlines()) for table in tables(out)] == [1 + 6, 1 + 6, 1 + 6]
    assert list(result.cross_validation.by_epoch) == [1, 2]
    assert load_recipe(out / "folds" / "3" / "recipe.yaml").epochs == 2


def test_a_finished_cross_validation_is_printed_and_reported(
    whole: RunResult, folds: Any, tmp_path: Path, capsys
) -> None:
    out = Path(shutil.copytree(whole.out, tmp_path / "run"))
    assert main(["train", "--resume", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["cross_validation"]
    assert (found["n"], found["top1"]) == (27, pytest.approx(folds.evaluation.top1))
    assert "Fold 2 of 3." in printed.err
    assert "The 27 images are in 9 groups;" in printed.err
    assert main(["train", "--resume", str(out), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "Too few groups for a conclusion: with 9," in printed.err
    assert "3-fold cross-validation: top-1" in printed.out
    report = (out / "folds" / "report" / "report.html").read_text()
    assert "<dt>folds</dt><dd>3; 27 images held out, each once" in report
    assert "<dt>groups</dt><dd>The 27 images are in 9 groups;" in report
    assert "points (underestimated: the temperature was fitted to these images)" in report
    with pytest.raises(UsageError, match=r"cannot change its data\.folds"):
        train(resume=out, settings={"data.folds": 2}, override=True, quiet=True)
