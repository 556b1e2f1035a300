"""`weft doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weft.cli import doctor, main

ROOT = Path(__file__).parents[2]


def test_this_environment_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = {row["package"]: row["state"] for row in found["packages"]}
    assert {states[name] for name in ("torch", "torchvision", "timm", "pillow", "safetensors")} == {"ok"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0


def test_the_text_has_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("weft ")
    assert "\npackage " in shown
    assert "\nmachine" in shown


def test_a_requirement_of_this_system_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"here; sys_platform == '{sys.platform}'", "there; sys_platform == 'plan9'", "more; extra == 'serve'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert {row["package"]: row["state"] for row in doctor.check_packages()} == {"here": "missing", "more": "absent"}


def test_every_extra_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By pyproject.toml: a package of every extra but those for development, with the names of its extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [
        f"{need.partition(';')[0]}; {' and '.join(filter(None, (need.partition(';')[2], marker)))}"
        for extra, needs in extras.items()
        for need in needs
        for marker in (f'extra == "{extra}"',)
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    rows = doctor.check_packages()
    for extra, needs in extras.items():
        here = [Requirement(need) for need in needs if not (m := Requirement(need).marker) or m.evaluate()]
        listed = {row["package"] for row in rows if row["extra"] == extra}
        assert listed == (set() if extra in ("dev", "docs") else {need.name for need in here}), extra
    assert main(["doctor"]) in (0, 1)
    assert "pillow-heif" in capsys.readouterr().out


def test_a_source_tree_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["packages"] == []
    assert "because weft is not installed. Run: pip install -e ." in err


@pytest.mark.parametrize(
    ("package", "version", "state", "code"),
    [
        ("torch", "2.9.1", "too old", 1),
        ("torch", "2.10.0", "ok", 0),
        ("torch", None, "missing", 1),
        ("onnx", "1.20.0", "too old", 1),
        ("onnx", None, "absent", 0),
        ("pillow", "12.9", "too old", 1),
    ],
)
def test_floors(
    package: str,
    version: str | None,
    state: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    true_version = importlib.metadata.version

    def pretend(name: str) -> str:
        if name != package:
            return true_version(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.importlib.metadata, "version", pretend)
    assert main(["doctor", "--json"]) == code
    rows = {row["package"]: row for row in json.loads(capsys.readouterr().out)["packages"]}
    assert rows[package]["state"] == state
    assert rows[package]["installed"] == (version or "-")
