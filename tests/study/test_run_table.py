"""runs.csv: what is written is read again."""

from __future__ import annotations

from pathlib import Path

from weft.study.run_table import FinishedRun, read_runs, write_runs


def test_names_come_back_as_they_are(tmp_path: Path) -> None:
    names = ["=a", "-b", "@c", "+d", "plain", "'quoted"]
    runs = [
        FinishedRun(variant=name, seed=0, img_size=None, top1=50.0, params=1, macs=1, seconds=1.0) for name in names
    ]
    write_runs(tmp_path / "runs.csv", runs)
    assert [run.variant for run in read_runs(tmp_path / "runs.csv")] == names
