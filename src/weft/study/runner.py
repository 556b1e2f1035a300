"""Experiment runner of studies and comparisons: one process and folder per training run, locally or on Ray.

The folder of a job holds job.json (its settings), run/ (the run directory), log.txt (output of the process) and, when
it is finished, result.json (or result-EPOCH.json). A finished job is not repeated; an interrupted one is resumed.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import shlex
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

from weft.errors import CheckpointError, StoppedError, UsageError, WeftError, need
from weft.files import make_dir, no_follow, write_whole
from weft.models.families import PLUGINS
from weft.processor import available_cores
from weft.reading import read_json
from weft.runs.directory import EpochRow, read_metrics
from weft.system import hide_wandb, is_alive, peak_mib

ENGINES = ("local", "ray")
NUMBERS = ("params", "macs", "megabytes", "seconds", "overhead", "peak_mib", "images_per_second")
POLL_SECONDS = 0.2
ARGUMENTS = {  # of a command line, by what it records -> option
    "study": (),
    "data": (),
    "models": ("--models",),
    "scale": ("--scale",),
    "recipe": ("--recipe",),
    "budget": ("--budget",),
}


@dataclass(frozen=True)
class Job:
    """A training run, and the sizes at which its best model is evaluated.

    Attributes:
        folder: directory of the job.
        recipe: base recipe; None for the defaults.
        data: dataset.
        settings: settings that override the recipe, including the seed.
        test_sizes: evaluation sizes in pixels; None for the training size.
        until: epoch after which to stop, from 1; None for the end of the run. A job with the same folder and a later
            epoch resumes from there.
    """

    folder: Path
    recipe: str | None
    data: str
    settings: Mapping[str, Any]
    test_sizes: tuple[int | None, ...] = (None,)
    until: int | None = None

    @property
    def result_file(self) -> Path:
        """File of the result; jobs that stop at an epoch have a file of their own."""
        return self.folder / ("result.json" if self.until is None else f"result-{self.until}.json")

    def record(self) -> dict[str, Any]:
        """Return the content of job.json."""
        return {
            "recipe": self.recipe,
            "data": self.data,
            "settings": dict(self.settings),
            "test_sizes": list(self.test_sizes),
            "until": self.until,
        }


class MeasuredRecord(TypedDict):
    """As `Measured`; `right` has one letter per image, 1 or 0."""

    size: int | None
    top1: float
    right: str


@with_config(extra="allow")
class ResultRecord(TypedDict):
    """Content of result.json."""

    job: dict[str, Any]
    measured: list[MeasuredRecord]
    curve: list[tuple[int, float]]


@dataclass(frozen=True)
class Measured:
    """Result of a model on the validation images at one size.

    Attributes:
        top1: accuracy in percent.
        right: (images) whether each prediction is correct, in the order of the dataset.
    """

    top1: float
    right: np.ndarray


@dataclass(frozen=True)
class Result:
    """Result of a job.

    Attributes:
        error: reason of a failure; all other values are then empty.
        measured: results by evaluation size in pixels; None is the training size.
        curve: validation top-1 accuracy in percent by epoch.
        params, macs: parameters and multiply-adds of the network at its training size.
        megabytes: size of the file of weights.
        seconds: time of training and evaluation.
        overhead: seconds besides: start of the process, reading the dataset, final measurements.
        peak_mib: peak memory of the process.
        images_per_second: training throughput in the last epoch that was timed.
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
        """Top-1 accuracy in percent at the training size."""
        assert self.measured is not None
        return self.measured[None].top1

    @property
    def right(self) -> np.ndarray:
        """(images) whether each prediction is correct, at the training size."""
        assert self.measured is not None
        return self.measured[None].right


def run_jobs(
    jobs: Sequence[Job],
    *,
    engine: str = "local",
    at_once: int = 1,
    threads: int | None = None,
    on_done: Callable[[Job, Result], None] = lambda job, result: None,
    on_wait: Callable[[Sequence[Job]], None] = lambda running: None,
) -> dict[Path, Result]:
    """Run all jobs that are not finished, in their order.

    Args:
        jobs: jobs with different folders.
        engine: `local`, or `ray`: an existing cluster (RAY_ADDRESS) or one on this machine; all machines must share the
            folders and the dataset.
        at_once: number of concurrent jobs.
        threads: CPU threads of each job; None to share the CPU cores among concurrent jobs. A resumed run keeps its
            number.
        on_done: called after each job, in the order in which they finish.
        on_wait: called several times per second, with the jobs in progress (on Ray also those that wait).

    Returns:
        Result by folder; a failed job has `error`, and does not affect the others.

    Raises:
        UsageError: an engine that is unknown or not installed.
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
    for job, failure in run(waiting, at_once, threads or threads_of(at_once), on_wait):
        result = read_result(job) or Result(error=failure or "the process wrote no result")
        results[job.folder] = result
        on_done(job, result)
    return results


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Let an interruption by Ctrl-C state how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Stopped. Repeat the command to resume; finished runs are kept in {folder}.") from None


def threads_of(at_once: int) -> int:
    """Return the CPU threads of each of several concurrent jobs."""
    return max(1, available_cores() // at_once)


def check_engine(engine: str, at_once: int) -> None:
    """Check that an engine can be used.

    Raises:
        UsageError: an unknown engine, or its package is not installed.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}; got '{engine}'.")
    if at_once < 1:
        raise UsageError(f"jobs must be at least 1; got {at_once}.")
    if engine == "ray":
        _ray()


