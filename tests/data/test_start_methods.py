"""Data loader workers under the start methods of macOS and Windows (spawn) and of Python 3.14 on Linux (forkserver)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests import forked
from weft.data import ImageDataset, SplitPlan, make_loader, open_data, train_transform
from weft.data.loader import ImageLoader

VARIED = train_transform(32, (0.5,) * 3, (0.5,) * 3, color_jitter=0.3, rand_augment="rand-m9-mstd0.5", erase_prob=0.5)


def loader_of(workers: int) -> ImageLoader:
    return make_loader(
        ImageDataset(open_data("digits", SplitPlan(limit=20)).train, VARIED), 8, shuffle=True, workers=workers
    )


def batches(loader: ImageLoader) -> list[torch.Tensor]:
    loader.start_at(3)
    return [images for images, _ in loader]


@pytest.mark.slow_except("fork")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_equal_batches_and_a_worker_outside_the_process_group(method: str) -> None:
    """Ctrl-C and `timeout` signal a whole process group."""
    loader = loader_of(1)
    loader.multiprocessing_context = method
    expected = batches(loader_of(0))
    assert len(expected) == 3
    assert all(map(torch.equal, batches(loader), expected))
    (worker,) = loader._iterator._workers
    assert os.getpgid(worker.pid) == worker.pid
    assert all(map(torch.equal, batches(loader), expected))
    worker.terminate()
    worker.join(60)
    assert worker.exitcode in (0, -signal.SIGTERM)


def test_a_worker_without_process_groups_ignores_an_interrupt() -> None:
    """In a child process: the signal stays ignored."""
    program = """
import os, signal
from weft.data import loader
del os.setsid
loader._leave_process_group(0)
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    subprocess.run([sys.executable, "-c", program], check=True)


INTERRUPTED_FORK = """
import os, signal, sys
from tests.data.test_start_methods import loader_of, batches

def interrupt():
    if not interrupted:
        interrupted.append(True)
        os.kill(os.getpid(), number)

number, interrupted = int(sys.argv[1]), []
os.register_at_fork(after_in_parent=interrupt)
def leave(number, frame):
    raise SystemExit(128 + number)
signal.signal(number, leave)
batches(loader_of(2))
"""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="workers are not forked")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_workers_start_is_not_lost(name: str) -> None:
    """Python ignores what a handler raises within a fork: the program would go on."""
    number = getattr(signal, name)
    command = [sys.executable, "-c", INTERRUPTED_FORK, str(int(number))]
    done = forked.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (128 + number, "")
