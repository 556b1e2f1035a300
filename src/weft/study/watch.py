"""Progress of training runs in processes of their own, from the metrics.csv of their run directories."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import CheckpointError
from weft.progress import Work, rate
from weft.recipes import load_recipe
from weft.runs.directory import EpochRow, read_metrics
from weft.study.runner import Job, last_speed, read_result

READ_SECONDS = 1.0  # between two readings of the metrics
SHOWN = 3  # runs in progress that are named


@contextlib.contextmanager
def watching(
    jobs: Sequence[Job], weights: Mapping[Path, float] | None = None, *, quiet: bool
) -> Iterator[Callable[[Sequence[Job]], None]]:
    """Show the progress of jobs: a bar on a terminal, elsewhere lines at intervals.

    Args:
        jobs: all jobs of one call of `run_jobs`.
        weights: expected time of an epoch by folder, in any unit; None for equal times.
        quiet: print nothing.

    Yields:
        Function for `on_wait` of `run_jobs`.
    """
    with Work("training", unit="", quiet=quiet) as work:
        yield _Watch(jobs, weights or {}, work).on_wait


class _Watch:
    """Epochs of jobs that are finished, as units of expected time."""

    def __init__(self, jobs: Sequence[Job], weights: Mapping[Path, float], work: Work) -> None:
        self.work, self._read_at = work, -READ_SECONDS
        self.epochs = {job.folder: epochs_of(job) for job in jobs}
        self.weights = {job.folder: weights.get(job.folder, 1.0) * (self.epochs[job.folder] or 1) for job in jobs}
        self.shares = {job.folder: 1.0 if read_result(job) else self._share(job, _history(job)) for job in jobs}
        self.running: list[Job] = []
        work.begin_at(self._done())
        work.update(self._done(), sum(self.weights.values()))

    def on_wait(self, running: Sequence[Job]) -> None:
        """Read the metrics of the jobs in progress, and show them."""
        if time.monotonic() - self._read_at < READ_SECONDS:
            return
        self._read_at = time.monotonic()
        for job in self.running:
            if job not in running:
                self.shares[job.folder] = 1.0
        self.running, states = list(running), []
        for job in running:
            history = _history(job)
            self.shares[job.folder] = self._share(job, history)
            states.append(f"{job.folder.name}{self._state(job, history)}")
        more = [f"{len(states) - SHOWN} more"] if len(states) > SHOWN else []
        self.work.update(self._done(), name=f"training {'; '.join(states[:SHOWN] + more)}")

    def _share(self, job: Job, history: Sequence[EpochRow]) -> float:
        epochs = self.epochs[job.folder]
        return min(len(history) / epochs, 1.0) if epochs else 0.0

    def _done(self) -> float:
        return sum(share * self.weights[folder] for folder, share in self.shares.items())

    def _state(self, job: Job, history: Sequence[EpochRow]) -> str:
        """Return the epoch in progress, and accuracy and speed of the last one."""
        until, epochs = self.epochs[job.folder], epochs_of(replace(job, until=None))
        if until and len(history) >= until:
            text = f", after epoch {len(history)}{f' of {epochs}' if epochs else ''}"
        else:
            text = f", epoch {len(history) + 1}{f' of {epochs}' if epochs else ''}"
        top1 = next((row.val_top1 for row in reversed(history) if row.val_top1 == row.val_top1), None)
        speed = last_speed([row.images_per_second for row in history])
        known = ([] if top1 is None else [f"{top1:.1f} %"]) + ([rate(speed, "images")] if speed > 0 else [])
        return text + (f" ({', '.join(known)})" if known else "")


def epochs_of(job: Job) -> int | None:
    """Return the last epoch of a job; None where the recipe leaves the number open."""
    if job.until is not None:
        return job.until
    given = job.settings.get("epochs")
    return int(given) if given is not None else load_recipe(job.recipe, list(job.settings.items())).epochs


def _history(job: Job) -> list[EpochRow]:
    """Return the finished epochs of a job; none if its metrics are missing."""
    try:
        return read_metrics(job.folder / "run" / "metrics.csv")
    except (OSError, CheckpointError):
        return []
