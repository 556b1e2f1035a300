"""A run that ended early resumes to the very bits that it would have come to, or says why it cannot."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests import forked
from tests.helpers import put_in_cache
from tests.killpoints import Killed
from tests.train import tiny
from weft.checkpoints import save_model_dir
from weft.checkpoints.config import CONFIG, WEIGHTS
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.data import open_data
from weft.errors import CheckpointError, DataError, DivergedError, StoppedError, StorageError, UsageError
from weft.machine.runtime import Runtime
from weft.recipes import Recipe, load_recipe
from weft.runs.directory import PUBLIC_CLASSIFIER, locked, read_metrics
from weft.train import environment, loop, resume, train
from weft.train import run as running
from weft.train.state import load_state, newest_step, sha256_of_tensors

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
MODELS = tuple(tiny.ARGUMENTS)


def step_of(out: Path) -> int:
    return load_state(out / "state")[0].step


# Ends of a run in this process


def _signals(*numbers: signal.Signals, in_a_step: bool = False, error: Exception | None = None) -> Callable[..., None]:
    """Signals, and an error; in a step, BatchNorm has seen a batch that the weights have not."""

    def act(learner: loop.Learner, parts: list[loop.Batch], *_: object) -> None:
        if in_a_step:
            learner.model(parts[0][0])
        for number in numbers:
            signal.raise_signal(number)
        if error is not None:
            raise error

    return act


def _fill_disk(*_: object) -> None:
    """A limit on the size of files, as a quota: the next state does not fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _explode(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def act(learner: loop.Learner, *_: object) -> None:
        objective = learner.objective
        learner.objective = lambda *args: change(objective(*args))  # type: ignore[assignment]

    return act


# torch tells of a dead worker by an exception anywhere in the parent
LOST = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
WHERE = r"at step 4 \(epoch 2\), learning rate .*, images class\d/\d+\.png, "
DISCARDED = "the step in progress was discarded"
STOPPED = "Stopped after step 4 of 6: {}. .* resume with: weft train --resume "
ENDS: dict[str, tuple[Callable[..., None], type[BaseException], str, int]] = {
    # what happens before the fourth step; the error, its message, and the step of the newest state
    "a kill": (tiny.raising(Killed()), Killed, "", 3),
    "SIGTERM": (_signals(signal.SIGTERM), SystemExit, STOPPED.format("SIGTERM"), 4),
    "SIGINT": (_signals(signal.SIGINT), KeyboardInterrupt, STOPPED.format("Ctrl-C"), 4),
    "a second SIGINT": (_signals(signal.SIGINT, signal.SIGINT, in_a_step=True), KeyboardInterrupt, "", 3),
    "the end of a reader": (_signals(signal.SIGTERM, error=LOST), SystemExit, DISCARDED, 3),
    "the end of a reader in a step": (_signals(signal.SIGTERM, in_a_step=True, error=LOST), SystemExit, DISCARDED, 3),
    "a full disk": (_fill_disk, StorageError, "must be writable; File too large for ", 3),
    "an infinite loss": (_explode(lambda loss: loss + math.inf), DivergedError, "loss must .* got inf " + WHERE, 3),
    "an infinite gradient": (
        _explode(lambda loss: loss + (loss - loss.detach()) * 1e38 * 1e38),
        DivergedError,
        "gradient norm must .* " + WHERE,
        3,
    ),
}


@pytest.mark.slow_except(*(end for end in ENDS if end not in ("the end of a reader", "an infinite gradient")))
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ended_early_resumes_to_the_same_bits(end, noise, undisturbed, tmp_path, capfd):
    act, error, message, step = ENDS[end]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(error) as caught, tiny.at_step(3, act):
            tiny.run(noise, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = " ".join(f"{caught.value} {capfd.readouterr().err}".split())
    assert re.search(message, said), said
    assert getattr(caught.value, "code", 143) == 143
    assert step_of(tmp_path / "run") == step
    if error is DivergedError:  # as it was, and not a smoothed number
        assert re.search("\n4,.*(nan|inf).*\n$", (tmp_path / "run" / "steps.csv").read_text())
    train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(undisturbed, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".*"))


@pytest.mark.parametrize("step", [pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 4, 5)])
def test_from_every_other_step(step: int, noise: Path, undisturbed: Path, tmp_path: Path) -> None:
    with tiny.killed_after(step):
        tiny.run(noise, tmp_path / "run")
    train(resume=tmp_path / "run", workers=step % 3, quiet=True)
    tiny.assert_same_run(undisturbed, tmp_path / "run")


