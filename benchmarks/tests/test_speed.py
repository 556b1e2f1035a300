"""Equal settings of weft and its peers, the protocol of the LeViT paper, and the start of a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from benchmarks.common import ways as ways_module
from benchmarks.common.peers import build_peer, merge_batch_norms, peers_of
from benchmarks.common.records import read_csv
from benchmarks.common.ways import IN_TORCH, settings_of, timed_with_peak
from benchmarks.deploy.cold_start import run
from benchmarks.speed import protocol
from benchmarks.speed.protocol import measure_protocol, protocol_models
from torch import nn

import weft
from weft.bench.cost import cost
from weft.bench.worker import OutOfMemoryError, Subject, with_random_statistics
from weft.bench.worker_process import WorkerProcess
from weft.deploy.verification import relative_difference
from weft.errors import UsageError
from weft.files import folder_size

BatchNorm = nn.modules.batchnorm._BatchNorm


def test_weft_and_its_peers_run_under_equal_settings() -> None:
    """In every way that both have: the same precisions and allocators."""
    ways, precisions, allocators = ("eager", "folded", "compiled", "openvino"), ("fp32", "bf16"), ("default", "keep")
    for model in ("levit_256", "cvt_13", "ceit_tiny_patch16_224"):
        settings = settings_of(model, ways, precisions, allocators)
        sides: dict[Any, set[tuple[str, ...]]] = {one["peer"]: set() for one in settings}
        for one in settings:
            if one["way"] != "folded":
                sides[one["peer"]].add((one["way"], one["precision"], one["allocator"]))
        assert len(sides) >= 2
        assert all(side == sides[None] for side in sides.values()), model
        assert {one["allocator"] for one in settings if one["way"] == "openvino"} == {"default"}
        kept = {(one["way"], one["precision"]) for one in settings if one["allocator"] == "keep"}
        assert kept == {(way, precision) for way in IN_TORCH for precision in precisions}


@pytest.mark.parametrize("way", ["eager", "folded", "compiled"])
def test_the_batch_norms_of_a_peer_are_merged_as_those_of_weft(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way except eager."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    for peer in (None, 0):
        model: Any = ways_module.build("levit_128s", way, "fp32", "cpu", peer=peer, peers=True).call
        assert any(isinstance(module, BatchNorm) for module in model.modules()) == (way == "eager")


@pytest.mark.parametrize(("name", "count"), [("cvt_13", 2), ("levit_256", 2), ("ceit_tiny_patch16_224", 1)])
def test_peers_are_of_the_same_cost(name: str, count: int) -> None:
    """To a tenth, as vit-pytorch leaves some layers out; DeiT, which is not the same network, to an eighth."""
    with torch.device("meta"):
        own, peers = cost(weft.create_model(name), 224), [build_peer(peer).eval() for peer in peers_of(name)]
        assert len(peers) == count
        for peer in peers:
            assert cost(peer, 224).macs == pytest.approx(own.macs, rel=0.125)


@pytest.mark.parametrize(("name", "size"), [("efficientnet_b0", 64), ("levit_128s", 224)])
def test_merged_batch_norms_of_timm_change_no_output(name: str, size: int) -> None:
    model = with_random_statistics(timm.create_model(name, num_classes=5)).eval()
    images = torch.randn(2, 3, size, size)
    merged = merge_batch_norms(model, images)
    assert not any(isinstance(module, BatchNorm) for module in merged.modules())
    with torch.no_grad():
        assert relative_difference(merged(images).numpy(), model(images).numpy()) < 1e-4


class TwoReaders(nn.Module):
    """A convolution whose output is not only read by its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        nn.init.constant_(self.norm.weight, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.conv(images)
        return maps + self.norm(maps)


@pytest.mark.parametrize("model", [TwoReaders(), nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))])
def test_a_batch_norm_without_a_convolution_of_its_own_stays(model: nn.Module) -> None:
    merged = merge_batch_norms(model.eval(), torch.randn(1, 3, 4, 4))
    assert any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())


def test_the_memory_of_a_gpu_is_measured_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: steps.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**21)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(ways_module, "SECONDS", 0)
    monkeypatch.setattr(ways_module, "CALLS", 1)
    subject = Subject(lambda images: (steps.append("call"), images)[1], "eager", "fp32", "cuda", (3, 4, 4))
    assert timed_with_peak(subject, 1)[1] == 2
    assert steps == ["call", "call", "reset", "call", "call"]  # each time is behind a warm-up
    assert timed_with_peak(subject._replace(device="cpu"), 1)[1] is None


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


@pytest.mark.parametrize(
    ("machine", "name", "paper", "relative"),
    [
        ("x86_64", "Xeon 6138, one thread", 42.5, 42.5 / 131.1),
        ("aarch64", "Graviton2, one thread", 16.4, 16.4 / 39.1),
        ("riscv64", None, None, None),
    ],
)
def test_rows_of_the_protocol_stand_next_to_the_paper(machine, name, paper, relative, measured, monkeypatch):
    assert len(protocol_models()) == 12
    monkeypatch.setattr("platform.machine", lambda: machine)
    first, second = measure_protocol(["LeViT-256", "levit_128s"], seconds=6, rounds=3)
    assert (first.model, second.model) == ("levit_128s", "levit_256")
    assert (second.paper_model, second.machine, second.paper) == ("LeViT-256", name, paper)
    assert (second.batch_size, second.precision, second.threads, second.calls) == (16, "fp32", 1, 6)
    assert (second.images_per_second, second.relative) == (pytest.approx(50), pytest.approx(0.25))
    if paper:
        assert (second.ratio, second.paper_relative) == (pytest.approx(50 / paper), pytest.approx(relative))
    assert measured[2:] == [("levit_128s", 16, 2), ("levit_256", 16, 2)] * 3  # they alternate
    with pytest.raises(UsageError, match=r"Unknown model of the protocol 'cvt_13'\."):
        measure_protocol(["cvt_13"])


def test_a_batch_is_halved_until_memory_suffices(measured: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    rows = measure_protocol(["levit_256", "efficientnet_b4"], device="cuda", seconds=1, rounds=1)
    assert [(row.batch_size, row.precision, row.machine) for row in rows] == [
        (512, "amp", "V100"),
        (256, "amp", "V100"),
    ]
    assert rows[0].relative is None  # LeViT-128S is not measured


def test_the_table_of_the_protocol(measured, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    arguments = ["levit_128s", "levit_256", "--seconds", "1", "--rounds", "2", "--csv", str(tmp_path / "rows.csv")]
    monkeypatch.setattr(sys, "argv", ["protocol.py", *arguments])
    protocol.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[6].split() == ["LeViT-256", "16", "50.0", "42.5", "1.176", "0.250", "0.324", "0"]
    assert lines[-1].endswith(f"fp32, torch {torch.__version__}. Paper: Xeon 6138, one thread.")
    assert list(read_csv(tmp_path / "rows.csv")[0])[:4] == ["model", "paper_model", "img_size", "batch_size"]


def test_the_memory_of_a_cold_start_is_that_of_the_process() -> None:
    mine = bytearray(300 * 10**6)
    seconds, peak = run([sys.executable, "-c", f"bytearray({100 * 10**6}); import time; time.sleep(0.2)"])
    assert seconds > 0.2
    assert 100 < peak < 200 < len(mine) / 10**6
    with pytest.raises(UsageError, match=r"must predict an image; weft predict failed\. .*ZeroDivisionError"):
        run([sys.executable, "-c", "1 / 0"])


def test_links_need_no_space(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to(tmp_path / "inner" / "file")
    assert folder_size(tmp_path) == 1000
