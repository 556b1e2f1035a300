"""Run jobs in the order of their dependencies: in processes on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import contextvars
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from weft.errors import UsageError, need
from weft.machine.memory import release_memory
from weft.machine.processor import available_cores
from weft.progress import Work
from weft.recipes import Recipe
from weft.recipes.checks import check_argument
from weft.recipes.schema import Positive, Threads
from weft.study import ray_engine
from weft.study.jobs import Job, Result, failure_of, read_result, start_process
from weft.study.watch import Watch
from weft.text import reason_of

ENGINES = ("local", "ray")
POLL_SECONDS = 0.2
OnDone = Callable[[Job, Result], None]
Submit = Callable[[Job], "Future[str | None]"]  # starts a job; the future has the reason of a failure, or None


@dataclass(frozen=True)
class Engine:
    """Where jobs run.

    Attributes:
        name: `local`, or `ray`: an existing cluster (RAY_ADDRESS) or one on this machine; all machines must share the
            folders and the dataset.
        at_once: number of concurrent jobs on this machine.
        threads: CPU threads of each job; None to share the CPU cores among concurrent jobs.

    Raises:
        UsageError: an engine that is unknown or not installed, or a number out of its range.
    """

    name: str = "local"
    at_once: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise UsageError(f"engine must be one of {', '.join(ENGINES)}; got '{self.name}'.")
        check_argument("jobs", self.at_once, Positive)
        check_argument("threads", self.threads, Threads | None)
        if self.name == "ray":
            need("ray", "ray")

    @property
    def cores(self) -> int:
        """CPU threads of each job."""
        return self.threads or max(1, available_cores() // self.at_once)

    def check(self, recipes: Iterable[Recipe]) -> None:
        """Raise UsageError if this machine cannot train one of the recipes; a cluster may have other GPUs."""
        from weft.machine.runtime import Runtime
        from weft.train.network import check_sync_bn

        for recipe in recipes if self.name == "local" else ():
            check_sync_bn(recipe, Runtime.of(recipe.device))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function where jobs run, with as many CPU threads: in this process, or in one of Ray's."""
        if self.name == "ray":
            return ray_engine.call(self.cores, _with_threads, self.cores, function, *arguments)
        return _with_threads(self.cores, function, *arguments)

    def run(self, jobs: Sequence[Job], on_done: OnDone = lambda job, result: None) -> dict[Path, Result]:
        """Run the jobs that are not finished, each after those whose models it needs, else in their order.

        The epochs of the jobs in progress (on Ray also of those that wait) are shown as progress.

        Args:
            jobs: jobs with different folders, and all jobs that they need.
            on_done: called after each job that was run, in the order in which they end.

        Returns:
            Result by folder; a failed job has `error`, and does not affect the others, except those that need its
            model.
        """
        by_folder = {job.folder: job for job in jobs}
        results, waiting = _finished(jobs), dict[Future[str | None], Job]()
        order = TopologicalSorter({job.folder: [needed.folder for needed in job.after] for job in jobs})
        order.prepare()

        def end(job: Job, result: Result) -> None:
            results[job.folder] = result
            order.done(job.folder)
            on_done(job, result)

        submitting = ray_engine.submitting(self.cores) if self.name == "ray" else self._submitting()
        with Work("training", unit="") as work, submitting as submit:
            watch = Watch(jobs, work)
            while order.is_active():
                for folder in order.get_ready():
                    job = by_folder[folder]
                    failed = [needed.folder for needed in job.after if results[needed.folder].error]
                    if folder in results:
                        order.done(folder)
                    elif failed:
                        end(job, Result(error=f"it needs the model of {failed[0].name}, whose run failed"))
                    else:
                        waiting[submit(job)] = job
                ended, _ = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                watch.on_wait([job for future, job in waiting.items() if future.running() or self.name == "ray"])
                for future in [future for future in waiting if future in ended]:
                    job = waiting.pop(future)
                    end(job, read_result(job) or Result(error=_failure(future) or "the process wrote no result"))
        return results

    @contextlib.contextmanager
    def _submitting(self) -> Iterator[Submit]:
        """Yield a function that runs a job in a process of its own; at the end, processes in progress are stopped."""
        processes: list[subprocess.Popen[bytes]] = []
        is_over = threading.Event()

        def run(job: Job) -> str | None:
            process = start_process(job, self.cores)
            processes.append(process)
            if is_over.is_set():
                process.terminate()
            return failure_of(job, process.wait())

        pool = ThreadPoolExecutor(self.at_once)
        try:
            yield lambda job: pool.submit(contextvars.copy_context().run, run, job)
        finally:
            is_over.set()
            for process in processes:
                process.terminate()
            pool.shutdown(cancel_futures=True)


def _with_threads(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a number of CPU threads of torch; then give the memory that it used back to the system."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)
        release_memory()


def _finished(jobs: Sequence[Job]) -> dict[Path, Result]:
    """Return the results of finished jobs; one whose model is lost runs again if an unfinished job needs it."""
    results = {job.folder: result for job in jobs if (result := read_result(job)) is not None}
    by_folder = {job.folder: job for job in jobs}
    unfinished = [job for job in jobs if job.folder not in results]
    while unfinished:
        for needed in unfinished.pop().after:
            if needed.folder in results and not needed.model.is_dir():
                del results[needed.folder]
                unfinished.append(by_folder[needed.folder])
    return results


def _failure(future: Future[str | None]) -> str | None:
    """Return why a job failed, or None; on Ray, its machine may have failed."""
    error = future.exception()
    return future.result() if error is None else reason_of(error)