def test_a_time_limit_and_an_epoch_to_stop_after(noise, undisturbed, tmp_path, capfd):
    out = tmp_path / "run"
    assert main([*tiny.command(noise, out)[3:], "--max-time", "0.01", "--quiet"]) == 143
    assert "Stopped after step 1 of 6: the time limit is reached." in capfd.readouterr().err
    assert [(out / name).exists() for name in ("last", "best")] == [True, False]
    for _ in range(2):  # the second time it has no epoch left to run before it stops again
        with pytest.raises(StoppedError, match=r"after step 3 of 6: the requested number of epochs is reached\."):
            train(resume=out, stop_after=1, quiet=True)
    assert len((out / "metrics.csv").read_text().splitlines()) == 2
    train(resume=out, stop_after=2, quiet=True)
    tiny.assert_same_run(undisturbed, out)


def test_a_stop_within_an_evaluation_resumes_after_its_epoch(noise, undisturbed, tmp_path, monkeypatch):
    out, infer, signals = tmp_path / "run", running.infer, [signal.SIGTERM]

    def signalled(*arguments: Any) -> torch.Tensor:
        if signals:
            signal.raise_signal(signals.pop())
        return infer(*arguments)

    monkeypatch.setattr(running, "infer", signalled)
    with pytest.raises(SystemExit):
        tiny.run(noise, out)
    assert (step_of(out), (out / "last").exists(), (out / "best").exists()) == (3, True, False)
    train(resume=out, quiet=True)
    tiny.assert_same_run(undisturbed, out)


def test_a_finished_run_is_finished_and_its_torn_metrics_are_written_again(undisturbed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(undisturbed, tmp_path / "run")
    (out / "metrics.csv").write_bytes(b"\xff")
    shutil.rmtree(out / "report")
    assert train(resume=out, quiet=True).epochs == 2
    tiny.assert_same_run(undisturbed, out)
    assert (out / "report" / "report.html").is_file()


# Ends of a process


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:])])
def test_a_process_that_is_killed_again_and_again(model: str, noise: Path, tmp_path: Path) -> None:
    """`kill -9`, with worker processes, which end as well; on with another number of them."""
    whole, out = tiny.run(noise, tmp_path / "whole", model), tmp_path / "run"
    command = tiny.command(noise, out, model, workers=2)
    for step, workers in ((1, 1), (4, 0)):
        killed = tiny.finish(tiny.signalling(command, step, signal.SIGKILL))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        readers = killed.stdout.split()
        assert readers
        until = time.monotonic() + 120
        while any(Path(f"/proc/{reader}/stat").exists() for reader in readers):
            assert time.monotonic() < until
            time.sleep(0.05)
        command = tiny.command(None, out, workers=workers)
    done = tiny.finish(command)
    assert done.returncode == 0, done.stderr
    tiny.assert_same_run(whole, out)
    assert [row[0] for row in steps_of(out)] == list(range(1, tiny.STEPS + 1))


