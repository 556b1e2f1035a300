"""Run the jobs of a study, each in a process and a folder of its own, locally or on Ray.

A job's folder holds job.json (what to do), run/ (the run directory), log.txt (what the process said) and, once it is
done, result.json (or result-EPOCH.json) with what came out. A job whose result is there is not run again; one that was
stopped goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import with_config
from typing_extensions import TypedDict

from weft.durable import no_follow, write_whole
from weft.errors import CheckpointError, StoppedError, UsageError, WeftError, need
from weft.models.plugins import VARIABLE as PLUGINS
from weft.reading import read_json

try:
    import resource
except ImportError:  # Windows has none, and there no memory is told
    resource = None

ENGINES = ("local", "ray")
NUMBERS = ("params", "macs", "megabytes", "seconds", "overhead", "peak_mib", "images_per_second")
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One training, and the sizes at which its best model is measured.

    Attributes:
        folder: where.
        recipe: its base; None for the defaults.
        data: what it learns from.
        settings: all that is laid over the base, the seed among it.
        test_sizes: sides in pixels, None for that of the training.
        until: the epoch at whose end to stop for now, from 1; None for the end of the training. A job of the same
            folder and a later epoch goes on from there.
    """

    folder: Path
    recipe: str | None
    data: str
    settings: Mapping[str, Any]
    test_sizes: tuple[int | None, ...] = (None,)
    until: int | None = None

    @property
    def result_file(self) -> Path:
        """Where its result is: a job that stops early leaves its own beside that of the whole training."""
        return self.folder / ("result.json" if self.until is None else f"result-{self.until}.json")

    def facts(self) -> dict[str, Any]:
        """What job.json holds."""
        return {
            "recipe": self.recipe,
            "data": self.data,
            "settings": dict(self.settings),
            "test_sizes": list(self.test_sizes),
            "until": self.until,
        }


class MeasuredFacts(TypedDict):
    """As `Measured`; `right` has a letter for each image, 1 or 0."""

    size: int | None
    top1: float
    right: str


@with_config(extra="allow")
class ResultFacts(TypedDict):
    """result.json."""

    job: dict[str, Any]
    measured: list[MeasuredFacts]
    curve: list[tuple[int, float]]


@dataclass(frozen=True)
class Measured:
    """A trained model on the held-out images at one size.

    Attributes:
        top1: percent.
        right: (images) whether each was answered right, in the order of the data.
    """

    top1: float
    right: np.ndarray


@dataclass(frozen=True)
class Result:
    """What a job came to.

    Attributes:
        error: why there is nothing else, or None.
        measured: by side in pixels; None is the side of the training.
        curve: held-out top-1 in percent by epoch.
        params, macs: of the model, at its training size.
        megabytes: of its file of weights.
        seconds: of training with evaluation.
        overhead: seconds beside them: starting, reading the data, measuring.
        peak_mib: the most memory that the process held.
        images_per_second: of training, in its last epoch that was timed.
    """

    error: str | None = None
    measured: Mapping[int | None, Measured] | None = None
    curve: tuple[tuple[int, float], ...] = ()
    params: int = 0
    macs: int = 0
    megabytes: float = 0.0
    seconds: float = 0.0
    overhead: float = 0.0
    peak_mib: int = 0
    images_per_second: float = 0.0

    @property
    def top1(self) -> float:
        """Percent, at the size of the training."""
        assert self.measured is not None
        return self.measured[None].top1

    @property
    def right(self) -> np.ndarray:
        """(images) whether each was answered right, at the size of the training."""
        assert self.measured is not None
        return self.measured[None].right


def carry_out(
    jobs: Sequence[Job],
    *,
    engine: str = "local",
    at_once: int = 1,
    on_done: Callable[[Job, Result], None] = lambda job, result: None,
) -> dict[Path, Result]:
    """Runs jobs, those that are done already aside.

    Args:
        jobs: in this order.
        engine: `local`, or `ray`: an existing cluster (RAY_ADDRESS) or one on this machine; all machines must see the
            folders and the data.
        at_once: jobs that run side by side, each with its part of the processor's cores.
        on_done: called after each, in whatever order they end.

    Returns:
        By folder. One that died has `error`; the others went on.

    Raises:
        UsageError: an engine that is not there.
    """
    check_engine(engine, at_once)
    results = {}
    waiting = []
    for job in jobs:
        if (done := read_result(job)) is not None:
            results[job.folder] = done
            on_done(job, done)
        else:
            waiting.append(job)
    run = _by_ray if engine == "ray" else _locally
    for job, failure in run(waiting, at_once):
        result = read_result(job) or Result(error=failure or "it left no result")
        results[job.folder] = result
        on_done(job, result)
    return results


