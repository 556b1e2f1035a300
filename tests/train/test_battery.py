"""What happens to runs in the world: signals, full and vanishing disks, numbers that explode, files that vanish or
hang, too little memory, strange surroundings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import forked
from tests.train import tiny
from weft.data import ImageDataset, Sample, eval_transform, make_loader
from weft.data.source import KeyedSource
from weft.errors import DataError, DivergedError, StorageError, UsageError, WeftError
from weft.train import loop, train
from weft.train.state import load_state

HERE = dict(model="levit_nano_32", quiet=True)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


@pytest.fixture(scope="session")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert tiny.finish(tiny.command(photos, out)).returncode == 0
    return out


def settings(**more: object) -> dict[str, object]:
    return {**tiny.EVERYTHING, **tiny.ARGUMENTS["levit_nano_32"], **more}


@pytest.mark.slow_except("2-2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_stops_the_run_before_its_end(
    number: signal.Signals, code: int, workers: int, photos: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = forked.Popen(
        tiny.command(photos, out, workers=workers), env=tiny.environment(), stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not list(out.glob("state/step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(number)
    _, output = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("the run had ended before the signal came")
    assert process.returncode == code, output
    assert "resume with: weft train --resume" in output
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


@pytest.mark.parametrize("moment", ["in a step", "between two steps"])
def test_a_reader_that_dies_in_a_step_leaves_no_half_step_behind(
    moment: str, photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch tells of a dead worker by an exception anywhere in the parent: here once BatchNorm has seen a batch that
    the weights have not."""
    out, learn = tmp_path / "run", loop.Learner.train_step

    def dying(self: loop.Learner, parts: list[loop.Batch], *more: object) -> loop.StepResult:
        if self.step != 3:
            return learn(self, parts, *more)
        if moment == "in a step":
            self.model(parts[0][0])
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Learner, "train_step", dying)
        with pytest.raises(SystemExit) as caught:
            train(photos, settings=settings(), out=out, **HERE)
    assert caught.value.code == 143
    assert load_state(out / "state")[0].step == 3
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


@pytest.mark.parametrize("cause", ["a deadline", "a signal"])
def test_an_error_after_a_request_to_stop_is_reported_as_itself(
    cause: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: loop.Learner, *more: object) -> loop.StepResult:
        if cause == "a signal":
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("The size of tensor a must match the size of tensor b")

    monkeypatch.setattr(loop.Learner, "train_step", failing)
    with pytest.raises(RuntimeError, match=r"^The size of tensor a must match"):
        train(photos, settings=settings(), out=tmp_path / "run", max_time=0.001, **HERE)


def test_a_reader_that_is_killed_is_told(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: loop.Learner, *more: object) -> loop.StepResult:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(loop.Learner, "train_step", killed)
    with pytest.raises(
        WeftError, match=r"one was terminated \(DataLoader worker \(pid 7\) is killed .*No state was saved yet"
    ):
        train(photos, settings=settings(), out=tmp_path / "run", **HERE)