@pytest.mark.slow_except("SIGINT")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_a_group_of_processes(number, noise, undisturbed, tmp_path):
    """It reaches the processes that read images as well; they leave it to their parent."""
    out = tmp_path / "run"
    command = tiny.signalling(tiny.command(noise, out, workers=2), 2, number, group=True)
    with forked.Popen(
        command, env=tiny.environment(), stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number, said
    assert "resume with: weft train --resume" in said
    assert "Traceback" not in said
    train(resume=out, quiet=True)
    tiny.assert_same_run(undisturbed, out)


# Faults of resuming: the control of the tests above


def _forget_batchnorm(one: running.Run) -> None:
    for module in one.learner.model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            module.reset_running_stats()


FAULTS: dict[str, Callable[[running.Run], object]] = {
    "meter": lambda one: vars(one.meter).update(loss_sum=0.0, count=0),
    "history": lambda one: one.history.clear(),
    "augmentation": lambda one: vars(one.plan.batches.dataset).update(seed=1),
    "moments": lambda one: one.learner.optimizer.state.clear(),
    "batch skipped": lambda one: vars(one.meter).update(step=one.meter.step + 1),
    "batch repeated": lambda one: vars(one.meter).update(step=one.meter.step - 1),
    "average": lambda one: one.learner.ema.module.load_state_dict(one.learner.model.state_dict()),
    "step": lambda one: vars(one.learner).update(step=one.learner.step + 1),
    "epoch": lambda one: one.history.append(one.history.pop()._replace(epoch=0)),
    "BatchNorm": _forget_batchnorm,
    "best epoch": lambda one: one.history.append(one.history.pop()._replace(val_top1=101.0)),
    "randomness": lambda one: vars(one.learner).update(_seed=lambda number, parts: random.randrange(2**31)),
}


@pytest.mark.slow_except("meter", "history", "augmentation", "moments")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_resuming_would_be_noticed(fault, undisturbed, stopped, monkeypatch):
    restore = running.Run.restore

    def faulty(self: running.Run, state: object) -> None:
        restore(self, state)
        FAULTS[fault](self)

    monkeypatch.setattr(running.Run, "restore", faulty)

    def go_on_and_compare() -> None:
        train(resume=stopped, quiet=True)
        tiny.assert_same_run(undisturbed, stopped)

    with pytest.raises((AssertionError, UsageError, IndexError)):
        go_on_and_compare()


# Every choice of the recipe


def choices(kind: type = Recipe, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value of every choice in the schema that is not the default."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from choices(hint, f"{key}.")
        elif typing.get_origin(hint) is typing.Literal or hint is bool:
            values = (False, True) if hint is bool else typing.get_args(hint)
            yield from ((key, value) for value in values if value != tiny.EVERYTHING.get(key, field.default))


ELSEWHERE = ("pretrained", "device", "sync_bn")  # need weights, a GPU, several processes
NEEDS_MODEL = {"distill": "distill.teacher", "optim.freeze": "start_from"}
# compilation takes minutes: in `make test-nightly`
CHOICES = [
    pytest.param(key, value, marks=[pytest.mark.nightly] if (key, value) == ("compile", True) else [])
    for key, value in choices()
    if key not in ELSEWHERE
]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), CHOICES, ids=str)
def test_with_every_choice(key: str, value: object, noise: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    if key == "compile" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    if value == "auto":  # both runs find the same, whatever else this machine does
        monkeypatch.setattr(
            "weft.train.decisions.find_precision", lambda recipe, classes, runtime: (runtime, "Precision.")
        )
    arguments = {key: value}
    if needed := NEEDS_MODEL.get(key.split(".")[0], NEEDS_MODEL.get(key)):
        arguments[needed] = str(tiny.run(noise, tmp_path / "before", epochs=1) / "best")
    whole = tiny.run(noise, tmp_path / "whole", **arguments)
    with tiny.killed_after(4):
        tiny.run(noise, tmp_path / "run", **arguments)
    if needed == "start_from":
        shutil.rmtree(tmp_path / "before")  # it is read before the first step only
    train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(whole, tmp_path / "run")


# More steps


def steps_of(out: Path) -> list[list[float]]:
    return [[float(cell) for cell in line.split(",")] for line in (out / "steps.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(
    ("length", "longer", "steps", "epochs"),
    [
        ({}, {"epochs": 3}, 9, 3),
        ({"epochs": None, "steps": 4}, {"steps": 8}, 8, 4),  # the second epoch had one step of three
        ({"epochs": 0, "head_init": "probe"}, {"epochs": 2}, 6, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({}, {"epochs": 5}, 15, 5),
                ({"evaluate_every": 2}, {"epochs": 3}, 9, 3),
                ({}, {"steps": 8}, 8, 3),
                ({"epochs": None, "steps": 4}, {"steps": 5}, 5, 3),
                ({"epochs": None, "steps": 4}, {"epochs": 3}, 9, 4),
            )
        ),
    ],
    ids=str,
)
def test_a_finished_run_trains_every_added_step(length, longer, steps, epochs, noise, undisturbed, tmp_path):
    """Each one once; the schedule ends at its minimum, and the weights change."""
    before = tiny.run(noise, tmp_path / "before", **length) if length else undisturbed
    out = shutil.copytree(before, tmp_path / "run")
    assert train(resume=out, settings=longer, override=True, quiet=True).epochs == epochs
    rows = steps_of(out)
    assert [int(row[0]) for row in rows] == list(range(1, steps + 1))
    assert all(math.isfinite(value) for row in rows for value in row)
    assert rows[-1][2] == pytest.approx(load_recipe(out / "recipe.yaml").schedule.min_lr)
    history = [row for row in read_metrics(out / "metrics.csv") if row.epoch]  # without the one before training
    assert [row.epoch for row in history] == list(range(1, len(history) + 1))
    assert [row.step for row in history] == sorted({row.step for row in history})
    assert history[-1].step == steps
    assert all(math.isfinite(row.train_loss) for row in history)
    assert math.isfinite(history[-1].val_loss)
    first, second = tiny.state_of(before), tiny.state_of(out)
    assert all(not torch.equal(first[name], second[name]) for name in first if name.endswith("head.linear.weight"))


def test_an_extended_run_resumes_bit_exactly(noise: Path, tmp_path: Path) -> None:
    """Also after an epoch that the shorter run had ended early."""
    whole = tiny.run(noise, tmp_path / "whole", epochs=None, steps=4)
    out = shutil.copytree(whole, tmp_path / "run")
    longer: dict[str, Any] = {"settings": {"steps": 9}, "override": True, "quiet": True}
    train(resume=whole, **longer)
    with tiny.killed_after(5):
        train(resume=out, **longer)
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0), pytest.param(0.9, 0.5, marks=pytest.mark.slow)])
def test_a_longer_run_may_start_change_or_end_its_average(before, after, noise, undisturbed, tmp_path):
    """An average that starts here starts from the weights, which each of its steps moves it after."""
    out = tmp_path / "run"
    if before:
        shutil.copytree(undisturbed, out)
    else:
        tiny.run(noise, out, **{"optim.ema_decay": before})
    old = tiny.state_of(out)
    train(resume=out, settings={"epochs": 3, "optim.ema_decay": after}, override=True, quiet=True)
    new = tiny.state_of(out)
    assert any(name.startswith("ema.") for name in new) == (after > 0)
    name = "model.head.linear.weight"
    assert not torch.equal(old[name], new[name])
    if not before:
        between = (new["ema.head.linear.weight"] - old[name]) / (new[name] - old[name])
        assert 0 < float(between.median()) < 1


