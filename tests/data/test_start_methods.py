"""Data loader workers under the start methods of macOS and Windows (spawn) and of Python 3.14 on Linux (forkserver)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

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
