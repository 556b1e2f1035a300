"""Training runs in processes of their own: their progress and their threads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.study.trainer import write_result
from weft.cli import main
from weft.progress import Work
from weft.runs.directory import EpochRow, write_metrics
from weft.study import engine, watch
from weft.study.engine import Engine
from weft.study.jobs import Job, Result

ROW = EpochRow(1, 10, 1e-3, 1.2, 40.0, 1.1, 45.25, 90.0, 120.0, 1.0, 8.0)


def job(folder: Path, *, until: int | None = None, **settings: object) -> Job:
    folder.mkdir()
    return Job(folder, "digits", "digits", {"seed": 0, **settings}, until=until)


def trained(job: Job, *rows: EpochRow) -> None:
    (job.folder / "run").mkdir(exist_ok=True)
    write_metrics(job.folder / "run" / "metrics.csv", rows)


class Now:
    seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(watch.time, "monotonic", now)
    return now


def work(now: Now) -> Work:
    return Work("training", unit="", console=Console(file=io.StringIO()), now=now)


def shown(work: Work) -> str:
    return f"{work.name}: {work.text()}"


def test_epochs_of_the_runs_in_progress(tmp_path, now):
    first, second = job(tmp_path / "first-seed0", epochs=4), job(tmp_path / "second-seed0", epochs=4)
    progress = work(now)
    watched = watch.Watch([first, second], progress)
    watched.on_wait([first])
    assert shown(progress) == "training first-seed0, epoch 1 of 4: 0:00 elapsed"
    trained(first, ROW, ROW._replace(epoch=2, val_top1=float("nan"), images_per_second=0.0))
    now.seconds += 10
    watched.on_wait([first])
    assert shown(progress) == "training first-seed0, epoch 3 of 4 (45.2 %, 120 images/s): 0:10 elapsed, 0:30 left"
    trained(first, *[ROW] * 4)
    watched.on_wait([first])  # too early to read again
    assert ", epoch 3 of 4" in shown(progress)
    now.seconds += 10
    watched.on_wait([first])
    assert shown(progress) == "training first-seed0, after epoch 4 of 4 (45.2 %, 120 images/s): 0:20 elapsed, 0:20 left"
    now.seconds += 10
    watched.on_wait([second])
    assert shown(progress) == "training second-seed0, epoch 1 of 4: 0:30 elapsed, 0:30 left"


def test_a_run_to_an_epoch_and_a_finished_one(tmp_path, now):
    """What an earlier call has done counts for neither the rate nor the time left."""
    part, done = job(tmp_path / "part", epochs=8, until=2), job(tmp_path / "done", epochs=8, until=2)
    write_result(done, Result(job=done.record()))
    trained(part, ROW)
    progress = work(now)
    watched = watch.Watch([done, part], progress)
    now.seconds += 30
    watched.on_wait([part])
    assert shown(progress) == "training part, epoch 2 of 8 (45.2 %, 120 images/s): 0:30 elapsed"
    trained(part, ROW, ROW)
    now.seconds += 30
    watched.on_wait([part])
    assert shown(progress) == "training part, after epoch 2 of 8 (45.2 %, 120 images/s): 1:00 elapsed, 0:00 left"


def test_many_runs_and_a_damaged_file(tmp_path, now):
    jobs = [job(tmp_path / f"run{number}", epochs=2) for number in range(5)]
    trained(jobs[0])
    (jobs[0].folder / "run" / "metrics.csv").write_text("epoch\nhalf")
    progress = work(now)
    watch.Watch(jobs, progress).on_wait(jobs)
    assert progress.name == "training run0, epoch 1 of 2; run1, epoch 1 of 2; run2, epoch 1 of 2; 2 more"


@pytest.mark.parametrize(("given", "at_once", "threads"), [(None, 1, 6), (None, 4, 1), (3, 4, 3), (9, 1, 9)])
def test_threads_of_a_run(given: int | None, at_once, threads, tmp_path, trainer, monkeypatch):
    monkeypatch.setattr(engine, "available_cores", lambda: 6)
    jobs = [job(tmp_path / name) for name in "ab"]
    results = Engine(at_once=at_once, threads=given).run(jobs)
    assert (trainer.threads, len(results)) == (threads, 2)


@pytest.mark.parametrize(
    "verb", ["compare digits --models levit_nano_32 ceit_nano_32", "study ceit-leff digits --seeds 1 --only 3x3"]
)
def test_threads_from_the_command_line(verb, tmp_path, trainer):
    arguments = [*verb.split(), "--epochs", "1", "--out", str(tmp_path / "out")]
    trainer.failing = {"levit-nano-32-seed0", "ceit-nano-32-seed0"}  # so that no speed is measured
    main([*arguments, "--threads", "3"])
    assert trainer.threads == 3
