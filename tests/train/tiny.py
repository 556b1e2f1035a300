"""A run of a few seconds with everything in it that could be forgotten over a kill, and ways to look at what it left.

Every picture differs from every other, so an order that is not the same shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import forked
from tests.helpers import free_port
from tests.killpoints import Killed

PER_CLASS = 16
EVERYTHING = {
    "epochs": 2,
    "batch_size": 12,
    "accumulate": 2,
    "optim.ema_decay": 0.9,
    "optim.lr": 1e-3,
    "schedule.warmup_epochs": 0.5,
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.repeats": 3,
    "augment.rand_augment": "rand-m9-mstd0.5-inc1",
    "augment.erase_prob": 0.25,
    "save.every_steps": 1,
    "device": "cpu",
}
ARGUMENTS = {
    "ceit_nano_32": {"model_args.depth": 2, "model_args.embed_dim": 48, "model_args.drop_path_rate": 0.2},
    "cvt_nano_32": {"model_args.depth": [1, 1, 1], "model_args.drop_path_rate": 0.2},
    "levit_nano_32": {"model_args.depth": [1, 1, 1], "model_args.drop_path_rate": 0.2},
}
STEPS = 6  # 3 classes of 16 images, a fifth held out: 39 to learn from, in steps of 12, twice


def paint(folder: Path, per_class: int = PER_CLASS, classes: int = 3) -> Path:
    """Pictures of noise, 20x24 pixels; the mean says which class."""
    random = np.random.default_rng(0)
    for number in range(classes):
        (folder / f"class{number}").mkdir(parents=True)
        for index in range(per_class):
            pixels = random.integers(0, 120, (20, 24, 3)) + 60 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class{number}" / f"{index:03}.png")
    return folder


def coloured(folder: Path, per_class: int) -> Path:
    """Pictures of three colours, 128x120 pixels: large enough for public weights."""
    for number, colour in enumerate(("red", "green", "blue")):
        (folder / colour).mkdir(parents=True)
        for image in range(per_class):
            Image.new("RGB", (128, 120), (30 * image, 80 * number, 90)).save(folder / colour / f"{image}.png")
    return folder


def settings(model: str = "levit_nano_32", **more: Any) -> dict[str, Any]:
    """Settings of a run with everything in it; those of another model have its name."""
    return {"model": model, **EVERYTHING, **ARGUMENTS[model], **more}


def run(data: Path, out: Path, model: str = "levit_nano_32", *, train_args: Any = None, **more: Any) -> Path:
    """A run in this process; returns its directory."""
    from weft.train import train

    return train(data, settings=settings(model, **more), out=out, quiet=True, **(train_args or {})).out


def recipe_of(**settings: Any) -> Any:
    """The recipe with settings by key, in which `__` is a dot."""
    from weft.recipes import load_recipe

    return load_recipe(overrides=[(key.replace("__", "."), value) for key, value in settings.items()])


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises an error, whatever its arguments."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


@contextlib.contextmanager
def at_step(number: int, act: Callable[..., object]) -> Iterator[None]:
    """Call `act` with the learner and the batches before each step with this number, from 0, in this process."""
    from weft.train.loop import Learner

    train_step = Learner.train_step

    def step(self: Learner, *args: Any) -> Any:
        if self.step == number:
            act(self, *args)
        return train_step(self, *args)

    with mock.patch.object(Learner, "train_step", step):
        yield


@contextlib.contextmanager
def killed_after(step: int) -> Iterator[None]:
    """End a run in this process after so many steps, as if the process had vanished."""
    try:
        with at_step(step, raising(Killed())):
            yield
    except Killed:
        return
    raise AssertionError("the run ended before it was killed")


def command(data: Path | None, out: Path, model: str = "levit_nano_32", **more: Any) -> list[str]:
    """`weft train` as the words of a process; with data None, the run in `out` goes on."""
    if data is None:
        return [sys.executable, "-m", "weft", "train", "--resume", str(out), *words(more)]
    return [sys.executable, "-m", "weft", "train", str(data), "--out", str(out), *words(settings(model, **more))]


def words(values: dict[str, Any]) -> list[str]:
    """Settings as options of the command line."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


