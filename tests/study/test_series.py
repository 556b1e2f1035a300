"""All runs of a comparison have one split: the series of similar images are looked for once."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft.train
from tests.train.test_series import write_clips
from weft.data import open_data
from weft.data.groups import read_groups
from weft.study.comparison import _group
from weft.study.directory import Directory


def test_series_are_looked_for_once_and_written_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(write_clips(tmp_path / "data"))
    (tmp_path / "study").mkdir()
    directory, splits = Directory(tmp_path / "study", {}), open_data(data)
    file = _group(directory, data, {"optim.lr": 0.1, "data.seed": 1}, splits)
    assert len(read_groups(Path(file))) == 75
    monkeypatch.setattr(weft.train, "find_series", None)
    assert _group(directory, data, {}, splits) == file
    assert _group(directory, data, {"data.group": "none"}, splits) == ""
    directory.decisions["series"] = 0
    assert _group(directory, data, {}, splits) == "none"
