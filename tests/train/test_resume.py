"""A run that was killed or stopped goes on to the very bits that it would have come to, or says why it cannot."""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import signal
import subprocess
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.train import tiny
from weft.errors import CheckpointError, DataError, StoppedError, UsageError
from weft.machine.runtime import Runtime
from weft.recipes import Recipe, load_recipe
from weft.runs.directory import read_metrics
from weft.train import loop, resume, train
from weft.train import run as running
from weft.train.resume import open_run
from weft.train.state import load_state

MODELS = tuple(tiny.ARGUMENTS)
STATES = "state/step-*.safetensors"


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


@pytest.fixture(scope="session")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a run that nothing disturbed, in a process of its own."""
    folder = tmp_path_factory.mktemp("whole")

    class Runs(dict[str, Path]):
        def __missing__(self, model: str) -> Path:
            done = tiny.finish(tiny.command(photos, folder / model, model))
            assert done.returncode == 0, done.stderr
            self[model] = folder / model
            return self[model]

    return Runs()


def started(arguments: list[str], out: Path) -> subprocess.Popen[bytes]:
    """The run in a process, once it has done another step."""
    before = set(out.glob(STATES))
    process = forked.Popen(
        arguments,
        env=tiny.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 120
    while not set(out.glob(STATES)) - before and time.monotonic() < until and process.poll() is None:
        time.sleep(0.005)
    return process


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:])])
def test_killed_again_and_again(model: str, photos: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """`kill -9` at random moments, with worker processes; on with another number of them."""
    out, chance = tmp_path / "run", random.Random(model)
    process = started(tiny.command(photos, out, model, workers=2), out)
    for workers in (1, 2, 0):
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = started(tiny.command(None, out, workers=workers), out)
    process.kill()
    process.wait()
    done = tiny.finish(tiny.command(None, out))
    assert done.returncode == 0, done.stderr
    tiny.assert_same_run(whole[model], out)
    steps = [int(line.split(",")[0]) for line in (out / "steps.csv").read_text().splitlines()[1:]]
    assert steps == list(range(1, tiny.STEPS + 1))


class Killed(BaseException):
    """Stands for `kill -9`: nothing in weft catches it."""


def run_here(photos: Path, out: Path, model: str = "levit_nano_32", **more: object) -> None:
    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS[model], **more}
    train(photos, model, settings=settings, out=out, quiet=True)


def killed_at(
    step: int,
    photos: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    resume: dict[str, object] | None = None,
    **more: object,
) -> None:
    """A run, new or resumed, that ends after so many steps, as if the process had vanished."""
    learn = loop.Learner.train_step

    def fatal(self: loop.Learner, *args: object) -> loop.StepResult:
        if self.step == step:
            raise Killed
        return learn(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Learner, "train_step", fatal)
        with pytest.raises(Killed):
            run_here(photos, out, **more) if resume is None else train(resume=out, **resume)


@pytest.fixture(scope="session")
def whole_here(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run in this process."""
    out = tmp_path_factory.mktemp("here") / "run"
    run_here(photos, out)
    return out


