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
    best = (two / "report" / "report.md").read_text()
    assert "held-out images: 9" in best  # nine there are, and nine are counted


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
def test_a_spread_model_computes_what_a_whole_one_does(photos: Path, tmp_path: Path) -> None:
    """FSDP2, with accumulation and averaging; then it goes on where it was stopped, and then in one process."""
    arguments = {"train_mode": "eval", "parallel": "fsdp", "batch_size": 8, **STILL}
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    assert tiny.finish([*TORCHRUN, *tiny.command(photos, one, **arguments | {"parallel": "ddp"})]).returncode == 0
    done = tiny.finish([*TORCHRUN, *tiny.command(photos, two, **arguments)])
    assert done.returncode == 0, done.stderr
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    stopped = tiny.finish([*TORCHRUN, *tiny.command(photos, three, **arguments), "--max-time", "0.01"])
    assert "Stopped after step 1 of" in stopped.stderr
    stopped = tiny.finish([*TORCHRUN, *tiny.command(None, three), "--max-time", "0.01"])
    assert "Stopped after step 2 of" in stopped.stderr
    assert tiny.finish(tiny.command(None, three)).returncode == 0
    assert losses(three) == pytest.approx(losses(one), rel=1e-4)
    states = [tiny.state_of(path) for path in (one, two, three)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    whole, spread, resumed = (torch.cat([v.flatten().double() for v in state.values()]) for state in states)
    assert (whole - spread).norm() < 1e-4 * whole.norm()
    assert (whole - resumed).norm() < 1e-4 * whole.norm()


@pytest.mark.slow
def test_a_spread_model_is_spread(tmp_path: Path) -> None:
    """Of weights, gradients, moments and averages each process holds about a half; the control holds all."""
    script = tmp_path / "held.py"
    script.write_text("""
import os, sys, torch, weft
from weft.recipes import load_recipe
from weft.train.loop import Learner
from weft.runtime import Runtime
words = [("parallel", sys.argv[1]), ("optim.ema_decay", 0.9), ("optim.lr", 1e-3)]
torch.manual_seed(0)
model = weft.create_model("ceit_nano_32", num_classes=5)  # rows that two processes cannot share equally
learner = Learner(model, load_recipe(None, words), Runtime.of("cpu"), 1, 10, 5)
learner.set_train_mode()
learner.train_step([(torch.randn(4, 3, 32, 32), torch.arange(4))])
local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).numel()
weights = list(learner.trained.parameters())
whole = sum(w.numel() for w in model.parameters())
held = [sum(map(local, weights)), sum(local(w.grad) for w in weights)]
held.append(sum(local(learner.optimizer.state[w]["exp_avg"]) for w in weights))
if learner.sharded is not None:
    held.append(sum(learner.sharded.average[name].numel() for name, _ in learner.trained.named_parameters()))
    learner.gather()
    for name, value in learner.trained.state_dict().items():
        assert torch.equal(learner.model.state_dict()[name], getattr(value, "full_tensor", lambda: value)()), name
    moments, parts = (f()["state"] for f in (learner.optimizer_state, learner.optimizer.state_dict))
    assert all(torch.equal(moments[n]["exp_avg"], parts[n]["exp_avg"].full_tensor()) for n in parts)
line = " ".join(["held", *(str(round(part / whole, 2)) for part in held)])
os.write(1, (line + chr(10)).encode())  # in one piece: two processes share the pipe
""")
    for parallel, low, high in (("fsdp", 0.4, 0.6), ("ddp", 1.0, 1.0)):
        command = [*TORCHRUN[: TORCHRUN.index("--no-python")], str(script), parallel]
        done = tiny.finish(command)
        assert done.returncode == 0, done.stderr
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("held")]
        assert len(lines) == 2
        assert all(low <= float(share) <= high for line in lines for share in line), lines
        assert len(lines[0]) == (4 if parallel == "fsdp" else 3)


@pytest.mark.slow
def test_what_a_spread_model_does_not_allow(photos: Path, tmp_path: Path) -> None:
    arguments = {"parallel": "fsdp", "optim.opt": "lamb"}
    done = tiny.finish([*TORCHRUN, *tiny.command(photos, tmp_path / "run", accumulate=1, **arguments)])
    assert done.returncode != 0
    assert "parallel=fsdp supports optim.opt adamw or sgd, optim.clip_mode norm or value" in done.stderr
    assert "got lamb" in done.stderr


@pytest.mark.slow
def test_processes_leave_their_group_before_python_ends() -> None:
    """Else threads of gloo now and then abort a process that has done its work."""
    code = """
import atexit, torch
atexit.register(lambda: print(f"joined: {torch.distributed.is_initialized()}"))  # the first of these runs last
from weft.runtime import Runtime
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
    while not list(out.glob("state/step-*.json")) and time.monotonic() < until:
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
