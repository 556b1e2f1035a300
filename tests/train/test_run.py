"""A run from data to directory: what it leaves, that it can be repeated to the bit, its surroundings and its errors."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import weft
from tests.helpers import without_home
from tests.train import tiny
from tests.train.conftest import COLOURS, PER_CLASS, SHORT, paint
from weft.cli import main
from weft.data import ImageDataset, Sample, eval_transform, make_loader, open_data
from weft.data.loader import _WorkerIterator
from weft.data.source import KeyedSource
from weft.errors import DataError, StoppedError, StorageError, UsageError, WeftError
from weft.recipes import load_recipe
from weft.runs.directory import CONTENTS, EpochRow, locked
from weft.train import RunResult, begin, start, train

Patch = pytest.MonkeyPatch


# The directory


def test_colours_are_learned_and_the_directory_is_as_promised(trained: RunResult) -> None:
    assert (trained.top1, trained.balanced_accuracy, trained.macro_f1) == (100, 100, 100)
    assert trained.count == len(COLOURS) * PER_CLASS // 5
    assert sorted(path.name for path in trained.out.iterdir()) == sorted(CONTENTS)
    with (trained.out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == EpochRow._fields
    assert [(row["epoch"], row["step"]) for row in rows] == [(str(n), str(3 * n)) for n in range(1, 7)]
    best = max(rows, key=lambda row: (float(row["val_top1"]), -float(row["val_loss"])))
    assert trained.best_epoch == int(best["epoch"])
    assert trained.top1 == pytest.approx(float(best["val_top1"]), rel=1e-5)
    assert trained.loss == pytest.approx(float(best["val_loss"]), rel=1e-5)
    assert [path.name for path in (trained.out / "report").iterdir()] == ["report.html"]
    config = json.loads((trained.out / "best" / "config.json").read_text())
    assert (config["architecture"], config["label_names"]) == ("weft_levit_nano_32", list(COLOURS))


def test_the_recipe_says_everything_and_repeats_the_run(undisturbed: Path, tmp_path: Path) -> None:
    written = yaml.safe_load((undisturbed / "recipe.yaml").read_text())
    assert written["environment"]["torch"] == torch.__version__.partition("+")[0]
    assert written["environment"]["train_images"] == 39
    assert written["environment"]["classes"] == ["class0", "class1", "class2"]
    assert (written["model"], written["epochs"], written["batch_size"]) == ("levit_nano_32", 2, 12)
    again = train(recipe=undisturbed / "recipe.yaml", out=tmp_path / "again", quiet=True)
    tiny.assert_same_run(undisturbed, again.out)
    assert load_recipe(again.out / "recipe.yaml") == load_recipe(undisturbed / "recipe.yaml")


def test_a_run_without_a_directory_gets_one_with_a_number(photos: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def begun(plan: object, out: Path, *_: object, **__: object) -> Path:
        (out / "recipe.yaml").touch()
        return out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(begin, "start", begun)
    monkeypatch.setattr(start, "_finished", lambda run: run)
    mine: dict[str, Any] = {"settings": {"name": "mine"}, **SHORT}
    assert train(photos, **SHORT) == Path("runs/levit_nano_32-photos")
    assert [train(photos, **mine) for _ in range(2)] == [Path("runs/mine"), Path("runs/mine-2")]
    Path("runs/mine-3").write_text("a file")
    with locked(Path("runs/mine-4")):  # by another run that is about to start
        assert train(photos, **mine) == Path("runs/mine-5")
    assert train(photos, force=True, **mine) == Path("runs/mine")


def test_bad_files_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paint(tmp_path / "photos", per_class=12)
    (folder / "red" / "empty.png").touch()
    result = train(folder, out=tmp_path / "run", **{**SHORT, "quiet": False, "epochs": 1})
    assert "empty.png" in capsys.readouterr().err
    assert result.count == 6
    assert "1 excluded" in (result.out / "report" / "report.html").read_text()


@pytest.mark.slow
def test_any_size_and_any_timm_model(photos: Path, tmp_path: Path) -> None:
    for name, more, size in (
        ("weft_levit_nano_32", {"img_size": "32x48"}, [3, 32, 48]),
        ("resnet10t", {"img_size": 32, "model": "resnet10t"}, [3, 32, 32]),
    ):
        result = train(photos, out=tmp_path / name, **{**SHORT, "epochs": 1, **more})
        config = json.loads((result.out / "best" / "config.json").read_text())
        assert config["architecture"] == name
        assert config["pretrained_cfg"]["input_size"] == size


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="file names are text there")
@pytest.mark.figures
def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paint(tmp_path / "photos", per_class=6)
    (folder / "red").rename(folder / "caf\xe9 $x^2$")
    (folder / os.fsdecode(b"caf\xe9")).mkdir()
    (folder / "green" / os.fsdecode(b"bad\xff.png")).touch()
    result = train(folder, out=tmp_path / "run", **{**SHORT, "epochs": 1, "quiet": False})
    assert "2 bad files excluded: 2 not-utf-8" in capsys.readouterr().err
    assert result.evaluation.classes == ["blue", "caf\xe9 $x^2$", "green"]
    assert "caf" in (result.out / "report" / "report.html").read_text(encoding="utf-8")
    again = train(recipe=result.out / "recipe.yaml", out=tmp_path / "again", quiet=True)
    tiny.assert_same_run(result.out, again.out)
    assert main(["evaluate", str(result.out), str(folder), "--split", "all"]) == 0
    assert main(["predict", str(result.out), str(folder), "--json"]) == 3


@pytest.mark.slow
def test_the_losses_of_a_hundred_steps(tmp_path: Path) -> None:
    """Recorded once; the same machine gives the same digits, another one the same up to rounding."""
    recorded = Path(__file__).with_name("losses.txt")
    settings = {"epochs": 25, "batch_size": 100, "optim.lr": 1e-3, "device": "cpu", "augment.mixup": 0.8}
    settings |= {"model": "levit_nano_32", "model_args.depth": [1, 1, 1], "evaluate_every": 25}
    out = train("digits", limit=400, settings=settings, out=tmp_path / "run", quiet=True).out
    losses = tiny.losses(out)
    if os.environ.get("WEFT_RECORD"):
        recorded.write_text("".join(f"{loss!r}\n" for loss in losses))
    expected = [float(line) for line in recorded.read_text().splitlines()]
    assert len(losses) == 100
    # rounding differs between processors, and a hundred steps of AdamW make it grow
    assert losses[:10] == pytest.approx(expected[:10], rel=1e-5)
    assert losses == pytest.approx(expected, rel=2e-2)


# Errors within a run


def _fail_after_a_signal(data: Path, out: Path) -> None:
    signal.raise_signal(signal.SIGTERM)
    raise RuntimeError("mine")


def _images(change: Callable[[Path], object]) -> Callable[..., None]:
    def act(data: Path, out: Path) -> None:
        for path in (data / "class1").iterdir():
            change(path)

    return act


KILLED = tiny.raising(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
MEMORY = tiny.raising(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you ..."))
UNREADABLE = r"class1/0\d\d\.png cannot be used: .* It passed the check when the data was opened"
ERRORS: dict[str, tuple[Callable[[Path, Path], object], type[BaseException], str]] = {
    # what happens before the first step
    "an error after a signal": (_fail_after_a_signal, RuntimeError, "^mine$"),
    "an error after a deadline": (tiny.raising(RuntimeError("mine")), RuntimeError, "^mine$"),
    "a reader that is killed": (
        KILLED,
        WeftError,
        "one was terminated .* is killed .*No state was saved yet",
    ),
    "too little memory": (
        MEMORY,
        UsageError,
        r"fit into memory; batch_size 12 in 2 part\(s\) .*\. Lower",
    ),
    "no directory": (lambda data, out: shutil.rmtree(out), StorageError, "must be writable; No such file"),
    "images that vanish": (_images(Path.unlink), DataError, UNREADABLE),
    "images that break": (_images(lambda path: os.truncate(path, 20)), DataError, UNREADABLE),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_within_a_run_is_told_with_its_cause(kind: str, noise: Path, tmp_path: Path) -> None:
    act, error, message = ERRORS[kind]
    data, out = shutil.copytree(noise, tmp_path / "data"), tmp_path / "run"
    train_args = {"max_time": 0.001} if "deadline" in kind else {}
    with tiny.at_step(0, lambda *_: act(data, out)), pytest.raises(error, match=message):
        tiny.run(data, out, train_args=train_args)


def test_damaged_images_are_replaced_counted_and_resumed(noise: Path, tmp_path: Path) -> None:
    """Damage that no header shows: training stops at it, or uses the next image, before and after a resume."""
    data, header = shutil.copytree(noise, tmp_path / "data"), {"data.check": "header"}
    keys = [key for key in open_data(data, check="header").train.keys if key.startswith("class1/")][:2]
    for key in keys:
        os.truncate(data / key, (data / key).stat().st_size - 60)
    with pytest.raises(DataError, match=r"class1/\d+\.png cannot be used: the file is truncated.*data\.damaged=next"):
        tiny.run(data, tmp_path / "stopped", **header)
    replaced = header | {"data.damaged": "next"}
    whole = train(data, settings=tiny.settings(**replaced), out=tmp_path / "whole", quiet=True)
    note = f"2 training images are damaged, and the next one of the class was used instead: {', '.join(keys)}."
    assert note in whole.notes
    assert note in (whole.out / "report" / "report.html").read_text()
    with pytest.raises(StoppedError):
        train(data, settings=tiny.settings(**replaced), out=tmp_path / "run", stop_after=1, quiet=True)
    resumed = train(resume=tmp_path / "run", quiet=True)
    assert note in resumed.notes
    tiny.assert_same_run(whole.out, resumed.out)


class Hanging:
    """A reader for which one picture is out of reach, and which tells when that is read."""

    def __init__(self, good: bytes, flag: Path) -> None:
        self.good, self.flag = good, flag

    def __call__(self, key: str) -> bytes:
        while key == "bad.png":
            self.flag.touch()
            time.sleep(600)
        return self.good


def test_a_reader_that_hangs_is_named(noise: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The time is over once the picture is read, and not before, on machines of any speed."""
    flag, get = tmp_path / "flag", _WorkerIterator._try_get_data

    def get_until_it_hangs(self: _WorkerIterator, timeout: float) -> tuple[bool, Any]:
        found: tuple[bool, Any] = False, None
        while not found[0] and not flag.exists():
            found = get(self, 0.1)
        return found

    monkeypatch.setattr(_WorkerIterator, "_try_get_data", get_until_it_hangs)
    good = (noise / "class0" / "000.png").read_bytes()
    source = KeyedSource(Hanging(good, flag), ["a"], ["fine.png", "bad.png", "also.png", "too.png"], [0] * 4)
    cfg = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    dataset = ImageDataset(source, eval_transform({**cfg, "crop_pct": 1.0, "crop_mode": "center"}))
    loader = make_loader(dataset, 1, shuffle=False, workers=1, timeout_s=1)
    with pytest.raises(DataError, match=r"must be read within 1 s; one was not\. The workers are reading bad\.png"):
        list(loader)
    assert isinstance(source.read(0), Sample)


