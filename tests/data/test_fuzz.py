"""Whatever bytes come: our own error or a picture, in bounded time and memory, and never the end of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import fuzz
from tests.helpers import FULL

COUNT = 20_000 if FULL else 1_000
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited and read as on Linux")
def test_mutants():
    command = [sys.executable, "-W", "error", "-m", "tests.data.fuzz", str(COUNT)]
    messages = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert messages.returncode == 0, f"after mutant({messages.stderr.splitlines()[-1:]}): {messages.stderr[-2000:]}"
    result = json.loads(messages.stdout)
    assert result["findings"] == []
    assert result["seeds"] >= 200
    assert sum(result["verdicts"].values()) == COUNT
    assert result["verdicts"].get("out-of-memory", 0) == 0
    # else the mutants would be too mild, or too wild, to find anything
    assert result["verdicts"]["good"] > COUNT / 10
    assert result["verdicts"]["damaged"] > COUNT / 10


def test_a_mutant_can_be_brought_back():
    assert fuzz.mutant(17) == fuzz.mutant(17)
    assert fuzz.mutant(17) != fuzz.mutant(18)


def test_faults_of_ours_would_be_found(monkeypatch):
    def careless(data, **_):
        raise KeyError("exif")

    monkeypatch.setattr(fuzz, "image_info", careless)
    with pytest.raises(KeyError):
        fuzz.read(fuzz.mutant(0))


def test_readers_that_disagree_would_be_found(monkeypatch):
    monkeypatch.setattr(fuzz, "image_info", lambda data, **_: None)
    with pytest.raises(AssertionError, match=r"\['good', 'truncated'\]"):
        fuzz.read(fuzz.seeds()[0][:300])
