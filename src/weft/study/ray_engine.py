"""Ray as an engine of studies: jobs on the machines of a cluster, each with CPU threads and a GPU of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from weft.models.families import PLUGINS
from weft.study.jobs import Job, failure_of, start_process


def call(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of Ray."""
    ray = _started()
    return ray.get(ray.remote(num_cpus=threads)(function).remote(*arguments))


@contextlib.contextmanager
def submitting(threads: int) -> Iterator[Callable[[Job], Future[str | None]]]:
    """Yield a function that submits a job to Ray; at the end, jobs in progress are stopped.

    Each job gets a GPU of its own where the cluster has GPUs: Ray sets CUDA_VISIBLE_DEVICES.
    """
    ray = _started()
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    references = []

    def submit(job: Job) -> Future[str | None]:
        gpus = 1 if has_gpus and job.settings.get("device") != "cpu" else 0
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_run)
        references.append(task.remote(job, threads, os.getcwd(), os.environ.get(PLUGINS, "")))
        return references[-1].future()

    try:
        yield submit
    finally:
        for reference in references:
            ray.cancel(reference, force=True)


def _run(job: Job, threads: int, folder: str, plugins: str) -> str | None:
    """Run a job in a process of its own, in the folder that its paths start from; return why it failed, if it did."""
    os.chdir(folder)
    os.environ[PLUGINS] = plugins
    return failure_of(job, start_process(job, threads).wait())


def _started() -> Any:
    import ray

    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    return ray
