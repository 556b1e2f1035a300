"""Freed memory is kept: a second round over the same sizes brings in no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from weft.machine.memory import keep_memory
did = keep_memory() if "keep" in sys.argv else None
def step():
    for _ in range(20):
        torch.ones(3_000_000)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(did, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    # a threshold that does not adapt: the default learns sizes below 32 MiB
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    did, count = done.stdout.split()
    return did, int(count)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_it_is_kept():
    did, count = faults("keep")
    assert did == "True"
    assert count < 1000
    _, plain = faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert plain > 20 * count + 10_000  # the control: twenty blocks of 2,930 pages


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_who_has_chosen_is_left_alone(name):
    did, _ = faults("keep", **{name: "2" if name.startswith("MALLOC") else "glibc.malloc.arena_max=2"})
    assert did == "False"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_it_is_given_back():
    code = """
import torch
from weft.machine.memory import keep_memory, release_memory
resident = lambda: int(open("/proc/self/statm").read().split()[1]) // 256  # MiB
keep_memory()
blocks = [torch.ones(250_000) for _ in range(300)]
blocks = None
before = resident()
release_memory()
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200