def test_a_run_that_early_stopping_ended_trains_on(noise: Path, tmp_path: Path) -> None:
    early = {"epochs": 4, "patience": 1, "optim.lr": 1e-9, "train_mode": "eval"}
    out = tiny.run(noise, tmp_path / "run", **early)
    done = steps_of(out)[-1][0]
    assert done < 12
    train(resume=out, settings={"epochs": 5}, override=True, quiet=True)
    assert steps_of(out)[-1][0] > done


# Changes between the end and the resume: the rows of docs/resume.md


def edit_records(out: Path, **values: Any) -> None:
    """Change what the states of a run say of their machine, as another one would have written them."""
    for state in (out / "state").glob("step-*.safetensors"):
        record = tiny.record_of(state)
        record["machine"] |= values
        tiny.reseal(state, record)


def test_changes_on_which_no_result_depends(noise, undisturbed, stopped, tmp_path, monkeypatch, capfd):
    """All at once. The run is locked, so no other process can be writing the temporary files in it."""
    shutil.copytree(noise, tmp_path / "elsewhere")
    threads = torch.get_num_threads()
    edit_records(stopped, torch="1.0")
    for name in ("steps.csv", "metrics.csv"):
        with (stopped / name).open("ab") as file:
            file.write(b"\0\xff,1,,,")
    newest = max((stopped / "state").glob("step-*.safetensors"))
    os.truncate(newest, newest.stat().st_size // 3)
    leftovers = [stopped / "state" / ".step-9.safetensors.0123abcd.part", stopped / ".best.4567cdef.part"]
    kept = [stopped / "state" / ".x.part", stopped / "state" / "notes.txt"]
    leftovers[1].mkdir()
    for path in (leftovers[0], *kept):
        path.write_text("half")
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "WEFT_DATA"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    free = {"workers": 1, "data.source": tmp_path / "elsewhere", "save.every_minutes": 1, "save.every_steps": 2}
    free |= {
        "save.keep": 3,
        "data.damaged": "next",
        "data.cache_gb": 60,
        "device": "cpu" if torch.cuda.is_available() else "auto",
    }
    assert free.keys() == set(resume.FREE)
    try:
        torch.set_num_threads(threads + 1)
        train(resume=stopped, settings={key: str(value) for key, value in free.items()})
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    tiny.assert_same_run(undisturbed, stopped)
    said = capfd.readouterr().err
    assert f"Skipped the state {newest.stem}: " in said
    assert "and is now 1.0" not in said
    assert "torch was 1.0 and is now" in said
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in kept)
    assert os.listdir(tmp_path / "HOME") == []


