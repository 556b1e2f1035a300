"""`make gpu` without a GPU: what it says, what a resumed call measures, and the tables that it writes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from weft.bench.records import read_csv, write_csv
from weft.train.refusals import is_out_of_memory

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
NAMES = ("settings", "report", "run", "parts")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts, imported as `python benchmarks/gpu/run.py` does."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in NAMES}


def speed_row(side: str, way: str, value: str) -> dict[str, str]:
    row = {"run": "m", "side": side, "model": "m" if side == "weft" else "timm m", "way": way, "precision": "bf16"}
    return row | {"batch_size": "16", "images_per_second": value, "device": "a GPU"}


def test_without_a_gpu_it_says_how_to_rehearse(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    assert modules["run"].main() == 2
    assert "no CUDA device" in (output := capsys.readouterr().out)
    assert output.rstrip().endswith("make gpu DEVICE=cpu SCALE=small")
    assert not (tmp_path / "out").exists()


def test_the_parts_are_those_of_the_command(modules: dict[str, ModuleType]) -> None:
    assert tuple(sorted(modules["run"].PART_NAMES)) == tuple(sorted(modules["parts"].PARTS))
    for scale in modules["settings"].SCALES:
        options = modules["settings"].Options("cuda", scale, GPU, None, 100)
        for name, part in modules["parts"].PARTS.items():
            assert part.cells(options), name


def test_a_call_continues_and_a_failure_does_not_stop_it(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = modules["run"]
    measured: list[str] = []

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        if cell == "":
            return ["good", "bad", "long"], None
        measured.append(cell)
        return {"good": ([{"cell": "good"}], None), "bad": (None, "exit code 1: no"), "long": (None, None)}[cell]

    monkeypatch.setattr(run.Session, "_child", child)
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    assert run.Session(options, ["loop"], False).work() == 3
    assert run.Session(options, ["loop"], False).work() == 3
    assert measured == ["good", "bad", "long", "long"]
    run.Session(options, ["loop"], True).work()
    assert measured[4:] == ["bad", "long"]
    assert [row["cell"] for row in read_csv(tmp_path / "loop.csv")] == ["good"]
    assert {"device", "torch", "cuda", "commit"} <= read_csv(tmp_path / "loop.csv")[0].keys()
    assert [row["error"] for row in read_csv(tmp_path / "failures.csv")] == ["exit code 1: no"]
    assert json.loads((tmp_path / "state.json").read_text())["loop"]["good"] == "done"
    assert "exit code 1: no" in (tmp_path / "README.md").read_text()


def test_the_rows_of_a_gpu_appear_once_they_are_measured(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    assert modules["report"].gpu_rows(tmp_path) == ""
    rows = [("weft", "eager", "90"), ("weft", "graphed", "400"), ("peer", "eager", "100"), ("peer", "graphed", "320")]
    write_csv(tmp_path / "speed.csv", [speed_row(*row) for row in rows])
    assert modules["report"].gpu_rows(tmp_path).splitlines()[-1] == (
        "| a GPU | m | 16 | bf16 | 320 (timm, graphed) | 0.90 | 1.25 | 400, graphed |"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_a_gpu(text: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == expected
