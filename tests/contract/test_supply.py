"""What is installed, and what is shipped."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(folder: Path) -> Path:
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = "--quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation --wheel-dir"
    command = [sys.executable, "-m", "pip", "wheel", *options.split(), str(folder), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_is_the_same_when_built_twice(tmp_path):
    first, second = (build(tmp_path / name) for name in ("first", "second"))
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
    listed = zipfile.ZipFile(first).namelist()
    for name in ("py.typed", "models/levit/network.py", "models/levit/imagenet.csv", "recipes/digits.yaml"):
        assert f"weft/{name}" in listed
    assert any(name.endswith("LICENSE") for name in listed)


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line.split("#")[0]) for line in lines]
    return {each.name.lower().replace("_", "-"): each for each in found if each.name != "weft-vision"}


def locked(name: str = "requirements.lock") -> dict[str, set[str]]:
    """Package -> the versions that a lock file allows; every one of them must carry hashes."""
    pins: dict[str, set[str]] = {}
    for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines():
        if match := re.match(r"([a-z0-9][a-z0-9._-]*)==([^\s;]+)", line):
            assert "--hash=sha256:" in line, line[:80]
            pins.setdefault(match[1].replace("_", "-"), set()).add(match[2])
    return pins


def test_the_lock_has_every_requirement_in_range_and_with_hashes():
    pins = locked()
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for name, requirement in requirements(lines).items():
            assert all(requirement.specifier.contains(version) for version in pins[name]), requirement


def test_training_installs_a_part_of_the_lock():
    core, full = locked("requirements-core.lock"), locked()
    assert all(versions <= full[name] for name, versions in core.items())
    assert {*requirements(PROJECT["dependencies"]), "setuptools"} <= set(core)  # that builds weft without a network
    assert not {"ray", "nncf", "transformers", "openvino", "pytest"} & set(core)


@pytest.mark.parametrize(
    ("package", "vulnerable", "sound"),
    [("torch", "2.9.1", "2.10.0"), ("pillow", "12.4.0", "13.0.0")],  # CVE-2026-24747, GHSA-8g5g-8vmr-9782
)
def test_known_vulnerabilities_set_floors(package, vulnerable, sound):
    floor = requirements(PROJECT["dependencies"])[package].specifier
    assert (floor.contains(vulnerable), floor.contains(sound)) == (False, True)
