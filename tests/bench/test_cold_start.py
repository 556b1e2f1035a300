"""What a deployment needs: a new process of `weft predict`, its memory and its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.bench import cold_start
from weft.bench.cold_start import _run, measure_cold_starts
from weft.bench.worker import Task
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.cli.app import main
from weft.errors import UsageError
from weft.files import folder_size

MEGABYTE = 10**6


def task(model: str, way: str, precision: str = "fp32", peer: int | None = None) -> Task:
    return Task(model, peer, False, way, precision, "cpu", 1)


def test_memory_is_that_of_the_process() -> None:
    mine = bytearray(300 * MEGABYTE)
    seconds, peak = _run([sys.executable, "-c", f"bytearray({100 * MEGABYTE}); import time; time.sleep(0.2)"])
    assert seconds > 0.2
    assert peak is not None
    assert 100 < peak < 200 < len(mine) / MEGABYTE


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match=r"must predict an image; weft predict failed\. .*ZeroDivisionError"):
        _run([sys.executable, "-c", "1 / 0"])


def test_links_need_no_space(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(MEGABYTE))
    (tmp_path / "link").symlink_to(tmp_path / "inner" / "file")
    assert folder_size(tmp_path) == MEGABYTE


def test_what_predict_cannot_run_is_left_out() -> None:
    name = "levit_nano_32"
    assert measure_cold_starts([task(name, "eager"), task(name, "compiled"), task(name, "folded", peer=0)]) == {}


def test_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "levit_nano_32", "--cold-start", "--device", "cuda"]) == 2
    assert "--cold-start is measured on the CPU; got device cuda" in capsys.readouterr().err


@pytest.mark.slow
def test_deployments_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold_start, "ROUNDS", 1)
    folder = str(save_model_dir(create_model("levit_nano_32", num_classes=3).eval(), tmp_path / "model"))
    arguments = ["bench", folder, "--ways", "eager", "folded", "onnx", "--batch-size", "1", "--rounds", "1"]
    assert main([*arguments, "--cold-start", "--json"]) == 0
    eager, folded, onnx = json.loads(capsys.readouterr().out)
    assert (eager["cold_start_s"], eager["peak_mb"], eager["disk_mb"]) == (None, None, None)
    assert 30 < onnx["peak_mb"] < folded["peak_mb"] < 3000  # torch is imported for the latter alone
    assert 0.1 < onnx["cold_start_s"] < folded["cold_start_s"]
    assert onnx["disk_mb"] == pytest.approx(folded["disk_mb"], rel=0.3)
