"""Cross-validation: a run per fold, each the same as on its own, and one evaluation over all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.train import tiny
from weft.cli import main
from weft.data import SplitPlan, open_data
from weft.errors import StoppedError, UsageError
from weft.recipes import load_recipe
from weft.train import evaluate, train

SETTINGS = {"data.folds": 3, "data.group": r"(\d)\.png", "batch_size": 6, "save.every_steps": 1}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise", per_class=9)


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("run") / "run"
    return train(photos, "levit_nano_32", settings=SETTINGS, epochs=1, out=out, quiet=True)


def tables(out: Path) -> list[str]:
    return [(out / place / "steps.csv").read_text() for place in (".", "folds/2", "folds/3")]


def test_every_image_is_held_out_once(whole, photos: Path) -> None:
    folds = whole.cross_validation
    assert [fold.count for fold in folds.folds] == [9, 9, 9]
    pooled = folds.evaluation
    assert pooled.count == 27
    assert pooled.confusion.sum() == 27
    assert np.array_equal(pooled.confusion, sum(fold.confusion for fold in folds.folds))
    assert pooled.top1 == pytest.approx(100 * sum(fold.is_correct.sum() for fold in folds.folds) / 27)
    record = json.loads((whole.out / "cross_validation.json").read_text())
    assert record["n"] == 27
    assert [fold["n"] for fold in record["folds"]] == [9, 9, 9]
    assert [row["epoch"] for row in record["by_epoch"]] == [1]
    assert record["by_epoch"][0]["top1"] == pytest.approx(record["top1"], abs=1e-3)  # the only epoch is the best
    assert record["top1_interval"] == list(pooled.interval[1:])
    assert (whole.out / "folds" / "report" / "report.html").is_file()
    held_out = [
        key
        for fold in (1, 2, 3)
        for key in open_data(photos, SplitPlan(folds=3, fold=fold, group="(\\d)\\.png")).val.keys
    ]
    assert len(set(held_out)) == 27


def test_evaluate_holds_the_same_images_out(whole, photos: Path) -> None:
    for folder, fold in zip((whole.out, whole.out / "folds" / "2"), whole.cross_validation.folds, strict=False):
        again = evaluate(folder, photos, quiet=True)
        assert again.count == 9
        assert np.array_equal(again.confusion, fold.confusion)


def test_a_fold_is_the_same_on_its_own(whole, photos: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"data.fold": 2}
    alone = train(photos, "levit_nano_32", settings=settings, epochs=1, out=tmp_path / "run", quiet=True)
    assert alone.cross_validation is None
    assert (tmp_path / "run" / "steps.csv").read_text() == tables(whole.out)[1]


def test_a_stopped_cross_validation_goes_on(
    whole, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop within the second fold: the message names the run, and resuming it finishes all folds."""
    out = tmp_path / "run"
    from weft.train.run import Run

    after_step = Run._after_step

    def stop_in_second_fold(self: Run, meter: object, result: object) -> None:
        if self.out.name == "2" and self.learner.step == 2:
            self.stop.deadline = 0.0
        after_step(self, meter, result)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_after_step", stop_in_second_fold)
        with pytest.raises(StoppedError, match=rf"resume with: weft train --resume {re.escape(str(out))}$"):
            train(photos, "levit_nano_32", settings=SETTINGS, epochs=1, out=out, quiet=True)
    assert not (out / "folds" / "3").exists()
    result = train(resume=out, quiet=True)
    assert tables(out) == tables(whole.out)
    assert result.cross_validation.evaluation.top1 == whole.cross_validation.evaluation.top1
    again = train(resume=out, quiet=True)  # nothing is left to do
    assert again.cross_validation.evaluation.top1 == whole.cross_validation.evaluation.top1


def test_more_epochs_train_in_every_fold(whole, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the second fold is stopped within them, and resumed without the number of epochs."""
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    from weft.train.run import Run

    after_step = Run._after_step

    def stop_in_second_fold(self: Run, meter: object, result: object) -> None:
        if self.out.name == "2" and self.learner.step == 4:
            self.stop.deadline = 0.0
        after_step(self, meter, result)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_after_step", stop_in_second_fold)
        with pytest.raises(StoppedError):
            train(resume=out, epochs=2, override=True, quiet=True)
    result = train(resume=out, quiet=True)
    assert [len(table.splitlines()) for table in tables(out)] == [1 + 6, 1 + 6, 1 + 6]
    assert list(result.cross_validation.by_epoch) == [1, 2]
    assert load_recipe(out / "folds" / "3" / "recipe.yaml").epochs == 2


def test_the_command_line_prints_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "levit_nano_32", "--epochs", "1", "--batch-size", "6", "--out", str(tmp_path / "run")]
    assert main(["train", str(photos), "--folds", "2", "--group", r"(\d)\.png", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cross_validation"]["n"] == 27
    assert "Fold 2 of 2." in printed.err
    assert "The 27 held-out images are in 9 groups. The 95 % interval treats the images of a group as" in printed.err
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    printed, messages = capsys.readouterr()
    assert "Too few images for a conclusion: with 27," in messages
    assert "2-fold cross-validation: top-1" in printed
    assert "; at the last epoch of each" in printed
    report = (tmp_path / "run" / "folds" / "report" / "report.html").read_text()
    assert "<dt>folds</dt><dd>2; 27 images held out, each once" in report
    assert "Evaluate on more images" in report
    assert "<dt>groups</dt><dd>The 27 held-out images are in 9 groups." in report
    assert "points (underestimated: the temperature was fitted to these images)" in report
    with pytest.raises(UsageError, match=r"cannot change its data\.folds"):
        train(resume=tmp_path / "run", settings={"data.folds": 3}, override=True, quiet=True)
