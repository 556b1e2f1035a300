"""What is installed, what is shipped, and what importing does."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_importing_opens_no_socket_and_writes_no_file(tmp_path):
    program = """
import os, sys
sys.dont_write_bytecode = True
seen = []
def watch(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        seen.append((event, str(args)[:200]))
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append((event, str(args[0])))
sys.addaudithook(watch)
sys.modules["wandb"] = None  # timm imports it where it is installed, and requests below it tries out IPv6
import weft
weft.create_model("ceit_nano_32"), weft.load_checkpoint
scratch = os.environ["TMPDIR"]  # where Python's tempfile tries out whether a folder can be written to
outside = [item for item in seen if item[1] != os.devnull and not item[1].startswith(scratch)]
sys.exit(repr(outside) if outside else 0)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment |= dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"), str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def build(folder: Path) -> Path:
    source = folder / "source"
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_is_the_same_when_built_twice(tmp_path):
    wheels = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        wheels.append(build(tmp_path / name))
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "--list", str(wheels[0])], capture_output=True, text=True, check=True
    ).stdout
    for name in (
        "weft/py.typed",
        "weft/models/levit/network.py",
        "weft/models/levit/imagenet.csv",
        "weft/recipes/digits.yaml",
        "LICENSE",
    ):
        assert name in listed


def locked(name: str = "requirements.lock") -> dict[str, set[str]]:
    """Package -> the versions that a lock file allows; every one of them must carry hashes."""
    pins: dict[str, set[str]] = {}
    text = (ROOT / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        match = re.match(r"([a-z0-9][a-z0-9._-]*)==([^\s;]+)", line)
        if match:
            assert "--hash=sha256:" in line, line[:80]
            pins.setdefault(match[1].replace("_", "-"), set()).add(match[2])
    return pins


def test_the_lock_has_every_requirement_in_range_and_with_hashes():
    pins = locked()
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    for line in wanted:
        requirement = Requirement(line.split("#")[0])
        if requirement.name == "weft-vision":
            continue
        versions = pins[requirement.name.lower().replace("_", "-")]
        assert all(requirement.specifier.contains(version) for version in versions), line


def test_training_installs_a_part_of_the_lock():
    core, full = locked("requirements-core.lock"), locked()
    assert all(versions <= full[name] for name, versions in core.items())
    wanted = {Requirement(line.split("#")[0]).name.lower().replace("_", "-") for line in PROJECT["dependencies"]}
    assert wanted <= set(core)
    assert "setuptools" in core  # builds weft itself without a network
    assert not {"ray", "nncf", "transformers", "openvino", "pytest"} & set(core)


def test_floors_that_known_vulnerabilities_set():
    floors = {Requirement(line).name: Requirement(line).specifier for line in PROJECT["dependencies"]}
    assert not floors["torch"].contains("2.9.1")  # CVE-2026-24747
    assert not floors["pillow"].contains("12.4.0")  # GHSA-8g5g-8vmr-9782
    assert floors["torch"].contains("2.10.0")
    assert floors["pillow"].contains("13.0.0")
