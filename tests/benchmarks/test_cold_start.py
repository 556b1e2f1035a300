"""benchmarks/deploy/cold_start.py: a new process of `weft predict`, its memory and its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.deploy.cold_start import measure, run

from weft.errors import UsageError
from weft.files import folder_size

MEGABYTE = 10**6


def test_memory_is_that_of_the_process() -> None:
    mine = bytearray(300 * MEGABYTE)
    seconds, peak = run([sys.executable, "-c", f"bytearray({100 * MEGABYTE}); import time; time.sleep(0.2)"])
    assert seconds > 0.2
    assert 100 < peak < 200 < len(mine) / MEGABYTE


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match=r"must predict an image; weft predict failed\. .*ZeroDivisionError"):
        run([sys.executable, "-c", "1 / 0"])


def test_links_need_no_space(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(MEGABYTE))
    (tmp_path / "link").symlink_to(tmp_path / "inner" / "file")
    assert folder_size(tmp_path) == MEGABYTE


@pytest.mark.nightly
@pytest.mark.slow
def test_deployments_are_measured() -> None:
    rows = measure(["levit_nano_32"], [("folded", "fp32"), ("onnx", "fp32")], rounds=1)
    folded, onnx = ({key: float(row[key]) for key in ("cold_start_s", "peak_mb", "disk_mb")} for row in rows)
    assert 30 < onnx["peak_mb"] < folded["peak_mb"] < 3000  # torch is imported for the latter alone
    assert 0.1 < onnx["cold_start_s"] < folded["cold_start_s"]
    assert onnx["disk_mb"] == pytest.approx(folded["disk_mb"], rel=0.3)