@pytest.mark.slow_except("4", "3")
@pytest.mark.parametrize("step", range(1, tiny.STEPS))
def test_from_every_step(
    step: int, photos: Path, whole_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(step, photos, tmp_path / "run", monkeypatch)
    train(resume=tmp_path / "run", workers=step % 3, quiet=True)
    tiny.assert_same_run(whole_here, tmp_path / "run")


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
CHOICES = [(key, value) for key, value in choices() if key not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), CHOICES, ids=str)
def test_with_every_choice(
    key: str, value: object, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key == "compile" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    if value == "auto":  # both runs find the same, whatever else this machine does
        monkeypatch.setattr(
            "weft.train.decisions.find_precision", lambda recipe, classes, runtime: (runtime, "Precision.")
        )
    arguments = {key: value}
    if needed := NEEDS_MODEL.get(key.split(".")[0], NEEDS_MODEL.get(key)):
        arguments |= {needed: str(_trained(photos, tmp_path / "before"))}
    run_here(photos, tmp_path / "whole", **arguments)
    killed_at(4, photos, tmp_path / "run", monkeypatch, **arguments)
    train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(tmp_path / "whole", tmp_path / "run")


def _trained(photos: Path, out: Path) -> Path:
    train(photos, "levit_nano_32", settings={**tiny.ARGUMENTS["levit_nano_32"], "epochs": 1}, out=out, quiet=True)
    return out / "best"


def _skip_a_batch(one: running.Run) -> None:
    one.meter.step += 1


def _repeat_a_batch(one: running.Run) -> None:
    one.meter.step -= 1


def _forget_the_average(one: running.Run) -> None:
    one.learner.ema.module.load_state_dict(one.learner.model.state_dict())


def _forget_the_moments(one: running.Run) -> None:
    one.learner.optimizer.state.clear()


def _wrong_step(one: running.Run) -> None:
    one.learner.step += 1


def _wrong_epoch(one: running.Run) -> None:
    one.history[-1] = one.history[-1]._replace(epoch=0)


def _forget_batchnorm(one: running.Run) -> None:
    for module in one.learner.model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            module.reset_running_stats()


def _stale_best(one: running.Run) -> None:
    one.history[0] = one.history[0]._replace(val_top1=101.0)


def _forget_the_meter(one: running.Run) -> None:
    one.meter.loss_sum, one.meter.count = 0.0, 0


def _forget_the_history(one: running.Run) -> None:
    one.history.clear()


def _random_augmentation(one: running.Run) -> None:
    one.plan.batches.dataset.seed += 1


def _random_step(one: running.Run) -> None:
    one.learner._seed = lambda number, parts: random.randrange(2**31)


FAULTS = (
    _skip_a_batch, _repeat_a_batch, _forget_the_average, _forget_the_moments, _wrong_step, _wrong_epoch,
    _forget_batchnorm, _stale_best, _forget_the_meter, _forget_the_history, _random_augmentation, _random_step,
)  # fmt: skip


@pytest.mark.slow_except("_forget_the_meter", "_forget_the_history", "_random_augmentation", "_forget_the_moments")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_with_a_fault_is_noticed(
    fault: object, photos: Path, whole_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: each way to resume wrongly makes the comparison fail."""
    killed_at(4, photos, tmp_path / "run", monkeypatch)
    restore = running.Run.restore

    def faulty(self: running.Run, state: object) -> None:
        restore(self, state)
        fault(self)

    monkeypatch.setattr(running.Run, "restore", faulty)

    def go_on_and_compare() -> None:
        train(resume=tmp_path / "run", quiet=True)
        tiny.assert_same_run(whole_here, tmp_path / "run")

    with pytest.raises((AssertionError, UsageError, IndexError)):
        go_on_and_compare()


def test_a_finished_run_is_finished(whole_here: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_here, tmp_path / "run")
    result = train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(whole_here, tmp_path / "run")
    assert result.epochs == 2
    assert (tmp_path / "run" / "report" / "report.html").is_file()


def steps_of(out: Path) -> list[list[float]]:
    return [[float(cell) for cell in line.split(",")] for line in (out / "steps.csv").read_text().splitlines()[1:]]


def assert_extended(before: Path, out: Path, steps: int) -> None:
    """Every step up to the new end is trained once, the schedule ends at its minimum, and the weights have changed."""
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


@pytest.mark.parametrize(
    ("length", "longer", "steps", "epochs"),
    [
        ({"epochs": 2}, {"epochs": 3}, 9, 3),
        ({"epochs": None, "steps": 4}, {"steps": 8}, 8, 4),  # the second epoch had one step of three
        ({"epochs": 0, "head_init": "probe"}, {"epochs": 2}, 6, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"epochs": 2}, {"epochs": 5}, 15, 5),
                ({"epochs": 2, "evaluate_every": 2}, {"epochs": 3}, 9, 3),
                ({"epochs": 2}, {"steps": 8}, 8, 3),
                ({"epochs": None, "steps": 4}, {"steps": 5}, 5, 3),
                ({"epochs": None, "steps": 4}, {"epochs": 3}, 9, 4),
            )
        ),
    ],
    ids=str,
)
def test_a_finished_run_trains_every_added_step(
    length: dict[str, object], longer: dict[str, object], steps: int, epochs: int, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_here(photos, out, **length)
    shutil.copytree(out, tmp_path / "before")
    result = train(resume=out, settings=longer, override=True, quiet=True)
    assert result.epochs == epochs
    assert_extended(tmp_path / "before", out, steps)


def test_an_extended_run_resumes_bit_exactly(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an epoch that the shorter run had ended early."""
    run_here(photos, tmp_path / "whole", epochs=None, steps=4)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    longer = {"settings": {"steps": 9}, "override": True, "quiet": True}
    train(resume=tmp_path / "whole", **longer)
    for step in (5, 7):
        killed_at(step, photos, tmp_path / "run", monkeypatch, resume=longer)
        longer = {"quiet": True}
    train(resume=tmp_path / "run", **longer)
    tiny.assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.5), (0.9, 0.0)])