def open_directory(
    folder: Path,
    file: str,
    record: dict[str, Any],
    contents: Sequence[str],
    *,
    force: bool,
    same: Callable[[dict[str, Any], dict[str, Any]], bool] = operator.eq,
) -> dict[str, Any]:
    """Make the directory of an experiment, or return to one that has the same settings.

    Args:
        folder: the directory.
        file: name of the JSON file that records the settings.
        record: settings of the experiment.
        contents: names of entries that `force` may replace.
        force: replace an experiment with other settings.
        same: compares what an earlier call recorded under the keys of `record` with `record`.

    Returns:
        The recorded settings, with what an earlier call has added to them.

    Raises:
        UsageError: the directory holds another experiment or other files.
    """
    known = folder / file
    if known.exists():
        before = read_json(known, dict[str, Any], UsageError)
        if same({key: before.get(key) for key in record}, record):
            return before
        if not force:
            raise _other_settings(folder, before, record)
    make_dir(folder, contents, force=force)
    write_whole(known, json.dumps(record, indent=2).encode())
    return record


def _other_settings(folder: Path, before: Mapping[str, Any], record: Mapping[str, Any]) -> UsageError:
    """Return the error of a directory with other settings: those that differ, and the options that continue."""
    known, now = (
        {key: values[key] for key in ARGUMENTS if values.get(key) is not None} | (values.get("settings") or {})
        for values in (before, record)
    )
    keys = [key for key in known | now if str(known.get(key)) != str(now.get(key))]
    old, new = (
        ", ".join(f"{key}={values[key]}" if key in values else f"no {key}" for key in keys) for values in (known, now)
    )
    options = []
    for key in keys:
        if key in known:
            value = known[key]
            words = [f"{value:g}s"] if key == "budget" else list(map(str, value)) if key == "models" else [str(value)]
            options += [*ARGUMENTS[key], *words] if key in ARGUMENTS else ["--set", f"{key}={value}"]
    steps = [f"pass {shlex.join(options)}"] * bool(options)
    steps += [f"leave out {', '.join(key for key in keys if key not in known)}"] * (not known.keys() >= set(keys))
    return UsageError(
        f"{folder} has results of {old}; got {new}. To continue them, {' and '.join(steps)}; else choose another --out."
        " --force replaces the results."
    )


def read_result(job: Job) -> Result | None:
    """Return the result of a job, or None if it is not finished or had other settings."""
    try:
        record = read_json(job.result_file, ResultRecord)
    except CheckpointError:  # missing or damaged: the job runs again
        return None
    if record["job"] != job.record():
        return None
    measured = {
        row["size"]: Measured(row["top1"], np.array([letter == "1" for letter in row["right"]]))
        for row in record["measured"]
    }
    curve = tuple((int(epoch), float(top1)) for epoch, top1 in record["curve"])
    numbers = {key: record.get(key, 0) for key in NUMBERS}
    return Result(None, measured, curve, **numbers)


def _locally(
    jobs: Sequence[Job], at_once: int, threads: int, on_wait: Callable[[Sequence[Job]], None]
) -> Iterator[tuple[Job, str | None]]:
    waiting, running = list(jobs), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Process(waiting.pop(0), threads))
            time.sleep(POLL_SECONDS)
            on_wait([process.job for process in running])
            for process in [process for process in running if process.has_ended()]:
                running.remove(process)
                yield process.job, process.failure()
    finally:
        for process in running:
            process.process.terminate()
        for process in running:
            process.process.wait()


def _by_ray(
    jobs: Sequence[Job], at_once: int, threads: int, on_wait: Callable[[Sequence[Job]], None]
) -> Iterator[tuple[Job, str | None]]:
    ray = _started_ray()
    remote = ray.remote(num_cpus=threads, max_retries=0)(_run_there)
    plugins = os.environ.get(PLUGINS, "")
    running = {remote.remote(job, threads, os.getcwd(), plugins): job for job in jobs}
    while running:
        ended, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
        on_wait(list(running.values()))
        for reference in ended:
            job = running.pop(reference)
            try:
                yield job, ray.get(reference)
            except ray.exceptions.RayError as error:  # its machine failed
                yield job, str(error).splitlines()[0]


