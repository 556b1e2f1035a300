"""Whatever bytes come: our own error or an image, in bounded memory, and never the end of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import fuzz
from tests.helpers import FULL

COUNT = 20_000 if FULL else 500


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited and read as on Linux")
def test_mutants():
    command = [sys.executable, "-W", "error", "-m", "tests.data.fuzz", str(COUNT)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"after mutant({done.stderr.splitlines()[-1:]}): {done.stderr[-2000:]}"
    result = json.loads(done.stdout)
    verdicts = result["verdicts"]
    assert (result["findings"], sum(verdicts.values()), verdicts.get("out-of-memory", 0)) == ([], COUNT, 0)
    # else the mutants would be too mild, or too wild, to find anything
    assert min(verdicts["good"], verdicts["damaged"]) > COUNT / 10


def test_faults_of_ours_and_readers_that_disagree_would_be_found(monkeypatch):
    assert fuzz.mutant(17) == fuzz.mutant(17) != fuzz.mutant(18)
    monkeypatch.setattr(fuzz, "image_info", lambda data, **_: {}["exif"])
    with pytest.raises(KeyError):
        fuzz.read(fuzz.mutant(0))
    monkeypatch.setattr(fuzz, "image_info", lambda data, **_: None)
    with pytest.raises(AssertionError, match=r"\['good', 'truncated'\]"):
        fuzz.read(fuzz.seeds()[0][:300])