FIXED = {"model": "cvt_nano_32", "best": "loss", "img_size": 48, "model_args": {"depth": [1, 1, 2]}, "seed": 6}
FIXED |= {"batch_size": 6, "augment.repeats": 1, "start_from": "elsewhere", "pretrained": True, "optim.opt": "sgd"}
FIXED |= {"data.seed": 6, "data.limit": 30, "data.val_fraction": 0.5, "data.train_fraction": 0.5, "data.group": "a"}
FIXED |= {"data.sampling": "balanced", "data.value_range": [0, 255]}


def test_settings_that_no_run_can_change(stopped: Path) -> None:
    assert set(resume.FIXED) - FIXED.keys() == {"optim.freeze", "data.folds", "data.fold"}  # see test_plan, test_folds
    for key, value in FIXED.items():
        with pytest.raises(UsageError, match=rf"A resumed run cannot change its {key}; .*Start a new run"):
            train(resume=stopped, settings={key: value}, override=True, quiet=True)


def _edit_recipe(out: Path) -> None:
    text = (out / "recipe.yaml").read_text()
    (out / "recipe.yaml").write_text(text.replace("label_smoothing: 0.1", "label_smoothing: 0.3"))


def test_other_settings_are_taken_over_only_when_meant(stopped: Path, tmp_path: Path, capfd: Capture) -> None:
    """Then they stay, also after a kill. An edited recipe is as another setting."""
    for key, value in {"precision": "bf16", "accumulate": 1, "distill.alpha": 0.9, "optim.lr": 0.5}.items():
        with pytest.raises(UsageError, match=rf"{key} is .*, got {value}. Pass --override"):
            train(resume=stopped, settings={key: value}, quiet=True)
    assert load_recipe(stopped / "recipe.yaml").optim.lr == 1e-3
    _edit_recipe(stopped)
    with pytest.raises(UsageError, match=r"loss.label_smoothing is 0.1, got 0.3. Pass --override"):
        train(resume=stopped, quiet=True)
    with tiny.killed_after(4):
        train(resume=stopped, settings={"optim.lr": 0.5}, override=True)
    said = capfd.readouterr().err
    assert "optim.lr changes from 0.001 to 0.5 from here on." in said
    assert "loss.label_smoothing changes from 0.1 to 0.3 from here on." in said
    assert json.loads(load_state(stopped / "state")[0].recipe["optim.lr"]) == 0.5
    assert load_recipe(stopped / "recipe.yaml").optim.lr == 0.5
    assert "torch:" in (stopped / "recipe.yaml").read_text()
    train(resume=stopped, quiet=True)