SIGNALLING = """
import multiprocessing, os, signal, sys
from weft.cli import main
from weft.train.loop import Learner
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may ignore it: in the background of a shell,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one: under nohup
step, number, group = map(int, sys.argv[1:4])
train_step = Learner.train_step
def signalling(self, *more):
    if self.step == step and os.environ.get("RANK", "1") == "1":
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        (os.killpg if group else os.kill)(0 if group else os.getpid(), number)
    return train_step(self, *more)
Learner.train_step = signalling
sys.exit(main(sys.argv[4:]))
"""


def signalling(arguments: list[str], step: int, number: int, *, group: bool = False) -> list[str]:
    """`command`, of a process that signals itself, or its group, after so many steps; of two processes, the second.

    It first prints the numbers of the processes that read images.
    """
    return [sys.executable, "-c", SIGNALLING, str(step), str(int(number)), str(int(group)), *arguments[3:]]


def environment(**more: str) -> dict[str, str]:
    """One thread, so that two runs at once do not disturb each other, and no warning that hides a result."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


def finish(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a process to its end, forked from one that has imported torch."""
    return forked.run(arguments, env=environment(**more), capture_output=True, text=True)


def fresh(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that imports everything itself, to its end."""
    return subprocess.run(arguments, env=environment(**more), capture_output=True, text=True, timeout=300)


def group_of(size: int) -> dict[str, str]:
    """The variables that torchrun sets, without those of a process."""
    numbers = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    return {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}


def finish_two(arguments: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Runs two processes of one group to their end."""
    group = group_of(2)
    processes = [
        forked.Popen(
            arguments,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **group),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess(arguments, process.returncode, *texts)
        for process, texts in zip(processes, output, strict=True)
    ]


def kill_and_resume(data: Path, out: Path, model: str, **more: Any) -> int:
    """A run that SIGKILL ends after two steps, and that another process resumes to its end.

    Returns:
        The step of the newest state at the kill.
    """
    killed = fresh(signalling(command(data, out, model, **more), 2, signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = sorted((out / "state").glob("step-*.safetensors"))[-1]
    done = fresh(command(None, out))
    assert done.returncode == 0, done.stderr
    return int(newest.stem.rpartition("-")[2])


def record_of(state: Path) -> Any:
    """The record of a saved state."""
    with safe_open(state, "pt") as file:
        return json.loads(file.metadata()["state"])


def reseal(state: Path, record: Any) -> None:
    """Give a saved state another record, with a checksum that fits."""
    from weft.train.state import FORMAT, _sha256

    tensors, text = load_file(state), json.dumps(record)
    save_file(tensors, state, {"format": FORMAT, "state": text, "sha256": _sha256(tensors, text)})


def state_of(out: Path) -> dict[str, torch.Tensor]:
    """Everything that training changed: weights, their average, moments."""
    return load_file(sorted((out / "state").glob("*.safetensors"))[-1])


def assert_same_run(one: Path, other: Path) -> None:
    """Both ended with the same bits: state, models, metrics, and every step's loss."""
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ, such as {different[:3]}"
    for name in ("best", "last"):
        for file in ("model.safetensors", "config.json"):
            assert (one / name / file).read_bytes() == (other / name / file).read_bytes(), (name, file)
    assert (one / "steps.csv").read_text() == (other / "steps.csv").read_text()
    assert metrics(one) == metrics(other)


def losses(out: Path) -> list[float]:
    """The loss of every step of a run."""
    return [float(line.split(",")[3]) for line in (out / "steps.csv").read_text().splitlines()[1:]]


def metrics(out: Path) -> list[list[str]]:
    """`metrics.csv` without the columns that a clock made."""
    return [line.split(",")[:8] for line in (out / "metrics.csv").read_text().splitlines()]
