"""All runs of a comparison or study have one split: the series of similar images are looked for once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.test_series import write_clips
from tests.train.tiny import paint
from weft.data.groups import read_groups
from weft.study.directory import Directory
from weft.study.plan import ResolvedVariant
from weft.study.run import _grouped
from weft.train import series as module


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    (tmp_path / "study").mkdir()
    return Directory(tmp_path / "study", {})


def test_series_are_looked_for_once_and_written_for_all_runs(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(write_clips(tmp_path / "data"))
    settings: dict[str, Any] = {"optim.lr": 0.1, "data.train_fraction": 0.5}
    file = directory.group_of(data, None, settings)
    assert len(read_groups(Path(file))) == 75
    monkeypatch.setattr(module, "find_series", None)
    assert directory.group_of(data, None, settings) == file
    others = [
        (data, None, {"data.group": "none"}),
        (data, None, {"data.limit": 40}),
        (str(paint(tmp_path / "data2")), None, {"data.group": r"(\d)\."}),
        ("digits", None, {}),
    ]
    for place, base, named in others:
        directory.decisions.clear()
        assert directory.group_of(place, base, named) == ""


def test_images_without_series_are_split_at_random_by_all_runs(directory: Directory, tmp_path: Path) -> None:
    assert directory.group_of(str(paint(tmp_path / "data")), None, {}) == "none"


def test_a_recipe_that_names_groups_decides(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data:\n  group: '_(\\d)'\n")
    assert directory.group_of(str(write_clips(tmp_path / "data")), tmp_path / "own.yaml", {}) == ""


def test_too_many_images_are_not_searched(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IMAGES", 74)
    assert directory.group_of(str(write_clips(tmp_path / "data")), None, {}) == ""


def test_the_variants_of_a_study_hold_out_the_same_images(directory: Directory, tmp_path: Path) -> None:
    data = str(write_clips(tmp_path / "data"))
    variants = [
        ResolvedVariant("all", None, data, {"epochs": 1}),
        ResolvedVariant("half", None, data, {"data.train_fraction": 0.5}),
        ResolvedVariant("own", None, data, {"data.group": "name"}),
        ResolvedVariant("other", None, "digits", {}),
    ]
    groups = [_grouped(variant, directory, variants).settings.get("data.group") for variant in variants]
    assert len(read_groups(Path(str(groups[0])))) == 75
    assert groups == [groups[0], groups[0], "name", None]