def test_a_run_goes_on_with_other_groups_of_weights(undisturbed: Path, stopped: Path, monkeypatch: Patch) -> None:
    """The moments are those of each weight, whatever group of the optimizer it is in."""
    moments, restored, groups = load_state(stopped / "state")[1], {}, []
    restore = loop.Learner.restore

    def look(self: loop.Learner, *saved: Any) -> None:
        restore(self, *saved)
        restored.update({name: tensor.clone() for name, tensor in self.state()[0].items()})
        groups.extend((group["weight_decay"], group.get("lr_scale", 1.0)) for group in self.optimizer.param_groups)

    monkeypatch.setattr(loop.Learner, "restore", look)
    settings = {"optim.weight_decay": 0.0, "optim.layer_decay": 0.9}
    train(resume=stopped, settings=settings, override=True, quiet=True)
    assert restored.keys() == moments.keys()
    assert all(torch.equal(restored[name], moments[name]) for name in moments)
    assert any(name.endswith("exp_avg") for name in moments)
    decays, scales = zip(*groups, strict=True)
    assert set(decays) == {0.0}
    assert len(set(scales)) > 1
    assert newest_step(stopped / "state") == tiny.STEPS
    with pytest.raises(AssertionError, match="tensors differ"):
        tiny.assert_same_run(undisturbed, stopped)


DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda data: (data / "class1" / "003.png").unlink(), r"1 image gone \(class1/003.png\)"),
    "new": (lambda data: shutil.copy(data / "class0" / "000.png", data / "class0" / "new.png"), "1 image new"),
    "changed": (lambda data: shutil.copy(data / "class0" / "000.png", data / "class0" / "001.png"), "1 image changed"),
    "class": (lambda data: (data / "class1").rename(data / "b"), r"1 class gone \(class1\), 1 class new \(b\)"),
}


@pytest.mark.parametrize("change", DATA)
def test_other_data_is_refused(change: str, noise: Path, stopped: Path, tmp_path: Path) -> None:
    data, (alter, message) = shutil.copytree(noise, tmp_path / "data"), DATA[change]
    alter(data)
    states = sorted((stopped / "state").iterdir())
    with pytest.raises(DataError, match=rf"needs the data that it started with; .*/data differs .*{message}"):
        train(data, resume=stopped, quiet=True)
    assert sorted((stopped / "state").iterdir()) == states


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "digits"}, UsageError, "--resume uses the recipe and the directory of the run"),
        ({"out": "x"}, UsageError, "--resume uses the recipe and the directory of the run"),
        ({"force": True}, UsageError, "--resume uses the recipe and the directory of the run"),
        ({"stop_after": 0}, UsageError, r"stop_after must be an epoch, from 1; got 0\."),
        ({"max_time": "soon"}, UsageError, "such as 10ms, 90s, 45m or 1h30m; got 'soon'"),
        ({"max_time": "0"}, UsageError, "longer than zero; got '0'"),
        ({"max_time": ""}, UsageError, "got ''"),
        ({"epochs": 1, "override": True}, UsageError, r"has trained 4, got epochs 1, which is 3 steps\. Raise epochs"),
        ({"settings": {"sync_bn": True}, "override": True}, UsageError, "sync_bn needs GPUs; .* --set sync_bn=false"),
        ({"resume": "nowhere"}, CheckpointError, r"must name a run directory; .*nowhere has no"),
    ],
    ids=str,
)
def test_what_does_not_go_with_resume(arguments, error, message, stopped):
    with pytest.raises(error, match=message):
        train(**{"resume": stopped, "quiet": True, **arguments})
    assert load_recipe(stopped / "recipe.yaml").epochs == 2


