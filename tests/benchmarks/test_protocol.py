"""benchmarks/speed/protocol.py: the speed protocol of the LeViT paper."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.common.records import read_csv
from benchmarks.speed import protocol
from benchmarks.speed.protocol import measure_protocol, protocol_models

from weft.bench.subject import OutOfMemoryError
from weft.bench.worker_process import WorkerProcess
from weft.errors import UsageError


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Replace worker processes by known speeds; the list receives the turns: model, batch size, seconds."""
    turns: list[tuple[str, int, float]] = []
    speeds = {"levit_128s": 200, "levit_256": 50, "efficientnet_b4": 4}

    def turn(worker: WorkerProcess, batch_size: int, *, calls: int, seconds: float, warm_up: float) -> list[float]:
        if batch_size > 512:
            raise OutOfMemoryError("too large")
        assert warm_up == pytest.approx(seconds / 6)
        turns.append((worker.model, batch_size, seconds))
        return [batch_size / speeds[worker.model]] * 2

    monkeypatch.setattr(WorkerProcess, "build", lambda worker: None)
    monkeypatch.setattr(WorkerProcess, "turn", turn)
    monkeypatch.setattr(WorkerProcess, "logits", lambda worker, size: np.array([1.0, 2.0]))
    return turns


def test_the_networks_of_the_table() -> None:
    rows = protocol_models()
    assert len(rows) == 12
    assert {name: row.size for name, row in rows.items() if row.size != 224} == {
        "efficientnet_b1": 240,
        "efficientnet_b2": 260,
        "efficientnet_b3": 300,
        "efficientnet_b4": 380,
    }


@pytest.mark.parametrize(
    ("machine", "name", "paper"),
    [("x86_64", "Xeon 6138, one thread", 42.5), ("aarch64", "Graviton2, one thread", 16.4), ("riscv64", None, None)],
)
def test_rows_next_to_the_paper(
    machine: str, name: str | None, paper: float | None, measured: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    first, second = measure_protocol(["LeViT-256", "levit_128s"], seconds=6, rounds=3)
    assert (first.model, second.model) == ("levit_128s", "levit_256")
    assert (second.paper_model, second.machine, second.paper) == ("LeViT-256", name, paper)
    assert (second.batch_size, second.precision, second.threads, second.calls) == (16, "fp32", 1, 6)
    assert second.images_per_second == pytest.approx(50)
    assert second.relative == pytest.approx(0.25)
    if paper:
        assert second.ratio == pytest.approx(50 / paper)
        assert second.paper_relative == pytest.approx({42.5: 42.5 / 131.1, 16.4: 16.4 / 39.1}[paper])
    assert measured[2:] == [("levit_128s", 16, 2), ("levit_256", 16, 2)] * 3  # they alternate


def test_a_batch_is_halved_until_memory_suffices(measured: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    rows = measure_protocol(["levit_256", "efficientnet_b4"], device="cuda", seconds=1, rounds=1)
    assert [(row.batch_size, row.precision, row.machine) for row in rows] == [
        (512, "amp", "V100"),
        (256, "amp", "V100"),
    ]
    assert rows[0].relative is None  # LeViT-128S is not measured


def test_the_difference_of_logits_that_are_all_zero(measured: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "logits", lambda worker, size: np.zeros(2))
    (row,) = measure_protocol(["levit_256"], seconds=1, rounds=1)
    assert row.difference == 0


def test_the_table(
    measured: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    arguments = ["levit_128s", "levit_256", "--seconds", "1", "--rounds", "2", "--csv", str(tmp_path / "rows.csv")]
    monkeypatch.setattr(sys, "argv", ["protocol.py", *arguments])
    protocol.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "levit_128s is ready, batch 16, 1 of 2"
    assert lines[3] == "round 2 of 2, images/s: levit_128s 200.0, levit_256 50.0"
    assert lines[6].split() == ["LeViT-256", "16", "50.0", "42.5", "1.176", "0.250", "0.324", "0"]
    assert lines[-1].endswith(f"fp32, torch {torch.__version__}. Paper: Xeon 6138, one thread.")
    assert list(read_csv(tmp_path / "rows.csv")[0])[:4] == ["model", "paper_model", "img_size", "batch_size"]


def test_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Unknown model of the protocol 'cvt_13'\."):
        measure_protocol(["cvt_13"])


@pytest.mark.nightly
@pytest.mark.slow
def test_networks_are_measured() -> None:
    models = ["levit_128s", "efficientnet_b0", "deit_tiny_distilled_patch16_224"]
    rows = [asdict(row) for row in measure_protocol(models, seconds=0.2, rounds=2)]
    assert [row["model"] for row in rows] == models
    for row in rows:
        assert row["calls"] >= 2
        assert row["seconds"] >= 0.2
        assert row["difference"] < 1e-5
