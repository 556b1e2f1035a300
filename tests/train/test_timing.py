"""What is found by trying steps: a batch that is fast, a precision, a rate at which the loss falls."""

from __future__ import annotations

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
from tests.train.tiny import recipe_of
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.data.order import Key
from weft.errors import DivergedError, UsageError
from weft.machine.runtime import Runtime, fastest_precision
from weft.recipes import Recipe, load_recipe
from weft.train import find_lr, timing, train
from weft.train.distillation import Teacher
from weft.train.loop import Learner
from weft.train.lr_finder import LrPoint, _steepest
from weft.train.timing import find_batch_size, find_precision

CPU = Runtime.of("cpu")
FLAT = dict.fromkeys((8, 16, 32, 64, 128), 100)


@pytest.mark.parametrize(
    ("speeds", "device", "settings", "num_images", "expected"),
    [
        ({8: 50, 16: 90, 32: 98, 64: 100, 128: 99, 256: 90, 512: 80}, "cpu", {}, 1000, 32),  # the smallest of the fast
        ({8: 50, 16: 90, 32: 98, 64: 100, 128: 99}, "cuda", {}, 1000, 128),  # the largest that fits
        ({}, "cuda", {}, 1000, 8),  # none fits
        (FLAT, "cpu", {"accumulate": 4}, 1000, 32),
        (FLAT, "cpu", {"augment__mixup": 0.8}, 100, 8),
        # fewer images than the smallest size; mixing takes pairs
        (dict.fromkeys(range(9), 1), "cpu", {"augment__mixup": 0.8}, 7, 6),
        (dict.fromkeys(range(9), 1), "cpu", {}, 7, 7),
        (dict.fromkeys(range(9), 1), "cpu", {"augment__mixup": 0.8}, 1, 2),
    ],
    ids=str,
)
def test_the_batch_size_that_is_found(speeds, device, settings, num_images, expected, monkeypatch):
    """Where a step of a size has that many images a second; a size without speed does not fit."""

    def seconds(recipe: object, size: int, *_: object, **__: object) -> float:
        return size / speeds[size] if size in speeds else math.inf

    monkeypatch.setattr(timing, "time_step", seconds)
    size, said = find_batch_size(recipe_of(**settings), 10, num_images, Runtime(torch.device(device), "fp32"))
    assert size == expected
    assert f"Batch size {size}: " in said


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
    seconds = timing.time_step(recipe, 4, 3, OneOfTwo(CPU.device, "fp32", world=2))
    assert math.isfinite(seconds) == has_memory


@pytest.mark.parametrize(
    ("settings", "runs_teacher"),
    [
        ({}, False),
        ({"distill__teacher": "levit_nano_32"}, True),
        ({"distill__teacher": "directory"}, True),
        ({"distill__teacher": "levit_nano_32", "distill__cache": True, "augment__crop": "none"}, False),
    ],
)
def test_a_step_includes_the_teacher_unless_its_outputs_are_cached(settings, runs_teacher, tmp_path, monkeypatch):
    if settings.get("distill__teacher") == "directory":
        folder = save_model_dir(create_model("levit_nano_32", num_classes=10), tmp_path / "teacher")
        settings = {"distill__teacher": str(folder)}
    sizes: list[int] = []
    forward = Teacher.__call__

    def counted(self: Teacher, images: torch.Tensor, keys: Sequence[Key] = ()) -> torch.Tensor:
        sizes.append(len(images))
        return forward(self, images, keys)

    monkeypatch.setattr(Teacher, "__call__", counted)
    monkeypatch.setattr(timing, "BATCH_SIZES", (8,))
    still = {"augment__hflip": False, "augment__color_jitter": 0.0, "epochs": 1}
    _, said = find_batch_size(recipe_of(model="ceit_nano_32", **still, **settings), 10, 100, CPU)
    assert set(sizes) == ({8} if runs_teacher else set())
    assert ("with the teacher" in said) == runs_teacher


def test_a_run_takes_the_nearest_size_that_leaves_fewer_images_out(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "time_step", lambda recipe, size, *_, **__: size / FLAT.get(size, 1))
    result = train(photos, out=tmp_path / "run", **{**SHORT, "batch_size": "auto", "epochs": 1, "quiet": False})
    shown = capsys.readouterr().err
    assert "Batch size 8: 8 per device, the smallest of nearly the highest throughput" in shown
    assert "Batch size 6: an epoch uses 36 of 36 training images; with 8, 32." in shown
    assert load_recipe(result.out / "recipe.yaml").batch_size == 6