# Teacher


def make_teacher(folder: Path, seed: int, **arguments: Any) -> Path:
    torch.manual_seed(seed)
    model = create_model("levit_nano_32", num_classes=3, depth=[1, 1, 1], **arguments)
    return save_model_dir(model, folder, force=True)


def edit_config(teacher: Path, **values: Any) -> None:
    config = json.loads((teacher / CONFIG).read_text())
    config["pretrained_cfg"] |= {key: value for key, value in values.items() if key in config["pretrained_cfg"]}
    (teacher / CONFIG).write_text(json.dumps(config | {key: values[key] for key in values.keys() & config.keys()}))


def shift_weight(teacher: Path) -> None:
    """The last bit of one weight."""
    state = load_file(teacher / WEIGHTS)
    state["head.linear.bias"][0] = torch.nextafter(state["head.linear.bias"][0], torch.tensor(9.0))
    save_file(state, teacher / WEIGHTS)
    edit_config(teacher, weights_sha256=hashlib.sha256((teacher / WEIGHTS).read_bytes()).hexdigest())


CHANGES: tuple[tuple[Callable[[Path], object], str, int], ...] = (
    (shift_weight, "teacher .* its weights_sha256 was [0-9a-f]{64} and is now [0-9a-f]{64}", 3),
    (lambda path: edit_config(path, mean=[0.4] * 3), r"its preprocessing was .*0\.485.* and is now .*0\.4,", 3),
    (lambda path: make_teacher(path, 1, act_layer="gelu"), "its architecture was .* and is now", 3),
    (shutil.rmtree, "A teacher must be a model name or a model directory; .*is neither", 4),
)
STILL = {"augment.mixup": 0, "augment.cutmix": 0, "augment.rand_augment": "null", "augment.erase_prob": 0}
STILL |= {"augment.crop": "none", "augment.hflip": False, "augment.color_jitter": 0}


@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_teacher_is_refused(cache: bool, noise: Path, tmp_path: Path, capfd: Capture) -> None:
    """Also with its outputs cached; the teacher itself resumes to the same bits, another one on purpose is told."""
    teacher, other = (make_teacher(tmp_path / name, seed) for seed, name in enumerate(("teacher", "other"), 1))
    settings = {"distill.teacher": str(teacher), "distill.cache": cache, **(STILL if cache else {})}
    whole, out = tiny.run(noise, tmp_path / "whole", **settings), tmp_path / "run"
    with tiny.killed_after(3):
        tiny.run(noise, out, **settings)
    kept = shutil.copytree(teacher, tmp_path / "kept")
    for alter, message, code in CHANGES:
        alter(teacher)
        assert main(["train", "--resume", str(out), "--quiet"]) == code
        said = capfd.readouterr().err
        assert re.search(message, said), said
        assert newest_step(out / "state") == 3
        shutil.rmtree(teacher, ignore_errors=True)
        shutil.copytree(kept, teacher)
    changed = shutil.copytree(out, tmp_path / "changed")
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)
    train(resume=changed, settings={"distill.teacher": str(other)}, override=True)
    note = f"distill.teacher changes from {teacher} to {other} from here on."
    assert note in " ".join(capfd.readouterr().err.split())
    record = load_state(changed / "state")[0].teacher
    assert record["weights_sha256"] == sha256_of_tensors(load_file(other / WEIGHTS))


# Weights to start from


@pytest.mark.slow
def test_public_weights_are_read_once(noise: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    import timm

    source = timm.create_model("resnet10t")
    put_in_cache(tmp_path / "hub", "timm/resnet10t.c3_in1k", "model.safetensors", source.state_dict())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = {**tiny.EVERYTHING, "model": "resnet10t", "img_size": 32, "pretrained": True}
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(noise, settings=settings, out=whole, quiet=True)
    with tiny.killed_after(3):
        train(noise, settings=settings, out=out, quiet=True)
    shutil.rmtree(tmp_path / "hub")
    stored = out / PUBLIC_CLASSIFIER
    content = stored.read_bytes()
    stored.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="must be the file that the run wrote"):
        train(resume=out, quiet=True)
    stored.write_bytes(content)
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


