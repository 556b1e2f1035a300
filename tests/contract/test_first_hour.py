"""The commands of the README's first sections run in their order, on photos that are made here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.contract.test_docs import README, blocks

SECTION = README.split("## From a folder of photos to a classifier")[1].split("**Without images of your own**")[0]
COLOURS = {"cat": (200, 60, 50), "dog": (50, 80, 190)}


def commands() -> list[list[str]]:
    text = "\n".join(blocks(SECTION, "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def paint(folder: Path, seed: int, per_class: int) -> None:
    """Photos of 120x150 pixels, of which the colour tells the class."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            random = np.random.default_rng([seed, number, *colour])
            coarse = random.integers(-50, 50, (5, 6, 3)) + colour
            image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize((150, 120), Image.Resampling.BICUBIC)
            image.save(folder / name / f"IMG_{seed}{number:03}.jpg", quality=90)


def test_the_section_has_the_verbs_of_a_first_hour() -> None:
    verbs = [command[1] for command in commands()]
    assert [verb for verb in ("data", "train", "evaluate", "predict", "export", "serve") if verb not in verbs] == []


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    paint(tmp_path / "photos", 1, 16)
    paint(tmp_path / "later_photos", 2, 3)
    paint(tmp_path / "new_photos", 3, 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    for program, *arguments in commands():
        assert program == "weft"
        command = [sys.executable, "-m", "weft", *arguments]
        if arguments[0] == "serve":
            served([*command, "--port", "0"], tmp_path, environment)
            continue
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        if out := re.search(r"--out (\S+)", shlex.join(arguments)):
            assert (tmp_path / out[1]).exists()


def served(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start the service, ask for its page and a prediction, and stop it."""
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(line for line in process.stderr if "open http" in line).split("open ")[1].split()[0]
            with urllib.request.urlopen(address, timeout=120) as page:
                assert b"<html" in page.read()
            photo = next((folder / "new_photos").rglob("*.jpg"))
            request = urllib.request.Request(f"{address}predict", photo.read_bytes(), {"Content-Type": "image/jpeg"})
            with urllib.request.urlopen(request, timeout=120) as reply:
                assert photo.parent.name.encode() in reply.read()
        finally:
            process.terminate()
            process.communicate(timeout=120)