def call(function: Callable[..., Any], *arguments: Any, engine: str, threads: int) -> Any:
    """Call a function where jobs run: in this process, or in one of Ray's."""
    if engine != "ray":
        return function(*arguments)
    ray = _started_ray()
    return ray.get(ray.remote(num_cpus=threads)(function).remote(*arguments))


def _started_ray() -> Any:
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    return ray


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
    """Process of a job."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.log = job, job.folder / "log.txt"
        job.folder.mkdir(parents=True, exist_ok=True)
        write_whole(job.folder / "job.json", json.dumps(job.record(), indent=2).encode())
        with open(self.log, "wb", opener=no_follow) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.study.runner", str(job.folder), job.result_file.name, str(os.getpid())],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8:backslashreplace"},
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def failure(self) -> str | None:
        """Return why the job failed, from the last line of its output; None if it succeeded."""
        code = self.process.returncode
        if code == 0:
            return None
        if code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        lines = [
            line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        return lines[-1].removeprefix("weft: ") if lines else f"exit code {code} without a message"


def _run_job(folder: Path, file: str) -> None:
    """Run the job of a folder in this process, and write its result."""
    started = time.perf_counter()
    from weft.bench.cost import cost
    from weft.checkpoints import load_model_dir
    from weft.train import evaluate, train

    record = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    run = folder / "run"
    known = folder / "begun.json"  # settings that run/ was started with
    begun = None
    with contextlib.suppress(CheckpointError):  # missing or damaged: the run starts again
        begun = read_json(known, dict[str, Any])
    history = _saved_history(run) if begun == record["settings"] else None
    before = sum(row.seconds for row in history or ())  # of epochs that an earlier process trained
    with contextlib.suppress(StoppedError):
        if history is not None:
            train(resume=run, stop_after=record["until"], quiet=True)
        else:
            write_whole(known, json.dumps(record["settings"]).encode())
            train(
                record["data"],
                recipe=record["recipe"],
                settings=record["settings"],
                out=run,
                stop_after=record["until"],
                force=run.exists(),
                quiet=True,
            )
    model, _ = load_model_dir(run / "best")
    size = model.pretrained_cfg["input_size"]
    counted = cost(model, tuple(size[1:]), size[0])
    measured = []
    for side in record["test_sizes"]:
        result = evaluate(run, record["data"], img_size=side, limit=record["settings"].get("data.limit"), quiet=True)
        right = "".join("1" if is_right else "0" for is_right in result.is_correct)
        measured.append({"size": side, "top1": result.top1, "right": right})
    history = read_metrics(run / "metrics.csv")
    curve = [(row.epoch, row.val_top1) for row in history]
    seconds = sum(row.seconds for row in history)
    content = {
        "job": record,
        "measured": measured,
        "curve": [point for point in curve if point[1] == point[1]],
        "params": counted.params,
        "macs": counted.macs,
        "megabytes": (run / "best" / "model.safetensors").stat().st_size / 1e6,
        "seconds": seconds,
        "overhead": time.perf_counter() - started - (seconds - before),
        "peak_mib": peak_mib(),
        "images_per_second": last_speed([row.images_per_second for row in history]),
    }
    write_whole(folder / file, json.dumps(content).encode())


def last_speed(speeds: Sequence[float]) -> float:
    """Return the last speed above 0: an epoch that was resumed after its last step has none."""
    return next((speed for speed in reversed(speeds) if speed > 0), 0.0)


def _saved_history(run: Path) -> list[EpochRow] | None:
    """Return the finished epochs of a run that can be resumed; None if it has saved no valid state."""
    from weft.train.state import RunMetadata, load_state

    try:
        state, _ = load_state(run / "state", RunMetadata)
    except CheckpointError:
        return None
    return [EpochRow(*row) for row in state.metadata["history"]]


def _end_with_parent(parent: int) -> None:
    """Exit when the process that started this one has ended; the saved state remains.

    Args:
        parent: its number. On Windows `os.getppid` stays the same, and is that of a launcher in a virtual environment.
    """
    before = os.getppid()
    while os.getppid() == before and is_alive(parent):
        time.sleep(1)
    os._exit(143)


if __name__ == "__main__":
    hide_wandb()
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[3]),), daemon=True).start()
    try:
        _run_job(Path(sys.argv[1]), sys.argv[2])
    except WeftError as error:
        sys.exit(f"weft: {error}")
