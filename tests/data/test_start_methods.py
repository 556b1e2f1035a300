"""Data loader workers under the start methods of macOS and Windows (spawn) and of Python 3.14 on Linux (forkserver)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from weft.data import ImageDataset, SplitPlan, make_loader, open_data, train_transform
from weft.data.loading.loader import ImageLoader

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
def test_equal_batches_and_only_the_parent_ends_a_worker(method: str) -> None:
    loader = loader_of(1)
    loader.multiprocessing_context = method
    expected = batches(loader_of(0))
    assert len(expected) == 3
    assert all(map(torch.equal, batches(loader), expected))
    (worker,) = loader._iterator._workers
    stranger = f"import os; [os.kill({worker.pid}, number) for number in (2, 1, 15)]"
    subprocess.run([sys.executable, "-c", stranger], check=True)  # as Ctrl-C and `timeout` signal a whole group
    assert all(map(torch.equal, batches(loader), expected))
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == 0


def test_a_worker_without_posix_signals_ignores_those_of_a_terminal() -> None:
    """In a child process: the signals stay ignored."""
    program = """
import signal
from weft.data.loading import loader
loader._CAN_WAIT = False
loader._exit_on_parent_sigterm(0)
assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    subprocess.run([sys.executable, "-c", program], check=True)