# Surroundings


@pytest.fixture
def _jumping(monkeypatch: Patch) -> None:
    """Every look at the clock on the wall shows a time hours before or after the last one."""
    now = [time.time()]

    def jump() -> float:
        now.append(now[-1] + (-1) ** len(now) * 10_000.0 * len(now))
        return now[-1]

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * jump()))


@pytest.mark.usefixtures("_jumping")
def test_a_clock_that_jumps_and_no_home(noise: Path, undisturbed: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    begun, more = time.monotonic(), {"save.every_minutes": 1, "save.every_steps": "null"}
    for name in ("HOME", "USER"):
        monkeypatch.delenv(name, raising=False)
    without_home(monkeypatch)
    result = train(noise, settings=tiny.settings(**more), out=tmp_path / "run", max_time="1h", quiet=True)
    took = time.monotonic() - begun  # by the clock that does not jump
    assert 0 < result.seconds < took
    rows = [line.split(",") for line in (result.out / "metrics.csv").read_text().splitlines()[1:]]
    assert all(float(row[8]) > 0 and 0 <= float(row[9]) <= 100 and 0 < float(row[10]) < took for row in rows)
    tiny.assert_same_run(undisturbed, result.out)
    assert main(["predict", str(result.out), str(noise / "class0" / "000.png")]) == 0


def test_no_duration_is_measured_by_the_clock_on_the_wall() -> None:
    root = Path(weft.__file__).parent
    pattern = re.compile(r"time\.time(_ns)?\(|datetime\.(utc)?now\(|from time import")
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if pattern.search(file.read_text())}
    allowed = {"train/environment.py", "train/estimate.py"}  # when a run began, and may end, for people
    allowed |= {"data/index.py", "data/shards.py"}  # the times of files
    assert found <= allowed


