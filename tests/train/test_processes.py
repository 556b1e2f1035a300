"""Two processes compute what one does, step by step; they may become one, and two again; one that dies is noticed."""

from __future__ import annotations

import os
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
from weft.train.batches import batch_arithmetic

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
SHARED = {"train_mode": "eval", "accumulate": 1}  # statistics of BatchNorm are those of a process: fixed
STILL = {"model_args.drop_path_rate": 0}  # chance inside the network is drawn by each process for itself


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


def losses(out: Path) -> list[float]:
    return [float(line.split(",")[3]) for line in (out / "steps.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize("model", ["ceit_nano_32", pytest.param("levit_nano_32", marks=pytest.mark.slow)])
def test_two_processes_compute_what_one_does(model: str, photos: Path, tmp_path: Path) -> None:
    """With mixup, cutmix, repeated augmentation and averaging; statistics of BatchNorm fixed."""
    one, two = tmp_path / "one", tmp_path / "two"
    done = tiny.finish(tiny.command(photos, one, model, **SHARED, **STILL))
    assert done.returncode == 0, done.stderr
    for done in tiny.finish_two(tiny.command(photos, two, model, **SHARED, **STILL)):
        assert done.returncode == 0, done.stderr
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    first, second = (
        [row.split(",") for row in (out / "metrics.csv").read_text().splitlines()[1:]] for out in (one, two)
    )
    for row, other in zip(first, second, strict=True):
        assert [float(cell) for cell in row[:8]] == pytest.approx([float(cell) for cell in other[:8]], rel=1e-4)
    best = (two / "report" / "report.html").read_text()
    assert "<dt>held-out images</dt><dd>9</dd>" in best  # nine there are, and nine are counted


@pytest.mark.slow
def test_two_processes_agree_on_the_number_of_a_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out; the second process writes nothing to a directory of its own."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "none"
    arguments = tiny.command(photos, out, **SHARED, **STILL)
    arguments = [word for word in arguments if word not in ("--out", str(out))]
    for _ in range(2):
        for done in tiny.finish_two(arguments):
            assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "runs").iterdir())
    assert second.name == f"{first.name}-2"
    assert losses(first) == losses(second)


@pytest.mark.slow
def test_two_then_one_then_two(photos: Path, tmp_path: Path) -> None:
    """The same images in the same order, and weights equal but for rounding."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert tiny.finish(tiny.command(photos, whole, **SHARED, **STILL)).returncode == 0
    stopped = tiny.finish([*TORCHRUN, *tiny.command(photos, out, **SHARED, **STILL), "--max-time", "0.01"])
    assert stopped.returncode != 0
    assert "Stopped after step 1 of 6: the time limit is reached." in stopped.stderr
    stopped = tiny.finish([*tiny.command(None, out), "--max-time", "0.01"])
    assert stopped.returncode == 143
    assert "processes was 2 and is now 1: the result may differ in the last bits." in stopped.stderr
    assert tiny.finish([*TORCHRUN, *tiny.command(None, out)]).returncode == 0
    assert losses(out) == pytest.approx(losses(whole), rel=1e-4)
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
def test_a_process_that_dies_is_noticed_and_the_run_goes_on(photos: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert tiny.finish([*TORCHRUN, *tiny.command(photos, whole, accumulate=1)]).returncode == 0
    process = subprocess.Popen(
        [*TORCHRUN, *tiny.command(photos, out, accumulate=1)],
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not list(out.glob("state/step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.02)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    if process.returncode == 0:
        pytest.skip("the run had ended before its process was killed")
    assert "rank" in said
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert tiny.finish([*TORCHRUN, *tiny.command(None, out)]).returncode == 0
    tiny.assert_same_run(whole, out)


def children(pid: int) -> list[int]:
    """Processes that a process started, in their order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_steps_that_do_not_divide(photos: Path, tmp_path: Path) -> None:
    done, other = tiny.finish_two(tiny.command(photos, tmp_path / "run", batch_size=9, **SHARED))
    assert (done.returncode, other.returncode) == (2, 2)
    assert "equal batches; 9 is not by 2 processes x accumulate 1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_arithmetic_of_a_batch_is_stated() -> None:
    recipe = load_recipe(overrides=[("batch_size", 1024), ("accumulate", 2)])
    assert batch_arithmetic(recipe, 4) == "1024 images per step = 128 per device x 4 devices x 2 accumulated"


def test_odd_parts_cannot_be_mixed(photos: Path, tmp_path: Path) -> None:
    from weft.train import train

    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS["levit_nano_32"], "batch_size": 6}
    with pytest.raises(UsageError, match=r"got 3 images \(batch_size 6 in 2 parts\)"):
        train(photos, "levit_nano_32", settings=settings, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_torchrun_and_its_processes_saves_the_state(
    number: signal.Signals, photos: Path, tmp_path: Path
) -> None:
    """As SLURM stops a job: all processes get the signal at the same time. The state is there within 30 seconds."""
    out, more = tmp_path / "run", {"epochs": 200, "accumulate": 1, "save.every_steps": "null"}
    process = subprocess.Popen(
        [*TORCHRUN, *tiny.command(photos, out, **more)],
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 240
    while not (out / "steps.csv").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, number)
    stopped = time.monotonic()
    _, output = process.communicate(timeout=60)
    assert time.monotonic() - stopped < 30
    assert process.returncode == 1
    assert "Stopped after step" in output
    assert list((out / "state").glob("step-*.safetensors"))