def check_engine(engine: str, at_once: int) -> None:
    """Before anything is computed.

    Raises:
        UsageError: no such engine, or its package is not installed.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}; got '{engine}'.")
    if at_once < 1:
        raise UsageError(f"jobs must be at least 1 at once; got {at_once}.")
    if engine == "ray":
        _ray()


def read_result(job: Job) -> Result | None:
    """What a job came to, if it is done and was the same job."""
    try:
        facts = read_json(job.result_file, ResultFacts)
    except CheckpointError:  # not done, or cut off: it is done again
        return None
    if facts["job"] != job.facts():
        return None
    measured = {
        row["size"]: Measured(row["top1"], np.array([letter == "1" for letter in row["right"]]))
        for row in facts["measured"]
    }
    curve = tuple((int(epoch), float(top1)) for epoch, top1 in facts["curve"])
    numbers = {key: facts.get(key, 0) for key in NUMBERS}
    return Result(None, measured, curve, **numbers)


def _locally(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Job, str | None]]:
    threads = max(1, (os.cpu_count() or 1) // at_once)
    waiting, running = list(jobs), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Process(waiting.pop(0), threads))
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.has_ended()]:
                running.remove(process)
                yield process.job, process.failure()
    finally:
        for process in running:
            process.stop()


def _by_ray(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Job, str | None]]:
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    remote = ray.remote(num_cpus=threads, max_retries=0)(_run_there)
    plugins = os.environ.get(PLUGINS, "")
    running = {remote.remote(job, threads, os.getcwd(), plugins): job for job in jobs}
    while running:
        (ended, *_), _ = ray.wait(list(running), num_returns=1)
        job = running.pop(ended)
        try:
            yield job, ray.get(ended)
        except ray.exceptions.RayError as error:  # its machine is gone
            yield job, str(error).splitlines()[0]


def _ray() -> Any:
    need("ray", "ray")
    import ray

    return ray


def _run_there(job: Job, threads: int, folder: str, plugins: str) -> str | None:
    """Run a job in a process of its own, in the folder that its paths start from; return why it failed, if it did."""
    os.chdir(folder)
    os.environ[PLUGINS] = plugins
    process = _Process(job, threads)
    while not process.has_ended():
        time.sleep(POLL_SECONDS)
    return process.failure()


class _Process:
    """A job that runs."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.log = job, job.folder / "log.txt"
        job.folder.mkdir(parents=True, exist_ok=True)
        write_whole(job.folder / "job.json", json.dumps(job.facts(), indent=2).encode())
        with open(self.log, "wb", opener=no_follow) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.study.jobs", str(job.folder), job.result_file.name],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def failure(self) -> str | None:
        """The last line that it said, where it did not end well."""
        code = self.process.returncode
        if code == 0:
            return None
        if code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("weft: ") if lines else f"ended with code {code} and no word"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def _carry_out_here(folder: Path, file: str) -> None:
    """What the process of a job does."""
    started = time.perf_counter()
    from weft.bench.cost import cost
    from weft.checkpoints import load_model_dir
    from weft.train import evaluate, train
    from weft.train.rundir import read_metrics

    facts = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = folder / "run"
    known = folder / "begun.json"  # the settings that run/ has
    begun = json.loads(known.read_text(encoding="utf-8")) if known.exists() else None
    before = 0.0  # seconds of epochs that another process has trained
    with contextlib.suppress(StoppedError):
        if begun == facts["settings"] and _can_go_on(run):
            if (run / "metrics.csv").exists():  # not in the first epoch
                before = sum(row.seconds for row in read_metrics(run / "metrics.csv"))
            train(resume=run, stop_after=facts["until"], quiet=True)
        else:
            write_whole(known, json.dumps(facts["settings"]).encode())
            train(
                facts["data"],
                recipe=facts["recipe"],
                settings=facts["settings"],
                out=run,
                stop_after=facts["until"],
                force=run.exists(),
                quiet=True,
            )
    model, _ = load_model_dir(run / "best")
    size = model.pretrained_cfg["input_size"]
    counted = cost(model, tuple(size[1:]), size[0])
    measured = []
    for side in facts["test_sizes"]:
        found = evaluate(run, facts["data"], img_size=side, limit=facts["settings"].get("data.limit"), quiet=True)
        right = "".join("1" if is_right else "0" for is_right in found.right)
        measured.append({"size": side, "top1": found.top1, "right": right})
    history = read_metrics(run / "metrics.csv")
    curve = [(row.epoch, row.val_top1) for row in history]
    seconds = sum(row.seconds for row in history)
    whole = {
        "job": facts,
        "measured": measured,
        "curve": [point for point in curve if point[1] == point[1]],
        "params": counted.params,
        "macs": counted.macs,
        "megabytes": (run / "best" / "model.safetensors").stat().st_size / 1e6,
        "seconds": seconds,
        "overhead": time.perf_counter() - started - (seconds - before),
        "peak_mib": 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "images_per_second": last_speed([row.images_per_second for row in history]),
    }
    write_whole(folder / file, json.dumps(whole).encode())


def last_speed(speeds: Sequence[float]) -> float:
    """The last one above 0; an epoch that was resumed between its last step and its end has trained nothing since."""
    return next((speed for speed in reversed(speeds) if speed > 0), 0.0)


def _can_go_on(run: Path) -> bool:
    """Whether it came as far as a first state that is whole."""
    from weft.train.state import load_state

    try:
        load_state(run / "state")
    except CheckpointError:
        return False
    return True


def _end_with_parent() -> None:
    """A job whose study was killed stops as well; what it has saved it goes on from."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(143)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _carry_out_here(Path(sys.argv[1]), sys.argv[2])
    except WeftError as error:
        sys.exit(f"weft: {error}")