LIMITED = """
import resource, sys
import weft.train.run
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[2])))
from weft.cli import main
sys.exit(main(sys.argv[3:]))
"""


def limited(limit: str, value: int, arguments: list[str]) -> tuple[int, str]:
    """Exit code and errors of a process with a limit of the system."""
    done = tiny.finish([sys.executable, "-c", LIMITED, limit, str(value), *arguments])
    return done.returncode, done.stderr


def test_limits_of_the_system_are_told_with_advice(noise: Path, undisturbed: Path, tmp_path: Path) -> None:
    image = str(noise / "class0" / "000.png")
    code, said = limited("RLIMIT_FSIZE", 0, ["predict", str(undisturbed), image])  # as if every disk were full
    assert code == 6, said
    assert re.fullmatch(r"weft: There must be a directory for temporary files; .* Set TMPDIR to .*\n", said)
    arguments = tiny.command(noise, tmp_path / "run", workers=60)[3:]
    code, said = limited("RLIMIT_NOFILE", 40, [*arguments, "--quiet"])
    assert code == 2, said
    assert re.fullmatch(r"weft: There must be resources for 60 worker processes; .*Too many open files\. .*\n", said)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_strange_surroundings(noise: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A name with a space and a newline, places that cannot be written to, a strict umask, another language.

    Below a file there is no directory, for root neither. Python then takes /tmp, libraries go without a cache.
    """
    (tmp_path / "file").write_text("")
    names = ("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "HOME")
    closed = {name: str(tmp_path / "file" / name.lower()) for name in names}
    out = tmp_path / "a b\nc" / "run"
    weft_process = [sys.executable, "-m", "weft"]
    before = os.umask(0o077)
    try:
        for arguments in (
            tiny.command(noise, out, workers=2),
            tiny.command(None, out),
            [*weft_process, "evaluate", str(undisturbed), str(noise), "--out", str(tmp_path / "evaluated")],
            [*weft_process, "predict", str(undisturbed), str(noise / "class0" / "000.png")],
        ):
            done = tiny.fresh(arguments, LC_ALL="C", **closed)
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr
    finally:
        os.umask(before)
    assert (out / "best" / "model.safetensors").stat().st_mode & 0o777 == 0o600
    tiny.assert_same_run(undisturbed, out)
