"""benchmarks/common: networks of other libraries, and further ways to run a network in a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from benchmarks.common import ways as ways_module
from benchmarks.common.peers import build_peer, merge_batch_norms, peers_of
from benchmarks.common.ways import IN_TORCH, settings_of, timed_with_peak, worker
from torch import nn

import weft
from weft.bench.cost import cost
from weft.bench.subject import Subject
from weft.bench.worker import with_random_statistics
from weft.deploy.verification import relative_difference
from weft.errors import UsageError


def test_weft_and_its_peers_run_under_equal_settings() -> None:
    """In every way that both have: the same precisions and allocators."""
    ways, precisions, allocators = ("eager", "folded", "compiled", "openvino"), ("fp32", "bf16"), ("default", "keep")
    for model in ("levit_256", "cvt_13", "ceit_tiny_patch16_224"):
        settings = settings_of(model, ways, precisions, allocators)
        sides = {
            peer: {
                (one["way"], one["precision"], one["allocator"])
                for one in settings
                if one["peer"] == peer and one["way"] != "folded"
            }
            for peer in {one["peer"] for one in settings}
        }
        assert len(sides) >= 2
        assert all(side == sides[None] for side in sides.values()), model
        assert {one["allocator"] for one in settings if one["way"] == "openvino"} == {"default"}
        kept = {(one["way"], one["precision"]) for one in settings if one["allocator"] == "keep"}
        assert kept == {(way, precision) for way in IN_TORCH for precision in precisions}


@pytest.mark.slow
def test_an_allocator_that_cannot_be_set_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    process = worker("levit_nano_32", "eager", "fp32", folder=tmp_path, threads=1, allocator="keep")
    with process, pytest.raises(UsageError, match=r"allocator keep needs glibc and an environment without MALLOC_\*"):
        process.build()


def test_the_memory_of_a_gpu_is_measured_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: steps.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**21)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(ways_module, "SECONDS", 0)
    monkeypatch.setattr(ways_module, "CALLS", 1)

    def call(images: torch.Tensor) -> torch.Tensor:
        steps.append("call")
        return images

    subject = Subject(call, "eager", "fp32", "cuda", (3, 4, 4))
    assert timed_with_peak(subject, 1)[1] == 2
    assert steps == ["call", "call", "reset", "call", "call"]  # each time is behind a warm-up
    assert timed_with_peak(subject._replace(device="cpu"), 1)[1] is None


@pytest.mark.parametrize("way", ["eager", "folded", "compiled"])
def test_the_batch_norms_of_a_peer_are_merged_as_those_of_weft(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way except eager."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    for peer in (None, 0):
        model: Any = ways_module.build("levit_128s", way, "fp32", "cpu", peer=peer, peers=True).call
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        assert bool(norms) == (way == "eager")


@pytest.mark.slow_except("ceit_tiny_patch16_224-1")
@pytest.mark.parametrize(("name", "count"), [("cvt_13", 2), ("levit_256", 2), ("ceit_tiny_patch16_224", 1)])
def test_peers_are_of_the_same_cost(name: str, count: int) -> None:
    """To a tenth, as vit-pytorch leaves some layers out; DeiT, which is not the same network, to an eighth."""
    own, peers = cost(weft.create_model(name), 224), peers_of(name)
    assert len(peers) == count
    for peer in peers:
        assert cost(build_peer(peer).eval(), 224).macs == pytest.approx(own.macs, rel=0.125)


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
    model = with_random_statistics(timm.create_model("levit_128s", num_classes=5)).eval()
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
