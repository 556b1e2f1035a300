"""A stand-in for the processes of jobs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from weft.recipes import Recipe
from weft.study import engine
from weft.study.jobs import Job, Result
from weft.train.network import build_model


class Process:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code

    def terminate(self) -> None:
        pass


class Trainer:
    """Writes results in place of training.

    Attributes:
        ran: names of the jobs that were run.
        jobs: by name.
        failing: names of jobs that fail.
        threads: of the last job.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.failing: set[str] = set()
        self.threads: int | None = None
        self.lock = threading.Lock()

    def __call__(self, job: Job, threads: int) -> Process:
        name = job.folder.name
        with self.lock:
            self.ran.append(name)
            self.jobs[name], self.threads = job, threads
        job.folder.mkdir(parents=True, exist_ok=True)
        if name in self.failing:
            (job.folder / "log.txt").write_text("weft: no memory.\n")
            return Process(2)
        job.model.mkdir(parents=True, exist_ok=True)
        write_result(job, result_of(job))
        return Process(0)

    def taken(self) -> list[str]:
        """Return the names of the jobs that were run since the last call."""
        names, self.ran = self.ran, []
        return names


def result_of(job: Job) -> Result:
    """A result that depends on the name of the job and on the evaluation size."""
    number = sum(map(ord, job.folder.name)) % 40
    correct = tuple((size, "1" * (50 + number + (size or 0) // 16) + "0" * (47 - number)) for size in job.test_sizes)
    return Result(job=job.record(), correct=correct, curve=((1, 12.5), (2, 50.0)), params=1000, macs=2000, seconds=60.0)


def write_result(job: Job, result: Result) -> None:
    job.result_file.parent.mkdir(parents=True, exist_ok=True)
    job.result_file.write_bytes(TypeAdapter(Result).dump_json(result))


BUILT: dict[str, nn.Module] = {}


def build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build equal networks on the meta device once: `load_study` builds them for the errors alone."""

    def built(recipe: Recipe, num_classes: int) -> nn.Module:
        if torch.get_default_device().type != "meta":
            return build_model(recipe, num_classes)
        key = repr((recipe.model, recipe.model_args, recipe.img_size, recipe.data.value_range, num_classes))
        if key not in BUILT:
            BUILT[key] = build_model(recipe, num_classes)
        return BUILT[key]

    monkeypatch.setattr("weft.train.network.build_model", built)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    build_once(monkeypatch)
    stand_in = Trainer()
    monkeypatch.setattr(engine, "start_process", stand_in)
    return stand_in


def study_file(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path