# Precision


def set_bf16(monkeypatch: pytest.MonkeyPatch, *, has: bool) -> None:
    for module in ("weft.machine.processor", "weft.machine.runtime"):
        monkeypatch.setattr(f"{module}.has_bf16", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has)


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_machine_has_it(has: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bf16(monkeypatch, has=has)
    assert Runtime.of("cpu", "auto").precision == expected
    assert (fastest_precision("cuda"), fastest_precision("mps")) == (expected, "fp32")


@pytest.mark.parametrize("length", [{}, {"steps": 5}])
@pytest.mark.parametrize(
    ("step", "expected", "reason"),
    [
        (0.05, "bf16", ": a step takes 50 ms in bf16 and 100 ms in fp32."),
        (0.099, "fp32", ": a step takes 99 ms in bf16 and 100 ms in fp32."),
        (math.inf, "fp32", ": a step takes inf ms in bf16 and 100 ms in fp32."),
        (None, "fp32", "."),  # without bf16, no step is timed
    ],
)
def test_auto_is_bf16_only_where_a_step_is_faster_in_it(length, step, expected, reason, monkeypatch) -> None:
    set_bf16(monkeypatch, has=step is not None)
    times, timed = {"fp32": 0.1, "bf16": step}, []

    def time_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime) -> float | None:
        timed.append(size)
        return times[runtime.precision]

    monkeypatch.setattr(timing, "time_step", time_step)
    recipe = recipe_of(model="levit_nano_32", batch_size=16, precision="auto", **length)
    runtime, note = find_precision(recipe, 3, Runtime.of("cpu", "auto"))
    assert (runtime.precision, note) == (expected, f"Precision: {expected}, chosen for this machine{reason}")
    assert timed == ([] if step is None else [16, 16])


@pytest.mark.parametrize(
    ("has", "precision", "said"),
    [
        (
            True,
            "auto",
            r"Precision: (\w+), .* a step takes [1-9]\d* ms in bf16 and [1-9]\d* ms in fp32",
        ),  # of real steps
        (False, "bf16", "This processor emulates (bf16)"),
    ],
)
def test_a_run_says_and_records_its_precision(has, precision, said, tmp_path: Path, monkeypatch, capsys) -> None:
    set_bf16(monkeypatch, has=has)
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16, "data.folds": None}
    out = tmp_path / "run"
    train("digits", model="levit_nano_32", epochs=1, precision=precision, settings=settings, out=out)
    match = re.search(said, capsys.readouterr().err)
    assert match is not None
    assert match[1] == load_recipe(out / "recipe.yaml").precision


# Learning rate


@pytest.mark.slow
def test_a_rate_is_suggested(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(photos), "--model", "levit_nano_32", "--batch-size", "12", "--find-lr", "--quiet"]
    assert main(arguments) == 0
    assert "suggested: --set optim.lr=" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1e-5 < found["lr"] < 0.3
    rates = [point["lr"] for point in found["points"]]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e-7)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_without_a_step_or_a_finite_loss_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"model": "levit_nano_32", "batch_size": 12, "quiet": True}
    with pytest.raises(UsageError, match="steps must be at least 1; got 0"):
        find_lr(photos, steps=0, **arguments)
    with pytest.raises(UsageError, match="--find-lr tries training steps; got epochs 0"):
        find_lr(photos, quiet=True, recipe="probe", epochs=0)
    result = SimpleNamespace(is_finite=False, loss=float("nan"))
    monkeypatch.setattr(Learner, "train_step", lambda *args: result)
    with pytest.raises(DivergedError, match="The loss of the first step must be finite"):
        find_lr(photos, steps=5, **arguments)


def test_the_rate_of_the_steepest_fall_before_the_lowest_point() -> None:
    losses = [3.0, 2.99, 2.9, 2.0, 1.9, 1.85, 5.0]
    points = [LrPoint(10.0**place, loss, loss) for place, loss in enumerate(losses)]
    assert _steepest(points) == 1e3  # the slope from 2.9 to 1.9 around it
    assert _steepest([LrPoint(1.0, 2.0, 2.0), LrPoint(10.0, 9.0, 9.0)]) == pytest.approx(0.1)