@pytest.mark.slow_except("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_whole_group(number: signal.Signals, photos: Path, whole: Path, tmp_path: Path) -> None:
    """It reaches the processes that read images as well; they leave it to their parent."""
    out = tmp_path / "run"
    process = forked.Popen(
        tiny.command(photos, out, workers=2),
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not list(out.glob("state/step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, output = process.communicate(timeout=120)
    assert process.returncode in (0, 128 + number), output
    assert "Traceback" not in output
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


def test_readers_end_with_their_parent(photos: Path, tmp_path: Path) -> None:
    """Also if it is killed; a signal to its process group does not reach them."""
    out = tmp_path / "run"
    process = forked.Popen(tiny.command(photos, out, workers=2), env=tiny.environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(out.glob("state/step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    readers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert readers
    assert all(os.getpgid(int(reader)) == int(reader) for reader in readers)
    process.kill()
    process.wait()
    until = time.monotonic() + 120
    while any(Path(f"/proc/{reader}/stat").exists() for reader in readers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{reader}/stat").exists() for reader in readers)


def test_the_second_signal_acts_at_once_and_breaks_nothing(photos: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = forked.Popen(tiny.command(photos, out), env=tiny.environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(out.glob("state/step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) in (0, 130)
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


@pytest.mark.slow_except("without record")
@pytest.mark.parametrize("damage", ["truncated", "flipped", "zeros", "without record"])
def test_a_damaged_newest_state_is_told_and_the_one_before_taken(
    damage: str, photos: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    stopped_at(4, photos, out)
    newest = sorted((out / "state").glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    if damage == "truncated":
        os.truncate(newest, len(content) // 3)
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    elif damage == "zeros":
        newest.write_bytes(bytes(len(content)))
    else:
        save_file(load_file(newest), newest)
    train(resume=out)
    assert f"Skipped the state {newest.stem}: " in capfd.readouterr().err
    tiny.assert_same_run(whole, out)


class Killed(BaseException):
    """Stands for a kill."""


def stopped_at(step: int, photos: Path, out: Path, **more: object) -> None:
    learn = loop.Learner.train_step

    def fatal(self: loop.Learner, *args: object) -> loop.StepResult:
        if self.step == step:
            raise Killed
        return learn(self, *args)

    loop.Learner.train_step = fatal  # type: ignore[method-assign]  # given back below
    try:
        with pytest.raises(Killed):
            train(photos, settings=settings(**more), out=out, **HERE)
    finally:
        loop.Learner.train_step = learn  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_the_last_state_intact(photos: Path, whole: Path, tmp_path: Path) -> None:
    """A limit on the size of files, as a quota: the second state does not fit any more."""
    out = tmp_path / "run"
    stopped_at(2, photos, out)
    before = load_state(out / "state")[0].step
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "from weft.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = tiny.finish([sys.executable, "-c", code, "train", "--resume", str(out), "--quiet"])
    assert done.returncode == 6, done.stderr
    assert "must be writable; File too large for " in done.stderr
    assert load_state(out / "state")[0].step == before
    assert not list(out.rglob(".*.part"))
    train(resume=out, quiet=True)
    tiny.assert_same_run(whole, out)


def test_a_run_directory_that_vanishes(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, learn = tmp_path / "run", loop.Learner.train_step

    def removed(self: loop.Learner, *args: object) -> loop.StepResult:
        if self.step == 2:
            shutil.rmtree(out)
        return learn(self, *args)

    monkeypatch.setattr(loop.Learner, "train_step", removed)
    with pytest.raises(StorageError, match=r"must be writable; No such file or directory"):
        train(photos, settings=settings(), out=out, **HERE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(StorageError, match="Permission denied"):
        train(photos, settings=settings(), out=tmp_path / "closed" / "run", **HERE)


EXPLOSIONS = {
    "loss nan": lambda loss: loss * float("nan"),
    "loss inf": lambda loss: loss + float("inf"),
    "gradient nan": lambda loss: loss + 0 * loss.detach() + (loss - loss.detach()) * float("nan"),
    "gradient inf": lambda loss: loss + (loss - loss.detach()) * 1e38 * 1e38,
}


@pytest.mark.slow_except("1-loss inf")
@pytest.mark.parametrize("name", EXPLOSIONS)
@pytest.mark.parametrize("step", [1, 5])
def test_an_explosion_stops_the_run_in_that_step(
    name: str, step: int, photos: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, objective, out = [], loop.Objective.__call__, tmp_path / "run"

    def exploding(self: loop.Objective, *args: object) -> torch.Tensor:
        calls.append(1)
        loss = objective(self, *args)
        return EXPLOSIONS[name](loss) if len(calls) == 2 * step else loss  # two parts a step

    with monkeypatch.context() as patch:
        patch.setattr(loop.Objective, "__call__", exploding)
        where = rf"at step {step} \(epoch {1 + step // 4}\), learning rate .*, images class\d/\d+\.png, "
        with pytest.raises(DivergedError, match=where):
            train(photos, settings=settings(), out=out, **HERE)
    lines = (out / "steps.csv").read_text().splitlines()
    assert lines[-1].startswith(f"{step},")
    assert "nan" in lines[-1] or "inf" in lines[-1]  # as it was, and not a smoothed number
    if step == 5:
        assert load_state(out / "state")[0].step == 4
        train(resume=out, quiet=True)  # without the explosion
        tiny.assert_same_run(whole, out)


@pytest.fixture
def copied(photos: Path, tmp_path: Path) -> Path:
    shutil.copytree(photos, tmp_path / "data")
    return tmp_path / "data"


def vanishing(copied: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Pictures vanish or break before the fourth step."""
    learn, victim = loop.Learner.train_step, copied / "class1" / "000.png"

    def learned(self: loop.Learner, *args: object) -> loop.StepResult:
        if self.step == 3 and victim.exists() and victim.stat().st_size > 20:
            for name in (f"{number:03}.png" for number in range(16)):
                path = copied / "class1" / name
                path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:20])
        return learn(self, *args)

    monkeypatch.setattr(loop.Learner, "train_step", learned)


@pytest.mark.parametrize("how", ["gone", "truncated"])
def test_a_picture_that_vanishes_stops_the_run(
    how: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanishing(copied, monkeypatch, how)
    with pytest.raises(
        DataError, match=r"class1/0\d\d\.png cannot be used: .* It could be read when the data was opened"
    ):
        train(copied, settings=settings(), out=tmp_path / "run", **HERE)
    assert load_state(tmp_path / "run" / "state")[0].step >= 3


class Hanging:
    """A reader for which one picture is out of reach."""

    def __call__(self, key: str) -> bytes:
        if key == "bad.png":
            time.sleep(600)
        return self.good

    def __init__(self, good: bytes) -> None:
        self.good = good


def test_a_reader_that_hangs_is_named(photos: Path) -> None:
    good = (photos / "class0" / "000.png").read_bytes()
    source = KeyedSource(Hanging(good), ["a"], ["fine.png", "bad.png", "also.png", "too.png"], [0] * 4)
    cfg = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    dataset = ImageDataset(source, eval_transform({**cfg, "crop_pct": 1.0, "crop_mode": "center"}))
    loader = make_loader(dataset, 1, shuffle=False, workers=1, timeout_s=1)
    with pytest.raises(DataError, match=r"must be read within 1 s; one was not\. The workers are reading bad\.png"):
        list(loader)
    assert isinstance(source.read(0), Sample)


def test_too_little_memory_is_a_sentence(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: loop.Learner, *args: object) -> loop.StepResult:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr(loop.Learner, "train_step", greedy)
    with pytest.raises(UsageError, match=r"must fit into memory; batch_size 12 in 2 part\(s\) does not\. Lower"):
        train(photos, settings=settings(), out=tmp_path / "run", **HERE)


@pytest.mark.slow
def test_strange_surroundings(photos: Path, tmp_path: Path) -> None:
    """A name with a space and a newline, a home that cannot be written, a strict umask, another language."""
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    out = tmp_path / "a b\nc" / "run"
    before = os.umask(0o077)
    try:
        done = tiny.fresh(tiny.command(photos, out), HOME=str(home), LC_ALL="C", TMPDIR=str(tmp_path))
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert (out / "best" / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert tiny.fresh(tiny.command(None, out), HOME=str(home), LC_ALL="C").returncode == 0


@pytest.mark.slow
def test_the_losses_of_a_hundred_steps(tmp_path: Path) -> None:
    """Recorded once; the same machine gives the same digits, another one the same up to rounding."""
    recorded = Path(__file__).with_name("losses.txt")
    arguments = {"epochs": 25, "batch_size": 100, "optim.lr": 1e-3, "device": "cpu", "augment.mixup": 0.8}
    arguments |= {"model_args.depth": [1, 1, 1], "evaluate_every": 25}
    command = [sys.executable, "-m", "weft", "train", "digits", "--model", "levit_nano_32", "--limit", "400", "--out"]
    done = tiny.finish(
        [*command, str(tmp_path / "run"), *(w for k, v in arguments.items() for w in ("--set", f"{k}={v}"))]
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split(",")[3]) for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()[1:]]
    if os.environ.get("WEFT_RECORD"):
        recorded.write_text("".join(f"{loss!r}\n" for loss in losses))
    expected = [float(line) for line in recorded.read_text().splitlines()]
    assert len(losses) == 100
    # rounding differs between processors, and a hundred steps of AdamW make it grow
    assert losses[:10] == pytest.approx(expected[:10], rel=1e-5)
    assert losses == pytest.approx(expected, rel=2e-2)
