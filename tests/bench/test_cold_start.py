"""What a deployment needs: a new process of `weft predict`, its memory and its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.bench import cold_start
from weft.bench.cold_start import _run, measure_cold_starts, size_mb
from weft.bench.worker import Task
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.errors import UsageError

MEGABYTE = 10**6


def task(model: str, way: str, precision: str = "fp32", peer: int | None = None, device: str = "cpu") -> Task:
    return Task(model, peer, False, way, precision, device, 1)


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
    assert size_mb(tmp_path) == 1


def test_what_predict_cannot_run_is_left_out() -> None:
    name = "levit_nano_32"
    tasks = [
        task(name, "eager"),
        task(name, "compiled"),
        task(name, "folded", peer=0),
        task(name, "onnx", device="cuda"),
    ]
    assert measure_cold_starts(tasks) == {}


@pytest.mark.slow
def test_deployments_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "ROUNDS", 1)
    folder = str(save_model_dir(create_model("levit_nano_32", num_classes=3).eval(), tmp_path / "model"))
    tasks = [task("levit_nano_32", "onnx"), task(folder, "folded")]
    measured = measure_cold_starts(tasks)
    assert list(measured) == tasks
    for needs in measured.values():
        assert needs.peak_mb is not None
        assert 30 < needs.peak_mb < 3000
        assert needs.cold_start_s > 0.1
        assert needs.disk_mb > 1
