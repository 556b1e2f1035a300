"""The precision that `auto` chooses for the machine."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from weft.errors import UsageError
from weft.machine.runtime import Runtime, fastest_precision
from weft.recipes import Recipe, load_recipe
from weft.train import train

Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=[True, False])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in ("weft.machine.processor", "weft.machine.runtime"):
        monkeypatch.setattr(f"{module}.has_bf16", lambda: request.param)
    return request.param


def test_auto_is_bf16_where_the_processor_has_it(has_bf16: bool) -> None:
    assert Runtime.of("cpu", "auto").precision == ("bf16" if has_bf16 else "fp32")


def test_auto_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **kwargs: has)
        assert fastest_precision("cuda") == expected
    assert fastest_precision("mps") == "fp32"


@pytest.mark.parametrize(
    ("has_bf16", "step", "expected", "reason"),
    [
        (True, 0.05, "bf16", ": a step takes 50 ms in bf16 and 100 ms in fp32."),
        (True, 0.099, "fp32", ": a step takes 99 ms in bf16 and 100 ms in fp32."),
        (True, math.inf, "fp32", ": a step takes inf ms in bf16 and 100 ms in fp32."),
        (False, None, "fp32", "."),  # no step is timed
    ],
    indirect=["has_bf16"],
)
def test_a_run_records_what_auto_chose(
    has_bf16: bool,
    step: float | None,
    expected: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    times = {"fp32": 0.1, "bf16": step}
    timed: list[int] = []

    def time_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime) -> float | None:
        timed.append(size)
        return times[runtime.precision]

    monkeypatch.setattr("weft.train.timing.time_step", time_step)
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16, "data.folds": None}
    train("digits", model="levit_nano_32", epochs=1, precision="auto", settings=settings, out=tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml").precision == expected
    assert f"Precision: {expected}, chosen for this machine{reason}" in capsys.readouterr().err
    assert timed == ([] if step is None else [16, 16])


@pytest.mark.parametrize("has_bf16", [True], indirect=True)
def test_auto_times_real_steps(has_bf16: bool, tmp_path: Path, capsys: Capture) -> None:
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16}
    train("digits", model="levit_nano_32", epochs=1, precision="auto", settings=settings, out=tmp_path / "run")
    times = re.search(r"a step takes (\d+) ms in bf16 and (\d+) ms in fp32", capsys.readouterr().err)
    assert times is not None
    assert all(int(milliseconds) > 0 for milliseconds in times.groups())


@pytest.mark.parametrize("has_bf16", [False], indirect=True)
def test_training_warns_of_emulated_bf16(has_bf16: bool, tmp_path: Path, capsys: Capture) -> None:
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16}
    train("digits", model="levit_nano_32", epochs=1, precision="bf16", settings=settings, out=tmp_path / "run")
    assert "This processor emulates bf16" in capsys.readouterr().err


def test_an_unknown_precision() -> None:
    with pytest.raises(UsageError, match="precision must be auto, fp32 or bf16; got 'fp16'"):
        Runtime.of("cpu", "fp16")
