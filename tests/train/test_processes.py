"""Two processes compute what one does, step by step; they may become one, and two again; one that dies is noticed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train import tiny
from weft.errors import UsageError
from weft.recipes import load_recipe
from weft.train.plan import batch_arithmetic

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
SHARED = {"train_mode": "eval", "accumulate": 1}  # statistics of BatchNorm are those of a process: fixed
STILL = {**SHARED, "model_args.drop_path_rate": 0}  # chance inside the network is drawn by each process for itself


@pytest.mark.parametrize("model", ["ceit_nano_32", pytest.param("levit_nano_32", marks=pytest.mark.slow)])
def test_two_processes_compute_what_one_does(model: str, noise: Path, tmp_path: Path) -> None:
    """With mixup, cutmix, repeated augmentation and averaging; statistics of BatchNorm fixed."""
    one, two = tiny.run(noise, tmp_path / "one", model, **STILL), tmp_path / "two"
    for done in tiny.finish_two(tiny.command(noise, two, model, **STILL)):
        assert done.returncode == 0, done.stderr
    assert tiny.losses(two) == pytest.approx(tiny.losses(one), rel=1e-5)
    first, second = ([row.split(",") for row in (out / "metrics.csv").read_text().splitlines()] for out in (one, two))
    for row, other in zip(first[1:], second[1:], strict=True):
        assert [float(cell) for cell in row[:8]] == pytest.approx([float(cell) for cell in other[:8]], rel=1e-4)
    # nine there are, and nine are counted
    assert "<dt>held-out images</dt><dd>9</dd>" in (two / "report" / "report.html").read_text()


@pytest.mark.slow
def test_two_processes_with_four_workers_each_give_the_bits_of_two_with_none(noise: Path, tmp_path: Path) -> None:
    for workers in (0, 4):
        for done in tiny.finish_two(tiny.command(noise, tmp_path / str(workers), workers=workers, accumulate=1)):
            assert done.returncode == 0, done.stderr
    tiny.assert_same_run(tmp_path / "0", tmp_path / "4")


@pytest.mark.slow
def test_two_processes_agree_on_the_number_of_a_run(noise, tmp_path, monkeypatch):
    """Without --out; the second process writes nothing to a directory of its own."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "none"
    arguments = [word for word in tiny.command(noise, out, **STILL) if word not in ("--out", str(out))]
    for _ in range(2):
        for done in tiny.finish_two(arguments):
            assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "runs").iterdir())
    assert second.name == f"{first.name}-2"
    assert tiny.losses(first) == tiny.losses(second)


@pytest.mark.slow
def test_two_then_one_then_two(noise: Path, tmp_path: Path) -> None:
    """The same images in the same order, and weights equal but for rounding."""
    whole, out = tiny.run(noise, tmp_path / "whole", **STILL), tmp_path / "run"
    stopped = tiny.finish([*TORCHRUN, *tiny.command(noise, out, **STILL), "--max-time", "0.01"])
    assert stopped.returncode != 0
    assert "Stopped after step 1 of 6: the time limit is reached." in stopped.stderr
    stopped = tiny.finish([*tiny.command(None, out), "--max-time", "0.01"])
    assert stopped.returncode == 143
    assert "processes was 2 and is now 1: the result may differ in the last bits." in stopped.stderr
    assert tiny.finish([*TORCHRUN, *tiny.command(None, out)]).returncode == 0
    assert tiny.losses(out) == pytest.approx(tiny.losses(whole), rel=1e-4)
    first, second = (torch.cat([v.flatten().double() for v in tiny.state_of(path).values()]) for path in (whole, out))
    assert (first - second).norm() < 1e-4 * first.norm()


@pytest.mark.slow
def test_processes_leave_their_group_before_python_ends() -> None:
    """Else threads of gloo now and then abort a process that has done its work."""
    code = """
import atexit, torch
atexit.register(lambda: print(f"joined: {torch.distributed.is_initialized()}"))  # the first of these runs last
from weft.machine.runtime import Runtime
print(f"ranks: {Runtime.of('cpu').gather(torch.distributed.get_rank())}")
"""
    done = tiny.finish([*TORCHRUN, sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks: [0, 1]") == 2
    assert done.stdout.count("joined: False") == 2


@pytest.mark.slow
def test_a_process_that_dies_is_noticed_and_the_run_goes_on(noise: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert tiny.finish([*TORCHRUN, *tiny.command(noise, whole, accumulate=1)]).returncode == 0
    died = tiny.finish([*TORCHRUN, *tiny.signalling(tiny.command(noise, out, accumulate=1), 2, signal.SIGKILL)])
    assert died.returncode == 1, died.stderr
    assert "rank" in died.stderr
    assert tiny.finish([*TORCHRUN, *tiny.command(None, out)]).returncode == 0
    tiny.assert_same_run(whole, out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_torchrun_and_its_processes_saves_the_state(number, noise, tmp_path):
    """As SLURM stops a job: all processes get the signal at the same time, and end before it kills them."""
    out, more = tmp_path / "run", {"epochs": 200, "accumulate": 1, "save.every_steps": 5}
    process = subprocess.Popen(
        [*TORCHRUN, *tiny.command(noise, out, **more)],
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 240
    while not list((out / "state").glob("step-*.safetensors")):  # all processes have trained a step
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    stopped = re.search(r"Stopped after step (\d+)", said)
    assert stopped, said
    assert sorted((out / "state").glob("step-*.safetensors"))[-1].stem == f"step-{int(stopped[1]):010}"


def test_steps_that_do_not_divide(noise: Path, tmp_path: Path) -> None:
    """Into parts of processes, and into parts whose images are mixed in pairs."""
    for done in tiny.finish_two(tiny.command(noise, tmp_path / "run", batch_size=9, **SHARED)):
        assert done.returncode == 2
        assert "equal batches; 9 is not by 2 processes x accumulate 1" in done.stderr
    with pytest.raises(UsageError, match=r"got 3 images \(batch_size 6 in 2 parts\)"):
        tiny.run(noise, tmp_path / "run", batch_size=6)
    assert not (tmp_path / "run").exists()


def test_the_arithmetic_of_a_batch_is_stated() -> None:
    recipe = load_recipe(overrides=[("batch_size", 1024), ("accumulate", 2)])
    assert batch_arithmetic(recipe, 4) == "1024 images per step = 128 per device x 4 devices x 2 accumulated"
