"""Training runs of studies and comparisons as jobs, each in a process and a folder of its own.

The folder of a job holds job.json (its settings), run/ (the run directory), log.txt (output of the process) and, when
it is finished, result.json (or result-EPOCH.json): the only record of the result. A finished job is not repeated; an
interrupted one is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import CheckpointError
from weft.files import remove, write_file
from weft.reading import read_json
from weft.recipes import load_recipe
from weft.runs.directory import no_follow

REFERENCE = "run:"  # before the name of a job, in a setting that means the best model of that job
DIGITS = 6  # of accuracies in percent


def is_reference(value: Any) -> bool:
    """Return whether the value of a setting means the best model of another job."""
    return isinstance(value, str) and value.startswith(REFERENCE)


@dataclass(frozen=True)
class Job:
    """A training run, and the sizes at which its best model is evaluated.

    Attributes:
        folder: directory of the job.
        recipe: base recipe; None for the defaults.
        data: dataset.
        settings: settings that override the recipe, including the seed. `run:FOLDER` is the best model of the job in
            that folder, next to the one of this job.
        test_sizes: evaluation sizes in pixels; None for the training size.
        until: epoch after which to stop, from 1; None for the end of the run. A job with the same folder and a later
            epoch resumes from there.
        after: jobs whose models the settings name.
    """

    folder: Path
    recipe: str | None
    data: str
    settings: Mapping[str, Any]
    test_sizes: tuple[int | None, ...] = (None,)
    until: int | None = None
    after: tuple[Job, ...] = ()

    @property
    def result_file(self) -> Path:
        """File of the result; jobs that stop at an epoch have a file of their own."""
        return self.folder / ("result.json" if self.until is None else f"result-{self.until}.json")

    @property
    def model(self) -> Path:
        """Directory of the best model."""
        return self.folder / "run" / "best"

    @property
    def epochs(self) -> int | None:
        """Epochs of the complete run; None where the recipe leaves the number open."""
        given = self.settings.get("epochs")
        return int(given) if given is not None else load_recipe(self.recipe, list(self.settings.items())).epochs

    def run_record(self) -> dict[str, Any]:
        """Return all that determines the training run, as JSON has it."""
        content = {
            "recipe": self.recipe,
            "data": self.data,
            "settings": dict(self.settings),
            "after": {job.folder.name: job.run_record() for job in self.after},
        }
        return json.loads(json.dumps(content))

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return {**self.run_record(), "test_sizes": list(self.test_sizes), "until": self.until}


@dataclass(frozen=True)
class Result:
    """Result of a job, and content of result.json.

    Attributes:
        error: reason of a failure; all other values are then empty.
        job: record of the job.
        correct: (evaluation size in pixels, one letter per validation image: 1 if its prediction is correct, else 0);
            the size None is the training size.
        curve: (epoch, validation top-1 accuracy in percent).
        params, macs: parameters and multiply-adds of the network at its training size.
        megabytes: size of the file of weights.
        seconds: time of training and evaluation.
        peak_mib: peak memory of the process.
    """

    error: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    correct: tuple[tuple[int | None, str], ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    params: int = 0
    macs: int = 0
    megabytes: float = 0.0
    seconds: float = 0.0
    peak_mib: int = 0

    def right(self, size: int | None = None) -> np.ndarray:
        """Return (images) whether each prediction is correct, at an evaluation size, in the order of the dataset."""
        return np.array([letter == "1" for letter in dict(self.correct)[size]])

    def top1(self, size: int | None = None) -> float:
        """Return the top-1 accuracy in percent, at an evaluation size."""
        return round(100 * float(self.right(size).mean()), DIGITS)


def read_result(job: Job) -> Result | None:
    """Return the result of a job, or None if it is not finished or had other settings."""
    try:
        result = read_json(job.result_file, Result)
    except CheckpointError:  # missing or damaged: the job runs again
        return None
    return result if result.job == job.record() else None


def start_process(job: Job, threads: int) -> subprocess.Popen[bytes]:
    """Start the process of a job; its earlier result, and a run that was begun with other settings, are removed.

    Args:
        job: the job.
        threads: CPU threads. A run that is resumed keeps the number that it began with.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    job.result_file.unlink(missing_ok=True)
    file = job.folder / "job.json"
    if not _has_begun(job, file):
        remove(job.folder / "run")
    write_file(file, json.dumps(job.record(), indent=2).encode())
    with open(job.folder / "log.txt", "wb", opener=no_follow) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "weft.study.job_process", str(job.folder), job.result_file.name, str(os.getpid())],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8:backslashreplace"},
        )


def _has_begun(job: Job, file: Path) -> bool:
    """Return whether the run directory of a job, if there is one, was begun with the same settings."""
    try:
        return job.run_record().items() <= read_json(file, dict[str, Any]).items()
    except CheckpointError:
        return False


def failure_of(job: Job, code: int) -> str | None:
    """Return why a job failed, from the exit code and the last line of its output; None if it succeeded."""
    if code == 0:
        return None
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    text = (job.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("weft: ") if lines else f"exit code {code} without a message"