# Machine


def notes_of(out: Path) -> list[str]:
    """What is told when a run is resumed here."""
    return resume.open_run(out, (), override=False).notes(Runtime.of("cpu"))


def test_each_difference_of_the_machine_is_told(stopped: Path, monkeypatch: Patch) -> None:
    assert notes_of(stopped) == []
    now = environment.machine(Runtime.of("cpu"))
    keys = ("weft", "python", "torch", "torchvision", "timm", "numpy", "pillow", "device", "instructions")
    edit_records(stopped, **dict.fromkeys(keys, "other"))
    was = yaml.safe_load((stopped / "recipe.yaml").read_text())["environment"]
    variables = [f"{name} was {was[name]} and is now 0: the result may" for name in environment.VARIABLES]
    for name in environment.VARIABLES:
        monkeypatch.setenv(name, "0")
    expected = [f"{key} was other and is now {now[key]}: the result may" for key in keys]
    assert sorted(notes_of(stopped)) == sorted(f"{text} differ in the last bits." for text in expected + variables)


@pytest.mark.parametrize(
    ("was", "now", "share", "advice"), [(1, 2, "0.5", "Use 1 process to get"), (2, 1, "2", "Use 2 processes to get")]
)
def test_another_number_of_processes_changes_batchnorm(was, now, share, advice, stopped, monkeypatch):
    run = resume.open_run(stopped, (), override=False)
    run.state.machine["processes"] = was
    runtime, here = Runtime.of("cpu", "fp32"), resume.machine
    monkeypatch.setattr(resume, "machine", lambda runtime: {**here(runtime), "processes": now})
    (note,) = run.notes(runtime)
    assert f"each process now has {share} times as many images per step. The result differs by more than" in note
    assert f"{advice} the same result up to rounding." in note
    for change in ({"sync_bn": True}, {"train_mode": "eval"}):  # statistics of all images, or fixed ones
        other = run._replace(recipe=dataclasses.replace(run.recipe, **change))
        assert f"processes was {was} and is now {now}: the result may differ in the last bits." in other.notes(runtime)


# Several processes in one directory

TOGETHER = """
import sys
import weft.train.run
from weft.cli import main
print("ready", flush=True)
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["resume", pytest.param("start", marks=pytest.mark.slow)])
def test_of_several_runs_in_one_directory_one_goes_on(command, noise, undisturbed, stopped, tmp_path):
    out = stopped if command == "resume" else tmp_path / "new" / "run"
    with locked(out), pytest.raises(UsageError, match=rf"is in use by process {os.getpid()}\. Wait for it"):
        train(resume=stopped, quiet=True) if command == "resume" else tiny.run(noise, out)
    words = tiny.command(None if command == "resume" else noise, out)[3:]
    processes = [
        forked.Popen(
            [sys.executable, "-c", TOGETHER, *words],
            env=tiny.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=300)[1] for process in processes]
    codes = sorted(process.returncode for process in processes)
    allowed = [[0, 2], [0, 0]] if command == "resume" else [[0, 2]]  # the second one may find a finished run
    assert codes in allowed, said
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            assert re.search(r"is in use by process (\d+|unknown)\.|must be new or empty", text), text
    tiny.assert_same_run(undisturbed, out)


def test_shards_on_a_server_have_an_order_of_their_own(noise: Path, undisturbed: Path) -> None:
    run = resume.open_run(undisturbed, (), override=False)
    run.state.by_files = True
    with pytest.raises(DataError, match=r"were on a server, and \S+ is on a disk\. Pass an address of that kind"):
        run.check_data(open_data(noise))
