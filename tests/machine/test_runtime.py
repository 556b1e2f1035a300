"""Devices and number formats of a run, and a run of one process."""

from __future__ import annotations

import pytest
import torch

from weft.errors import UsageError
from weft.machine.runtime import Runtime


def test_auto_takes_a_gpu_of_cuda_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a Mac is used only by request."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Runtime.of("auto").device == torch.device("cuda")
    assert Runtime.of("cpu").device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Runtime.of("auto").device == torch.device("cpu")
    assert Runtime.of("mps").device == torch.device("mps")


@pytest.mark.parametrize(
    ("arguments", "processes", "message"),
    [
        (("gpu", "fp32"), 1, "device must be auto, cpu, cuda or mps; got 'gpu'"),
        (("cpu", "fp16"), 1, "auto, fp32 or bf16; got 'fp16'"),
        (("cuda", "fp32"), 1, r"device cuda needs a GPU .* Pass --device cpu"),
        (("mps", "fp32"), 1, r"device mps needs the GPU of a Mac .* Pass --device cpu"),
        (("mps", "bf16"), 1, "precision must be fp32 on device mps; got bf16"),
        (("mps", "fp32"), 2, "device mps runs in one process"),
    ],
)
def test_a_device_or_precision_that_cannot_be_used_is_refused(arguments, processes, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "needs the GPU" not in message)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes > 1:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UsageError, match=message):
        Runtime.of(*arguments)


def test_one_process_after_another_format() -> None:
    for precision in ("fp32", "bf16", "fp32"):
        one = Runtime.of("cpu", precision)
        assert (one.rank, one.world, one.is_main) == (0, 1, True)
        assert (one.sum([1.0, 2.0]), one.max([3.0]), one.gather("x")) == ([1.0, 2.0], [3.0], ["x"])
