"""The precision that `auto` chooses for the machine."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from weft.machine.runtime import Runtime, fastest_precision
from weft.recipes import Recipe, load_recipe
from weft.train import timing, train


def set_bf16(monkeypatch: pytest.MonkeyPatch, *, has: bool) -> None:
    for module in ("weft.machine.processor", "weft.machine.runtime"):
        monkeypatch.setattr(f"{module}.has_bf16", lambda: has)


@pytest.mark.parametrize(("has", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_machine_has_it(has: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bf16(monkeypatch, has=has)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **kwargs: has)
    assert Runtime.of("cpu", "auto").precision == expected
    assert (fastest_precision("cuda"), fastest_precision("mps")) == (expected, "fp32")


@pytest.mark.parametrize(
    ("step", "expected", "reason"),
    [
        (0.05, "bf16", ": a step takes 50 ms in bf16 and 100 ms in fp32."),
        (0.099, "fp32", ": a step takes 99 ms in bf16 and 100 ms in fp32."),
        (math.inf, "fp32", ": a step takes inf ms in bf16 and 100 ms in fp32."),
        (None, "fp32", "."),  # without bf16, no step is timed
    ],
)
def test_auto_is_bf16_only_where_a_step_is_faster_in_it(step, expected, reason, monkeypatch) -> None:
    set_bf16(monkeypatch, has=step is not None)
    times, timed = {"fp32": 0.1, "bf16": step}, []

    def time_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime) -> float | None:
        timed.append(size)
        return times[runtime.precision]

    monkeypatch.setattr(timing, "time_step", time_step)
    recipe = Recipe(model="levit_nano_32", batch_size=16, precision="auto")
    runtime, note = timing.find_precision(recipe, 3, Runtime.of("cpu", "auto"))
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