def test_a_longer_run_may_start_change_or_end_its_average(
    before: float, after: float, photos: Path, tmp_path: Path
) -> None:
    """An average that starts here starts from the weights, which each of its steps moves it after."""
    out = tmp_path / "run"
    run_here(photos, out, **{"epochs": 1, "optim.ema_decay": before})
    old = tiny.state_of(out)
    train(resume=out, settings={"epochs": 2, "optim.ema_decay": after}, override=True, quiet=True)
    new = tiny.state_of(out)
    assert any(name.startswith("ema.") for name in new) == (after > 0)
    name = "model.head.linear.weight"
    assert not torch.equal(old[name], new[name])
    if not before:
        between = (new["ema.head.linear.weight"] - old[name]) / (new[name] - old[name])
        assert 0 < float(between.median()) < 1


def test_a_run_that_early_stopping_ended_trains_on(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_here(photos, out, **{"epochs": 4, "patience": 1, "optim.lr": 1e-9, "train_mode": "eval"})
    done = steps_of(out)[-1][0]
    assert done < 12
    train(resume=out, settings={"epochs": 8}, override=True, quiet=True)
    assert steps_of(out)[-1][0] > done


def test_fewer_steps_than_trained_are_refused(whole_here: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_here, tmp_path / "run")
    with pytest.raises(UsageError, match=r"has trained 6, got epochs 1, which is 3 steps\. Raise epochs or steps"):
        train(resume=tmp_path / "run", epochs=1, override=True, quiet=True)
    assert load_recipe(tmp_path / "run" / "recipe.yaml").epochs == 2


def test_time_runs_out(photos: Path, whole_here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from weft.cli import main

    arguments = tiny.command(photos, tmp_path / "run")[3:]
    assert main([*arguments, "--max-time", "0.01", "--quiet"]) == 143
    assert "Stopped after step 1 of 6: the time limit is reached." in capfd.readouterr().err
    train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(whole_here, tmp_path / "run")


def test_a_run_waits_after_an_epoch(photos: Path, whole_here: Path, tmp_path: Path) -> None:
    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS["levit_nano_32"]}
    with pytest.raises(StoppedError, match=r"after step 3 of 6: the requested number of epochs is reached\."):
        train(photos, "levit_nano_32", settings=settings, out=tmp_path / "run", stop_after=1, quiet=True)
    with pytest.raises(StoppedError):  # it has no epoch left to run before it stops again
        train(resume=tmp_path / "run", stop_after=1, quiet=True)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2
    train(resume=tmp_path / "run", stop_after=2, quiet=True)
    tiny.assert_same_run(whole_here, tmp_path / "run")
    with pytest.raises(UsageError, match=r"stop_after must be an epoch, from 1; got 0\."):
        train(photos, stop_after=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", "such as 10ms, 90s, 45m or 1h30m; got 'soon'"), ("0", "longer than zero; got '0'"), ("", "got ''")],
)
def test_times_that_are_none(text: str, message: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(photos, max_time=text, out=tmp_path / "run")


@pytest.fixture
def stopped(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data, and a run on it that was killed."""
    shutil.copytree(photos, tmp_path / "data")
    killed_at(3, tmp_path / "data", tmp_path / "run", monkeypatch)
    return tmp_path / "run"


def test_another_model_is_refused(stopped: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cannot change its model; in .* is levit_nano_32, got ceit_nano_32\. Start a new run"
    ):
        train(resume=stopped, model="ceit_nano_32", quiet=True)


def test_another_rate_only_when_meant(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"optim.lr is 0.001, got 0.5. Pass --override"):
        train(resume=stopped, settings={"optim.lr": 0.5}, quiet=True)
    assert load_recipe(stopped / "recipe.yaml").optim.lr == 1e-3
    train(resume=stopped, settings={"optim.lr": 0.5}, override=True)
    assert "optim.lr changes from 0.001 to 0.5 from here on." in capfd.readouterr().err
    assert load_recipe(stopped / "recipe.yaml").optim.lr == 0.5
    assert "torch:" in (stopped / "recipe.yaml").read_text()


def test_data_that_changed_is_refused(stopped: Path) -> None:
    state = sorted((stopped / "state").iterdir())
    (stopped.parent / "data" / "class1" / "003.png").unlink()
    with pytest.raises(DataError, match=r"needs the data that it started with; .*class1/003.png"):
        train(resume=stopped, quiet=True)
    assert sorted((stopped / "state").iterdir()) == state


def test_other_data_is_refused(stopped: Path, tmp_path: Path) -> None:
    other = tiny.paint(tmp_path / "other", classes=2)
    with pytest.raises(DataError, match=r"needs the data that it started with; .*other differs"):
        train(other, resume=stopped, quiet=True)


def test_data_may_move(stopped: Path, whole_here: Path, tmp_path: Path) -> None:
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    train(tmp_path / "elsewhere", resume=stopped, quiet=True)
    tiny.assert_same_run(whole_here, stopped)


@pytest.mark.parametrize("arguments", [{"recipe": "digits"}, {"out": "x"}, {"force": True}])
def test_what_does_not_go_with_resume(arguments: dict[str, object], stopped: Path) -> None:
    with pytest.raises(UsageError, match="--resume uses the recipe and the directory of the run"):
        train(resume=stopped, quiet=True, **arguments)


def test_no_run_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must name a run directory; .*nowhere has no"):
        train(resume=tmp_path / "nowhere", quiet=True)


def test_another_version_is_told(stopped: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    now = resume.machine
    monkeypatch.setattr(resume, "machine", lambda runtime: {**now(runtime), "torch": "1.0"})
    train(resume=stopped)
    assert "and is now 1.0: the result may differ in the last bits." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("was", "now", "arguments"),
    [
        (1, 2, "now has 0.5 times as many images per step. The result differs by more than rounding"),
        (1, 2, "Use 1 process to get the same result up to rounding."),
        (2, 1, "now has 2 times as many images per step"),
        (2, 1, "Use 2 processes to get the same result up to rounding."),
    ],
)
def test_another_number_of_processes_changes_batchnorm(
    was: int, now: int, arguments: str, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(stopped, (), override=False)
    run.state.machine["processes"] = was
    runtime, here = Runtime.of("cpu", "fp32"), resume.machine
    monkeypatch.setattr(resume, "machine", lambda runtime: {**here(runtime), "processes": now})
    assert arguments in " ".join(run.notes(runtime))
    for change in ({"sync_bn": True}, {"train_mode": "eval"}):  # statistics of all images, or fixed ones
        other = run._replace(recipe=dataclasses.replace(run.recipe, **change))
        assert f"processes was {was} and is now {now}: the result may differ in the last bits." in other.notes(runtime)


def test_synchronized_batchnorm_is_refused_on_a_cpu(stopped: Path) -> None:
    with pytest.raises(UsageError, match=r"sync_bn needs GPUs; .* Pass --set sync_bn=false"):
        train(resume=stopped, settings={"sync_bn": True}, override=True, quiet=True)


def test_torn_tables_are_written_again(stopped: Path, whole_here: Path) -> None:
    for name in ("steps.csv", "metrics.csv"):
        with (stopped / name).open("ab") as file:
            file.write(b"\0\xff,1,,,")
    train(resume=stopped, quiet=True)
    tiny.assert_same_run(whole_here, stopped)


def test_torn_metrics_of_a_finished_run_are_written_again(whole_here: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_here, tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").write_bytes(b"\xff")
    train(resume=tmp_path / "run", quiet=True)
    tiny.assert_same_run(whole_here, tmp_path / "run")


def test_the_number_of_threads_comes_back(stopped: Path) -> None:
    before = torch.get_num_threads()
    recorded = load_state(stopped / "state")[0].machine["threads"]
    try:
        torch.set_num_threads(recorded + 1)
        train(resume=stopped, quiet=True)
        assert torch.get_num_threads() == recorded
    finally:
        torch.set_num_threads(before)


def test_two_runs_in_one_directory(stopped: Path) -> None:
    from weft.runs.directory import LOCK

    holder = subprocess.Popen(
        [
            *("python3", "-c"),
            f"import fcntl, os, time; f = open({str(stopped / LOCK)!r}, 'a+'); fcntl.lockf(f, fcntl.LOCK_EX);"
            "f.truncate(0); f.write(str(os.getpid())); f.flush(); print('held', flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=rf"in use by process {holder.pid}\. Wait for it"):
            train(resume=stopped, quiet=True)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    train(resume=stopped, quiet=True)  # the lock of the dead is no lock


def test_half_written_files_are_swept(stopped: Path, whole_here: Path) -> None:
    """The run is locked, so no other process can be writing them."""
    leftovers = [stopped / "state" / ".step-9.safetensors.0123abcd.part", stopped / ".best.4567cdef.part"]
    kept = [stopped / "state" / ".x.part", stopped / "state" / "notes.txt"]
    leftovers[1].mkdir()
    for path in [leftovers[0], *kept]:
        path.write_text("half")
    train(resume=stopped, quiet=True)
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in kept)
    tiny.assert_same_run(whole_here, stopped)
