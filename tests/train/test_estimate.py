"""`weft train --plan`: duration, memory and disk space of a run; `weft data bench`: how fast its images are loaded."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train import tiny
from weft.cli import main
from weft.errors import UsageError
from weft.machine.runtime import Runtime
from weft.progress import Work
from weft.recipes import load_recipe
from weft.train import Loading, PlannedRun, estimate, loading_speed, planned_run
from weft.train.estimate import STEPS, LoadingRate, _steady
from weft.train.plan import Plan

KEYS = set(
    "recipe model img_size train val classes batch folds epochs steps_per_epoch steps evaluations timed_steps step_s"
    " data_wait workers evaluation_s memory_mib gpu_mib states state_bytes model_bytes seconds".split()
)


def sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]


def test_the_numbers_are_those_of_the_run(noise: Path, undisturbed: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(noise.rglob("*"))
    words = tiny.words(tiny.settings())
    assert main(["train", str(noise), *words, "--plan", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (list(tmp_path.iterdir()), sorted(noise.rglob("*"))) == ([], before)
    assert result.keys() == KEYS
    row = tiny.metrics(undisturbed)[-1]
    assert [str(result["epochs"]), str(result["steps"])] == row[:2]
    recipe = load_recipe(undisturbed / "recipe.yaml")
    assert (result["model"], result["states"]) == (recipe.model, recipe.save.keep)
    assert (result["train"], result["val"], result["classes"]) == (39, 9, 3)
    assert (result["timed_steps"], result["evaluations"], result["folds"]) == (STEPS, 2, 1)
    assert result["batch"] == "12 images per step = 6 per device x 1 device x 2 accumulated, on cpu in fp32"
    for size in sizes(undisturbed / "state"):
        assert result["state_bytes"] == pytest.approx(size, rel=0.1)  # without names and record
    assert result["model_bytes"] == pytest.approx(sizes(undisturbed / "best")[0], rel=0.1)
    assert result["seconds"] == pytest.approx(
        result["steps"] * result["step_s"] + result["evaluations"] * result["evaluation_s"]
    )
    assert min(result["step_s"], result["evaluation_s"], result["memory_mib"]) > 0
    assert result["gpu_mib"] is None


def test_lines_for_a_person(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "levit_nano_32", "--epochs", "3", "--batch-size", "12", "--workers", "1", "--folds", "3"]
    assert main(["train", str(photos), *words, "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model:      levit_nano_32 at 32x32 pixels, recipe default"
    assert lines[1] == "images:     30 for training, 15 held out, 3 classes"
    assert lines[3] == "steps:      6 = 3 epochs of 2 steps x 3 folds"
    assert [line.partition(":")[0] for line in lines[4:9]] == ["step", "evaluation", "duration", "memory", "disk"]
    assert lines[6].startswith("duration:   about 0:")


def some(**changes: Any) -> PlannedRun:
    shape = dict(recipe="finetune", model="levit_256", img_size=(224, 192), train=8000, val=2000, classes=9, batch="b")
    length = dict(folds=1, epochs=30, steps_per_epoch=60, steps=1800, evaluations=10, timed_steps=20, workers=4)
    speed = dict(step_s=2.0, data_wait=5.0, evaluation_s=30.0, memory_mib=900, gpu_mib=4000)
    disk = dict(states=2, state_bytes=50 << 20, model_bytes=20 << 20)
    return dataclasses.replace(PlannedRun(**shape, **length, **speed, **disk), **changes)


def test_duration_of_all_folds_and_advice() -> None:
    one, five = dict(some().lines()), dict(some(folds=5, data_wait=35.0).lines())
    assert one["duration"].startswith("about 1:05:00; if it starts now, until 20")
    assert (some(folds=5).seconds, five["duration"][:13]) == (5 * 3900, "about 5:25:00")
    assert one["memory"] == "900 MiB, 4,000 MiB of the GPU"
    assert one["disk"] == "50.0 MiB x 2 states + 20.0 MiB x 2 models"
    assert "advice" not in one
    assert five["advice"].startswith("Training waits 35 % of the time. Make them smaller once: weft data prepare DATA")


def test_fewer_steps_where_they_take_long(photos: Path) -> None:
    settings = {"model": "levit_nano_32", "epochs": 1, "batch_size": 12, "workers": 0}
    planned = planned_run(photos, settings=settings, seconds=0.0, quiet=True)
    assert planned.timed_steps == estimate.LEAST
    assert planned.steps == 3


def test_waiting_comes_in_bursts_and_counts_from_when_all_processes_read() -> None:
    """With four processes that take 4 s for a batch: one of the steps waits, and the next three do not."""
    loader: Any = SimpleNamespace(num_workers=0)

    def times() -> Any:
        for step in range(100):
            loader.num_workers = 4 if step >= 7 else 0
            yield (4.0 if step % 4 == 3 else 0.0) if step > 7 else 50.0, 0.5 + 0.1 * (step == 20)

    result = _steady(times(), loader, Runtime.of("cpu", "fp32"), 18, 60.0, Work("timing"))
    assert result == (1.0, 0.5, 20)


def test_refusals(photos: Path) -> None:
    with pytest.raises(UsageError, match=r"--plan tries training steps; got epochs 0, which has none\."):
        planned_run(photos, recipe="probe", quiet=True)
    with pytest.raises(UsageError, match=r"got none\. Name a folder or `digits`: weft train DATA --plan\."):
        planned_run()


def test_the_number_of_processes_is_that_of_the_whole_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen after a few batches, if all batches of the run would take long to load."""
    paces = []
    step_times = estimate.step_times

    def seen(learner: Any, steps: Any) -> Any:
        paces.append(plans[0].batches.pace.start_s)
        return step_times(learner, steps)

    plans: list[Plan] = []
    build = Plan.build
    monkeypatch.setattr(Plan, "build", lambda plan: [plans.append(plan), build(plan)][1])
    monkeypatch.setattr(estimate, "step_times", seen)
    settings = {"model": "levit_nano_32", "epochs": 100, "batch_size": 12, "workers": "auto"}
    planned_run(photos, settings=settings, seconds=0.0, quiet=True)
    assert paces == [pytest.approx(2.0 * 3 / 300)]


