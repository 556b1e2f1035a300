"""Freed memory is kept, so that a second round brings in no new pages, and given back on request."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from weft.machine.memory import keep_memory

CODE = """
import resource, sys
from weft.machine.memory import keep_memory, release_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) // 256  # MiB

def step():
    for _ in range(20):
        bytearray(b"x") * 12_000_000

assert not sys.argv[1:] or keep_memory()
step()
before = faults()
step()
new_pages = faults() - before
blocks = [bytearray(b"x") * 1_000_000 for _ in range(300)]
blocks = None
before = resident()
release_memory()
print(new_pages, before - resident())
"""


def measured(*arguments: str, **environment: str) -> tuple[int, int]:
    """New pages of a second round, and MiB that are given back."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    new_pages, given_back = done.stdout.split()
    return int(new_pages), int(given_back)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_memory_is_kept_and_given_back():
    new_pages, given_back = measured("keep")
    assert new_pages < 1000
    assert given_back > 200
    # a threshold that does not adapt: the default learns sizes below 32 MiB
    control, _ = measured(MALLOC_MMAP_THRESHOLD_="131072")
    assert control > 20 * new_pages + 10_000  # twenty blocks of 2,930 pages


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_environment_configures_is_left_alone(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the allocator is configured"))
    assert not keep_memory()
