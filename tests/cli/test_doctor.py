"""`weft doctor`."""

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weft.cli import doctor, main

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_this_environment_is_well(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = {row["package"]: row["state"] for row in found["packages"]}
    assert {states[name] for name in ("torch", "torchvision", "timm", "pillow", "safetensors")} == {"ok"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("weft ")
    assert "\npackage " in shown
    assert "\nmachine" in shown


def test_a_requirement_of_this_system_is_required(monkeypatch):
    lines = [f"here; sys_platform == '{sys.platform}'", "there; sys_platform == 'plan9'", "more; extra == 'serve'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert {row["package"]: row["state"] for row in doctor.check_packages()} == {"here": "missing", "more": "absent"}


def test_every_extra_is_listed(monkeypatch, capsys):
    """By pyproject.toml: a package of every extra but those for development, with the names of its extras."""
    lines = []
    lines = []
    for extra, needs in EXTRAS.items():
        for need, _, marker in (each.partition(";") for each in needs):
            lines.append(f"{need}; {marker + ' and ' if marker else ''}extra == '{extra}'")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    rows = doctor.check_packages()
    for extra, needs in EXTRAS.items():
        here = [need for need in map(Requirement, needs) if not need.marker or need.marker.evaluate()]
        listed = {row["package"] for row in rows if row["extra"] == extra}
        assert listed == (set() if extra in ("dev", "docs") else {need.name for need in here}), extra
    assert main(["doctor"]) in (0, 1)
    assert "pillow-heif" in capsys.readouterr().out


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_source_tree_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "requires", missing)
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
def test_floors(package, version, state, code, monkeypatch, capsys):
    version_of = importlib.metadata.version

    def pretend(name):
        return version_of(name) if name != package else version or missing(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", pretend)
    assert main(["doctor", "--json"]) == code
    rows = {row["package"]: row for row in json.loads(capsys.readouterr().out)["packages"]}
    assert (rows[package]["state"], rows[package]["installed"]) == (state, version or "-")
