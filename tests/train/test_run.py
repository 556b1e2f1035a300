"""A run from data to directory: what it leaves, that it can be repeated to the bit, and the ways it ends early."""

from __future__ import annotations

import csv
import errno
import importlib
import json
import os
import signal
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file

from tests.train.conftest import COLOURS, PER_CLASS, SHORT, paint
from weft.cli import main
from weft.errors import DataError, DivergedError, StorageError, UsageError
from weft.recipes import load_recipe
from weft.runs.directory import CONTENTS, EpochRow, locked
from weft.train import RunResult, loop, plan, train
from weft.train import run as running


def metrics(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def weights(out: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(out / name / "model.safetensors")


def same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


def test_colours_are_learned(trained: RunResult) -> None:
    assert (trained.top1, trained.balanced_accuracy, trained.macro_f1) == (100, 100, 100)
    assert trained.count == len(COLOURS) * PER_CLASS // 5


def test_the_directory_is_as_promised(trained: RunResult) -> None:
    assert sorted(path.name for path in trained.out.iterdir()) == sorted(CONTENTS)
    rows = metrics(trained.out)
    assert tuple(rows[0]) == EpochRow._fields
    assert [row["epoch"] for row in rows] == [str(number + 1) for number in range(6)]
    assert [row["step"] for row in rows] == [str(3 * (number + 1)) for number in range(6)]
    best = max(rows, key=lambda row: (float(row["val_top1"]), -float(row["val_loss"])))
    assert trained.best_epoch == int(best["epoch"])
    assert trained.top1 == pytest.approx(float(best["val_top1"]), rel=1e-5)
    assert [path.name for path in (trained.out / "report").iterdir()] == ["report.html"]


def test_model_directories_are_timms(trained: RunResult) -> None:
    config = json.loads((trained.out / "best" / "config.json").read_text())
    assert config["architecture"] == "weft_levit_nano_32"
    assert config["label_names"] == list(COLOURS)
    importlib.import_module("weft.models.registry")  # as README says
    model = timm.create_model(f"local-dir:{trained.out / 'best'}", pretrained=True)
    assert model.num_classes == len(COLOURS)
    for key, value in weights(trained.out, "best").items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_the_recipe_says_everything_and_repeats_the_run(trained: RunResult, tmp_path: Path) -> None:
    written = yaml.safe_load((trained.out / "recipe.yaml").read_text())
    assert written["environment"]["torch"] == torch.__version__.partition("+")[0]
    assert written["environment"]["train_images"] == 36
    assert written["environment"]["classes"] == list(COLOURS)
    assert (written["model"], written["epochs"], written["batch_size"]) == ("levit_nano_32", 6, 12)
    again = train(recipe=trained.out / "recipe.yaml", out=tmp_path / "again", quiet=True)
    same_weights(trained.out, again.out)
    assert load_recipe(again.out / "recipe.yaml") == load_recipe(trained.out / "recipe.yaml")


def test_the_number_of_workers_changes_nothing(photos: Path, tmp_path: Path) -> None:
    results = [train(photos, out=tmp_path / str(count), workers=count, **SHORT) for count in (0, 2)]
    same_weights(*(result.out for result in results))
    assert results[0].loss == results[1].loss


def test_the_seed_changes_everything(photos: Path, tmp_path: Path) -> None:
    results = [train(photos, out=tmp_path / str(seed), seed=seed, **{**SHORT, "epochs": 1}) for seed in (0, 1)]
    first, second = (weights(result.out) for result in results)
    assert not torch.equal(first["head.linear.weight"], second["head.linear.weight"])


def test_a_taken_directory_is_refused_before_any_work(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("precious")
    monkeypatch.setattr(plan, "open_splits", lambda *args, **kwargs: pytest.fail("data was opened"))
    with pytest.raises(UsageError, match=r"run is neither\. Pass --force"):
        train(photos, out=tmp_path / "run", **SHORT)
    assert (tmp_path / "run" / "metrics.csv").read_text() == "precious"


def test_where_a_run_goes_by_default(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(photos, **{**SHORT, "epochs": 1}).out == Path("runs/levit_nano_32-photos")
    named = train(photos, settings={"name": "mine"}, **{**SHORT, "epochs": 1})
    assert named.out == Path("runs/mine")
    again = train(photos, settings={"name": "mine"}, **{**SHORT, "epochs": 1})
    assert again.out == Path("runs/mine-2")
    (tmp_path / "runs" / "mine-3").write_text("a file")
    with locked(Path("runs/mine-4")):  # by another run that is about to start
        other = train(photos, settings={"name": "mine"}, **{**SHORT, "epochs": 1})
    assert other.out == Path("runs/mine-5")
    assert train(resume=again.out, quiet=True).out == again.out
    forced = train(photos, settings={"name": "mine"}, force=True, **{**SHORT, "epochs": 1})
    assert forced.out == Path("runs/mine")


def test_nothing_to_train_on() -> None:
    with pytest.raises(UsageError, match=r"Training needs images; got none\. Name a folder or `digits`"):
        train(quiet=True)


def test_bad_data_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        train(tmp_path / "nowhere", out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_nothing_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 for training, 0 held out"):
        train(paint(tmp_path / "photos", per_class=1), out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "levit_nano_23"}, r"Unknown model 'levit_nano_23'\. Nearest: levit_nano_32"),
        ({"settings": {"model_args.depht": 3}}, r"levit_nano_32 has no constructor value 'depht' .*Nearest: depth"),
        (
            {"batch_size": 1},
            "levit_nano_32 needs at least 2 images per forward pass to train its BatchNorm; got batch_size 1",
        ),
        ({"epochs": 0}, "epochs must be at least 1, or 0 with --set head_init=probe"),
        ({"precision": "fp16"}, "precision must be one of auto, fp32, bf16; got 'fp16'"),
    ],
)
def test_a_setting_that_does_not_fit_leaves_no_directory(
    changes: dict, message: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        train(photos, out=tmp_path / "run", **{**SHORT, **changes})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_any_size_and_any_timm_model(photos: Path, tmp_path: Path) -> None:
    wide = train(photos, out=tmp_path / "wide", img_size="32x48", **{**SHORT, "epochs": 1})
    config = json.loads((wide.out / "best" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 48]
    other = train(photos, out=tmp_path / "timm", img_size=32, **{**SHORT, "epochs": 1, "model": "resnet10t"})
    config = json.loads((other.out / "best" / "config.json").read_text())
    assert config["architecture"] == "resnet10t"
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]


@pytest.mark.slow
def test_the_average_of_the_weights_is_kept(photos: Path, tmp_path: Path) -> None:
    result = train(photos, out=tmp_path / "run", settings={"optim.ema_decay": 0.9}, **SHORT)
    plain = train(photos, out=tmp_path / "plain", **SHORT)
    key = "head.linear.weight"
    assert not torch.equal(weights(result.out)[key], weights(plain.out)[key])


def poisoned(at_step: int):
    """The loss, but not a number at one step."""
    calls = []
    objective = loop.Objective.__call__

    def loss(self, *args, **kwargs):
        calls.append(1)
        return objective(self, *args, **kwargs) * (float("nan") if len(calls) == at_step else 1)

    return loss


@pytest.mark.slow
def test_divergence_stops_at_the_step_and_keeps_what_was_good(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = train(photos, out=tmp_path / "good", **{**SHORT, "epochs": 2})
    monkeypatch.setattr(loop.Objective, "__call__", poisoned(at_step=5))
    with pytest.raises(DivergedError, match=r"must be finite; got nan at step 5 \(epoch 2\).* images \w+/\d\d.png, "):
        train(photos, out=tmp_path / "bad", **SHORT)
    assert metrics(tmp_path / "bad")[0]["val_loss"] == metrics(reference.out)[0]["val_loss"]
    assert len(metrics(tmp_path / "bad")) == 1
    assert all(value.isfinite().all() for value in weights(tmp_path / "bad", "best").values())


@pytest.mark.slow_except("15-SystemExit")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_stops_between_two_steps_and_keeps_the_weights(
    number: signal.Signals,
    error: type[BaseException],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learn = loop.Learner.train_step

    def signalled(self: loop.Learner, *args: object) -> loop.StepResult:
        if self.step == 1:
            signal.raise_signal(number)
        return learn(self, *args)

    monkeypatch.setattr(loop.Learner, "train_step", signalled)
    with pytest.raises(error) as caught:
        train(photos, out=tmp_path / "run", **SHORT)
    output = f"{caught.value} {capsys.readouterr().err}".replace("\n", " ")
    assert "Stopped after step 2 of 6: " in output
    assert "resume with: weft train --resume" in output
    assert weights(tmp_path / "run")
    assert not (tmp_path / "run" / "best").exists()
    monkeypatch.setattr(loop.Learner, "train_step", learn)
    resumed = train(resume=tmp_path / "run", quiet=True)
    whole = train(photos, out=tmp_path / "whole", **SHORT)
    same_weights(resumed.out, whole.out)
    assert (resumed.out / "steps.csv").read_text() == (whole.out / "steps.csv").read_text()


def test_a_full_disk_is_a_storage_error(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(running, "save_model_dir", full)
    with pytest.raises(StorageError, match=r"run/best must be writable; No space left on device\. Free some space"):
        train(photos, out=tmp_path / "run", **SHORT)


def test_bad_files_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paint(tmp_path / "photos", per_class=12)
    (folder / "red" / "empty.png").touch()
    result = train(folder, out=tmp_path / "run", **{**SHORT, "quiet": False, "epochs": 1})
    assert "empty.png" in capsys.readouterr().err
    assert result.count == 6
    assert "1 excluded" in (result.out / "report" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="file names are text there")
@pytest.mark.figures
def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paint(tmp_path / "photos", per_class=6)
    (folder / "red").rename(folder / "caf\xe9 $x^2$")
    (folder / os.fsdecode(b"caf\xe9")).mkdir()
    (folder / "green" / os.fsdecode(b"bad\xff.png")).touch()
    result = train(folder, out=tmp_path / "run", **{**SHORT, "epochs": 1, "quiet": False})
    assert "its name must be UTF-8; rename it" in capsys.readouterr().err
    assert result.evaluation.classes == ["blue", "caf\xe9 $x^2$", "green"]
    assert "caf" in (result.out / "report" / "report.html").read_text(encoding="utf-8")
    again = train(recipe=result.out / "recipe.yaml", out=tmp_path / "again", quiet=True)
    same_weights(result.out, again.out)
    assert main(["evaluate", str(result.out), str(folder), "--split", "all"]) == 0
    assert main(["predict", str(result.out), str(folder), "--json"]) == 3
