"""Progress of training runs in processes of their own, from the metrics.csv of their run directories."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.errors import CheckpointError
from weft.progress import Work, rate
from weft.runs.directory import EpochRow, read_metrics
from weft.study.jobs import Job, read_result

READ_SECONDS = 1.0  # between two readings of the metrics
SHOWN = 3  # runs in progress that are named


class Watch:
    """Finished epochs of jobs, which are shown as progress of their work."""

    def __init__(self, jobs: Sequence[Job], work: Work) -> None:
        self.work, self._read_at = work, -READ_SECONDS
        self.total = {job.folder: job.until or job.epochs or 1 for job in jobs}
        self.done = {job.folder: self.total[job.folder] if read_result(job) else self._finished(job) for job in jobs}
        self.running: list[Job] = []
        work.begin_at(sum(self.done.values()))
        work.update(work.done, sum(self.total.values()))

    def _finished(self, job: Job) -> int:
        return min(len(_history(job)), self.total[job.folder])

    def on_wait(self, running: Sequence[Job]) -> None:
        """Read the metrics of the jobs in progress, and show them; to be called several times per second."""
        if time.monotonic() - self._read_at < READ_SECONDS:
            return
        self._read_at = time.monotonic()
        self.done |= {job.folder: self.total[job.folder] for job in self.running if job not in running}
        self.done |= {job.folder: self._finished(job) for job in running}
        self.running = list(running)
        states = [f"{job.folder.name}{_state(job)}" for job in running[:SHOWN]]
        more = [f"{len(running) - SHOWN} more"] if len(running) > SHOWN else []
        self.work.update(sum(self.done.values()), name=f"training {'; '.join(states + more)}")


def _state(job: Job) -> str:
    """Return the epoch in progress, and accuracy and speed of the last one."""
    history, epochs = _history(job), job.epochs
    is_over = 0 < (job.until or epochs or 0) <= len(history)
    text = f", after epoch {len(history)}" if is_over else f", epoch {len(history) + 1}"
    text += f" of {epochs}" if epochs else ""
    top1 = next((row.val_top1 for row in reversed(history) if row.val_top1 == row.val_top1), None)
    # an epoch that was resumed after its last step has no speed
    speed = next((row.images_per_second for row in reversed(history) if row.images_per_second > 0), None)
    known = ([] if top1 is None else [f"{top1:.1f} %"]) + ([] if speed is None else [rate(speed, "images")])
    return text + (f" ({', '.join(known)})" if known else "")


def _history(job: Job) -> list[EpochRow]:
    """Return the finished epochs of a job; none if its metrics are missing."""
    try:
        return read_metrics(job.folder / "run" / "metrics.csv")
    except (OSError, CheckpointError):
        return []