# `weft data bench`


def found(*rates: float, training: float) -> Loading:
    return Loading("levit_256", "cuda:0", "bf16", training, [LoadingRate(*row) for row in enumerate(rates)])


@pytest.mark.parametrize(
    ("result", "enough", "headline"),
    [
        (found(900.0, 1800.0, training=1000.0), 1, "--workers 1 loads as fast as levit_256 trains on cuda:0 in bf16"),
        (found(1000.0, training=1000.0), 0, "--workers 0 loads as fast"),
        (found(100.0, 250.0, 200.0, training=1000.0), None, "with --workers 1, training waits 75 % of the time"),
    ],
)
def test_the_smallest_number_that_loads_as_fast_as_training(result: Loading, enough: int, headline: str) -> None:
    assert result.enough == enough
    assert headline in result.headline()
    assert "1,000 images/s" in result.headline()


def test_rates_of_all_numbers_of_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimate, "available_cores", lambda: 2)
    photos = tiny.paint(tmp_path / "photos", per_class=9)
    words = ["--model", "levit_nano_32", "--seconds", "0.05", "--batch-size", "6", "--quiet", "--json"]
    assert main(["data", "bench", str(photos), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [rate["workers"] for rate in result["rates"]] == [0, 1, 2]
    assert min(result["training"], *(rate["images_per_second"] for rate in result["rates"])) > 0
    assert (result["model"], result["device"], result["precision"]) == ("levit_nano_32", "cpu", "fp32")
    assert list(tmp_path.iterdir()) == [photos]


def test_batches_loaded_in_advance_do_not_count(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves one second with every batch: six images per second, with any number of processes."""
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(estimate, "available_cores", lambda: 2)
    monkeypatch.setattr(estimate, "time_step", lambda *arguments: 0.5)
    result = loading_speed(photos, "levit_nano_32", batch_size=6, seconds=4.0, quiet=True)
    assert [rate.images_per_second for rate in result.rates] == [6.0, 6.0, 6.0]
    assert result.training == 12.0
