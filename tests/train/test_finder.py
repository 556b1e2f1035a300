"""What is found by trying: a batch that is fast, a rate at which the loss falls."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.conftest import SHORT
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.data.order import Key
from weft.errors import DivergedError, UsageError
from weft.machine.runtime import Runtime
from weft.recipes import load_recipe
from weft.train import find_lr, train
from weft.train import timing as finder
from weft.train.distillation import Teacher
from weft.train.loop import Learner
from weft.train.lr_finder import LrPoint, _steepest
from weft.train.timing import find_batch_size, find_precision

CPU = Runtime.of("cpu")


def found(speeds: dict[int, float], monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **settings: object) -> int:
    """The batch size where a step of so many images takes that long."""
    tried = []

    def seconds(recipe: object, size: int, num_classes: int, runtime: Runtime, with_teacher: bool) -> float:
        tried.append(size)
        return size / speeds[size] if size in speeds else float("inf")

    monkeypatch.setattr(finder, "time_step", seconds)
    recipe = load_recipe(overrides=[(key.replace("__", "."), value) for key, value in settings.items()])
    size, output = find_batch_size(recipe, 10, 1000, Runtime(torch.device(device), "fp32"))
    assert f"Batch size {size}: " in output
    return size


def test_a_cpu_takes_the_smallest_that_is_about_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found({8: 50, 16: 90, 32: 98, 64: 100, 128: 99, 256: 90, 512: 80}, monkeypatch) == 32


class OneOfTwo(Runtime):
    """A process of two, of which the other never comes."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        assert self.world == 1, "waits for the other process in every backward pass"
        return model

    def sum(self, values: list[float]) -> list[float]:
        assert self.world == 1, "waits for the other process"
        return values

    max = sum

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_process_without_memory_leaves_no_other_waiting(has_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails in the middle of a step takes no further part in it, so no process may wait for another."""
    learn, steps = Learner.train_step, []

    def step(self: Learner, *arguments: Any) -> Any:
        steps.append(1)
        if not has_memory and len(steps) == 2:
            raise MemoryError
        return learn(self, *arguments)

    monkeypatch.setattr(Learner, "train_step", step)
    recipe = load_recipe(overrides=[("model", "levit_nano_32"), ("model_args.depth", [1, 1, 1])])
    seconds = finder.time_step(recipe, 4, 3, OneOfTwo(CPU.device, "fp32", world=2))
    assert math.isfinite(seconds) == has_memory


def test_a_gpu_takes_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found({8: 50, 16: 90, 32: 98, 64: 100, 128: 99}, monkeypatch, "cuda") == 128


def test_where_nothing_fits_the_smallest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found({}, monkeypatch, "cuda") == 8


def test_accumulating_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found({8: 100, 16: 100, 32: 100, 64: 100, 128: 100}, monkeypatch, accumulate=4) == 32


@pytest.mark.parametrize(
    ("settings", "runs_teacher"),
    [
        ({}, False),
        ({"distill.teacher": "levit_nano_32"}, True),
        ({"distill.teacher": "directory"}, True),
        ({"distill.teacher": "levit_nano_32", "distill.cache": True, "augment.crop": "none"}, False),
    ],
)
def test_a_step_includes_the_teacher_unless_its_outputs_are_cached(
    settings: dict[str, object], runs_teacher: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("distill.teacher") == "directory":
        folder = save_model_dir(create_model("levit_nano_32", num_classes=10), tmp_path / "teacher")
        settings = {"distill.teacher": str(folder)}
    sizes: list[int] = []
    forward = Teacher.__call__

    def counted(self: Teacher, images: torch.Tensor, keys: Sequence[Key] = ()) -> torch.Tensor:
        sizes.append(len(images))
        return forward(self, images, keys)

    monkeypatch.setattr(Teacher, "__call__", counted)
    monkeypatch.setattr(finder, "BATCH_SIZES", (8,))
    recipe = load_recipe(
        overrides=[
            ("model", "ceit_nano_32"),
            ("augment.hflip", False),
            ("augment.color_jitter", 0.0),
            *settings.items(),
        ]
    )
    recipe = dataclasses.replace(recipe, epochs=1)
    _, output = find_batch_size(recipe, 10, 100, CPU)
    assert set(sizes) == ({8} if runs_teacher else set())
    assert ("with the teacher" in output) == runs_teacher


def test_training_with_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(photos, out=tmp_path / "run", **{**SHORT, "batch_size": "auto", "epochs": 1, "quiet": False})
    size = load_recipe(result.out / "recipe.yaml").batch_size
    shown = capsys.readouterr().err
    found = re.search(r"Batch size (8|16|32): \1 per device, the smallest of nearly the highest throughput", shown)
    assert found is not None
    assert size in (6, 12, 18), "each found size leaves 4 of 36 images over; the nearest smaller ones leave none"
    assert f"Batch size {size}: an epoch uses 36 of 36 training images; with {found[1]}, 32." in shown


@pytest.mark.slow
def test_a_rate_is_suggested(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = find_lr(photos, "levit_nano_32", batch_size=12, steps=60, quiet=True)
    assert 1e-5 < finding.lr < 0.3
    rates = [point.lr for point in finding.points]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e-7)
    assert list(tmp_path.iterdir()) == []


def test_a_small_dataset_with_mixing_has_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.train.timing.time_step", lambda recipe, size, *args, **more: size)
    for images, mixup, expected in ((7, 0.8, 6), (7, 0.0, 7), (1, 0.8, 2), (100, 0.8, 8)):
        recipe = load_recipe(None, [("augment.mixup", mixup)])
        assert find_batch_size(recipe, 2, images, Runtime.of("cpu", "fp32"))[0] == expected


def test_a_first_loss_that_is_not_finite(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="steps must be at least 1; got 0"):
        find_lr(photos, "levit_nano_32", batch_size=12, steps=0, quiet=True)
    result = SimpleNamespace(is_finite=False, loss=float("nan"))
    monkeypatch.setattr("weft.train.loop.Learner.train_step", lambda *args: result)
    with pytest.raises(DivergedError, match="The loss of the first step must be finite"):
        find_lr(photos, "levit_nano_32", batch_size=12, steps=5, quiet=True)


def test_the_steepest_fall_before_the_lowest_point() -> None:
    losses = [3.0, 2.99, 2.9, 2.0, 1.9, 1.85, 5.0]
    points = [LrPoint(10.0**place, loss, loss) for place, loss in enumerate(losses)]
    assert _steepest(points) == 1e3 or _steepest(points) == 1e2
    assert _steepest([LrPoint(1.0, 2.0, 2.0), LrPoint(10.0, 9.0, 9.0)]) == pytest.approx(0.1)


@pytest.mark.slow
def test_on_the_command_line(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(photos), "--model", "levit_nano_32", "--batch-size", "12", "--find-lr", "--quiet"]
    assert main(arguments) == 0
    assert "suggested: --set optim.lr=" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]


def test_the_precision_of_a_recipe_in_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weft.train.timing.time_step",
        lambda recipe, size, classes, runtime: {"fp32": 1.0, "bf16": 2.0}[runtime.precision],
    )
    recipe = load_recipe(overrides=[("steps", 5), ("batch_size", 8)])
    assert find_precision(recipe, 3, Runtime(CPU.device, "bf16"))[0].precision == "fp32"
