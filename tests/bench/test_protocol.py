"""`weft bench --protocol levit`: the speed protocol of the LeViT paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from weft.bench.peers import merge_batch_norms
from weft.bench.protocol import measure_protocol, protocol_models
from weft.bench.worker import _with_random_statistics
from weft.bench.worker_process import OutOfMemoryError, WorkerProcess
from weft.cli import main
from weft.deploy.verification import relative_difference
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
        turns.append((worker.task.model, batch_size, seconds))
        return [batch_size / speeds[worker.task.model]] * 2

    monkeypatch.setattr(WorkerProcess, "build", lambda worker: None)
    monkeypatch.setattr(WorkerProcess, "turn", turn)
    monkeypatch.setattr(WorkerProcess, "logits", lambda worker, size: np.array([1.0, 2.0]))
    return turns


def test_the_networks_of_the_table() -> None:
    rows = protocol_models("levit")
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
    first, second = measure_protocol("levit", ["LeViT-256", "levit_128s"], seconds=6, rounds=3)
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
    rows = measure_protocol("levit", ["levit_256", "efficientnet_b4"], device="cuda", seconds=1, rounds=1)
    assert [(row.batch_size, row.precision, row.machine) for row in rows] == [
        (512, "amp", "V100"),
        (256, "amp", "V100"),
    ]
    assert rows[0].relative is None  # LeViT-128S is not measured


def test_the_difference_of_logits_that_are_all_zero(measured: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "logits", lambda worker, size: np.zeros(2))
    (row,) = measure_protocol("levit", ["levit_256"], seconds=1, rounds=1)
    assert row.difference == 0


def test_the_table(measured: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    arguments = ["bench", "--protocol", "levit", "levit_128s", "levit_256", "--seconds", "1", "--rounds", "2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2].split() == ["LeViT-256", "16", "50.0", "42.5", "1.176", "0.250", "0.324", "0"]
    assert lines[-1].endswith(f"fp32, torch {torch.__version__}. Paper: Xeon 6138, one thread.")
    assert err.splitlines()[0] == "levit_128s is ready, batch 16, 1 of 2"
    assert err.splitlines()[-1] == "round 2 of 2, images/s: levit_128s 200.0, levit_256 50.0"
    assert main([*arguments, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("model,paper_model,img_size,batch_size,precision,device,threads,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protocol", "levit", "--ways", "eager"], "--protocol levit fixes the settings of a measurement; leave out"),
        (["--protocol", "levit", "--batch-size", "1"], "leave out --batch-size."),
        (["--protocol", "levit", "cvt_13"], "Unknown model of the protocol levit 'cvt_13'."),
        (["--protocol", "levit", "--csv", "--json"], "--json and --csv exclude each other; pass one of them."),
        (["--protocol", "cvt"], "Unknown protocol 'cvt'. Nearest: levit."),
        (["--protocol", "levit", "--seconds", "0"], "seconds must be more than 0 and less than a day; got 0."),
        (["--protocol", "levit", "--device", "cuda"], "device cuda needs a GPU that PyTorch can use; there is none."),
        (["levit_128s", "--seconds", "9"], "--seconds belongs to --protocol"),
        ([], "weft bench needs a MODEL, or --protocol levit; got neither."),
    ],
)
def test_invalid_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *arguments]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_batch_norms_of_timm_are_merged() -> None:
    torch.manual_seed(0)
    model = timm.create_model("efficientnet_b0", num_classes=5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    images = torch.randn(2, 3, 64, 64)
    merged = merge_batch_norms(model, images)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(merged(images), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    alone = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)).eval()
    assert isinstance(merge_batch_norms(alone, images).get_submodule("0"), nn.BatchNorm2d)


def test_batch_norms_of_timms_linear_layers_are_merged() -> None:
    torch.manual_seed(0)
    model = _with_random_statistics(timm.create_model("levit_128s", num_classes=5)).eval()
    images = torch.randn(2, 3, 224, 224)
    merged = merge_batch_norms(model, images)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in merged.modules())
    with torch.no_grad():
        assert relative_difference(merged(images).numpy(), model(images).numpy()) < 1e-4


def test_a_convolution_with_two_readers_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            nn.init.constant_(self.norm.weight, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            maps = self.conv(images)
            return maps + self.norm(maps)

    model = Two().eval()
    assert merge_batch_norms(model, torch.randn(1, 3, 4, 4)) is model


@pytest.mark.slow
def test_networks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["levit_128s", "efficientnet_b0", "deit_tiny_distilled_patch16_224"]
    assert main(["bench", "--protocol", "levit", *models, "--seconds", "0.2", "--rounds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in rows] == models
    for row in rows:
        assert row["calls"] >= 2
        assert row["seconds"] >= 0.2
        assert row["difference"] < 1e-5
