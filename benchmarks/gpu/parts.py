"""Parts of the measurement on a GPU: a function for each that measures a cell, see cells.py.

It returns rows for the CSV of the part, or None if the time of the call was not sufficient and the next call continues
the cell.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from benchmarks.common.peers import peers_of
from benchmarks.common.records import read_csv
from benchmarks.common.ways import COMPILED, WAYS, build, timed_with_peak, worker
from cells import speed_ways
from PIL import Image
from settings import Options, at_once, missing, run

from weft.bench.worker import Subject
from weft.bench.worker_process import WorkerProcess
from weft.deploy.verification import relative_difference
from weft.errors import StoppedError, UsageError
from weft.layers import attention
from weft.models.ceit import inference as ceit
from weft.models.cvt import inference as cvt
from weft.models.levit import inference as levit

Row = dict[str, Any]
T = TypeVar("T")
PROFILED, KERNELS = 5, 20  # batches of a profile, and rows of its table
BUILDERS = 8  # processes that build and compile at the same time
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[tuple[Any, str, Any], ...]]] = {
    # name: families, and what replaces a choice of weft in folded networks on a GPU, as (module, attribute, value)
    "as weft does": (("ceit", "cvt", "levit"), ()),
    "usual image convolution": (
        ("ceit", "cvt", "levit"),
        tuple((family, "faster_on_gpus", lambda conv: conv) for family in (ceit, cvt, levit)),
    ),
    "convolutions in LeFF": (("ceit",), ((ceit, "_pointwise", lambda conv, fmap: conv(fmap)),)),
    "attention in parts": (("levit",), ((attention, "_is_fused_with_bias", lambda q: False),)),
}
LOOP_COLUMNS = ("images_per_second", "data_wait")  # of metrics.csv; data_wait is in percent of the training time
STEP_COLUMNS = {  # name in steps.csv -> column of benchmarks/training/step.py
    "model": "ours",
    "peer": "peer",
    "mode": "mode",
    "precision": "precision",
    "batch_size": "batch_size",
    "images_per_second": "ours_img_s",
    "peer_images_per_second": "peer_img_s",
    "ratio": "ratio",
    "peak_mib": "ours_peak_mib",
    "peer_peak_mib": "peer_peak_mib",
    "rounds": "rounds",
}
CIFAR10_COLUMNS = ("epoch", "step", "train_loss", "val_loss", "val_top1", *LOOP_COLUMNS, "seconds")


def tests(cell: str, options: Options) -> list[Row]:
    """Run the correctness tests; return a row per test."""
    os.environ["WEFT_TEST_DEVICE"] = options.device
    report = options.scratch / "tests.xml"
    report.unlink(missing_ok=True)
    # with -n, pytest-benchmark warns, which is an error
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={report}", cell]
    processes = (os.cpu_count() or 1) // 2
    arguments += [] if processes < 2 or missing(["xdist"]) else ["-n", str(processes)]
    small = ["-m", "not slow", "-k", "levit and not killed"] if options.scale_name == "small" else []
    log = options.scratch / "tests.log"
    code = run([*arguments, *small], log)
    if code not in (0, 1) or not report.exists():  # 1: a test failed, which is a result
        raise RuntimeError(_last_line(log, code))
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        result = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        rows.append({"test": case.get("name"), "result": result, "message": kinds.get(result, "").splitlines()[:1]})
    return [row | {"message": "".join(row["message"])[:200]} for row in rows]


def parity(cell: str, options: Options) -> list[Row]:
    """Compare a network with the recorded outputs of the released code."""
    from tests.gpu.deviation import TOLERANCE, deviation

    network, precision = cell.split(" ")
    difference, is_same = deviation(network, precision, options.device)
    row = {"network": network, "precision": precision, "difference": f"{difference:.2e}"}
    return [
        row
        | {
            "tolerance": TOLERANCE[precision],
            "within": difference <= TOLERANCE[precision],
            "same_class": is_same,
        }
    ]


def resume(cell: str, options: Options) -> list[Row]:
    """Kill a run inside an epoch, resume it, and compare it with an uninterrupted run bit by bit."""
    from tests.train import tiny

    model, precision, deterministic = cell.split(" ")
    more = dict(device=options.device, precision=precision, deterministic=deterministic, batch_size=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = tiny.paint(folder / "data")
        completed = tiny.fresh(tiny.command(data, folder / "uninterrupted", model, **more))
        if completed.returncode:
            raise RuntimeError(completed.stderr.strip().splitlines()[-1])
        killed_after = tiny.kill_and_resume(data, folder / "killed", model, **more)
        try:
            tiny.assert_same_run(folder / "uninterrupted", folder / "killed")
            difference = ""
        except AssertionError as error:
            difference = str(error).splitlines()[0][:200]
    row = {"model": model, "precision": precision, "deterministic": deterministic, "killed_after_step": killed_after}
    return [row | {"same_bits": not difference, "difference": difference}]


def compile_networks(cell: str, options: Options) -> list[Row]:
    """Fill the cache of TorchInductor: several networks compile at the same time, which timed cells must not."""
    part, name = cell.split(" ", 1)
    if part == "steps":
        _steps(name, options, 1)
    else:
        _speed(name, [way for way in speed_ways(name, options) if way in COMPILED], options, timed=False)
    return []


def speed(cell: str, options: Options) -> list[Row]:
    """Time all ways of weft's network and of its first peer in one precision, in alternating turns.

    Every way is a separate process. The processes build at the same time, but only one runs during a timed turn.
    """
    return _speed(cell, speed_ways(cell, options), options)


def other_ways(cell: str, options: Options) -> list[Row]:
    """Time the ways that compile longer, and those of other runtimes, as `speed` does."""
    return _speed(cell, options.scale.other_ways, options)


def _speed(cell: str, ways: Sequence[str], options: Options, *, timed: bool = True) -> list[Row]:
    model, precision = cell.split(" ")
    threads = 1 if options.device == "cpu" else 4
    ways = [way for way in ways if precision in WAYS[way]]
    tasks = [(None, "eager", "fp32"), *((peer, way, precision) for way in ways for peer in (None, 0))]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options_of = dict(folder=folder, threads=threads, device=options.device, peers=True)
        workers = [stack.enter_context(worker(model, *task, peer=peer, **options_of)) for peer, *task in tasks]
        errors = _at_once(_build, workers)
        for process, error in zip(workers, errors, strict=True):
            if error:
                rows.append(_speed_row(process, 0) | {"model": model, "error": error})
        if errors[0]:
            raise RuntimeError(errors[0])
        ready = [process for process, error in zip(workers, errors, strict=True) if not error]
        for batch in options.scale.batches:
            if timed:
                rows += _timed(ready, batch, options)
            else:
                _at_once(lambda process, size=batch: _warm(process, size), ready)
    return rows


def _at_once(function: Callable[[WorkerProcess], T], workers: list[WorkerProcess]) -> list[T]:
    """Return the result of a function for each worker, up to BUILDERS at a time.

    If this process is told to stop, the workers are killed.
    """

    def stop() -> None:
        for process in workers:
            if process.process is not None:
                process.process.kill()

    return [result for _, result in sorted(at_once(function, workers, BUILDERS, stop), key=itemgetter(0))]


def _build(process: WorkerProcess) -> str:
    """Build a worker's model; return the error, or ''."""
    try:
        process.build()
    except UsageError as error:
        return str(error)
    return ""


def _warm(process: WorkerProcess, batch: int) -> tuple[np.ndarray | None, str]:
    """Run a batch once, which compiles for its size; return the logits and '', or None and the error."""
    try:
        return process.logits(batch), ""
    except UsageError as error:
        return None, str(error)


def _timed(workers: list[WorkerProcess], batch: int, options: Options) -> list[Row]:
    warmed = _at_once(lambda process: _warm(process, batch), workers)
    expected = warmed[0][0]
    rows, timed = [], []
    for process, (logits, error) in zip(workers[1:], warmed[1:], strict=True):
        row = _speed_row(process, batch)
        if error:
            rows.append(row | {"error": error})
            if process.process.poll() is not None:
                workers.remove(process)
            continue
        if expected is not None and logits is not None and row["side"] == "weft":
            row["difference"] = f"{relative_difference(logits, expected):.1e}"
        timed.append((process, row, list[float]()))
    for _ in range(options.scale.rounds):
        for process, row, seconds in timed:
            try:
                times, peak_mib = process.run(timed_with_peak, batch_size=batch)
            except UsageError as error:  # no memory left, or the process has ended
                row["error"] = str(error)
            else:
                seconds += times
                row["peak_mib"] = "" if peak_mib is None else round(peak_mib)
    for _, row, seconds in timed:
        if seconds:
            median = statistics.median(seconds)
            row |= {"p50_ms": f"{1e3 * median:.4g}", "images_per_second": f"{batch / median:.5g}"}
            row["calls"] = len(seconds)
        rows.append(row)
    return rows


def _speed_row(process: WorkerProcess, batch: int) -> Row:
    side = "weft" if process.label == process.model else "peer"
    row = {"run": process.model, "side": side, "model": process.label, "way": process.way}
    row["precision"] = process.precision
    empty = dict.fromkeys(("p50_ms", "images_per_second", "peak_mib", "difference", "calls", "error"), "")
    return row | {"batch_size": batch} | empty


def profile(cell: str, options: Options) -> list[Row]:
    """Profile the eager network with the largest batch; return a row per kernel, on a CPU per operator."""
    model, side = cell.split(" ")
    device, precision, batch = options.device, options.precisions[0], options.scale.batches[-1]
    peer = None if side == "weft" else 0
    subject = build(model, "eager", precision, device, peer=peer, peers=True)
    images = torch.randn(batch, *subject.size, device=device)
    kind = "device" if device == "cuda" else "cpu"
    activity = getattr(torch.profiler.ProfilerActivity, device.upper())
    with torch.inference_mode():
        for _ in range(3):
            subject.call(images)
        with torch.profiler.profile(activities=[activity]) as profiler:
            for _ in range(PROFILED):
                subject.call(images)
            if device == "cuda":
                torch.cuda.synchronize()
    times = {event.key: getattr(event, f"self_{kind}_time_total") for event in profiler.key_averages()}
    total, calls = sum(times.values()), {event.key: event.count for event in profiler.key_averages()}
    return [
        {
            "model": model if peer is None else peers_of(model)[peer].label,
            "precision": precision,
            "batch_size": batch,
            "kernel": key[:120],
            "calls": calls[key] // PROFILED,
            "ms": f"{times[key] / 1e3 / PROFILED:.3f}",
            "percent": f"{100 * times[key] / total:.1f}",
        }
        for key in sorted(times, key=times.__getitem__, reverse=True)[:KERNELS]
    ]


def choices(cell: str, options: Options) -> list[Row]:
    """Time what weft chose for folded networks on a GPU, and what it replaced, in alternating turns of one process."""
    model, way = cell.split(" ")
    precision, device = options.precisions[0], options.device
    family = model.partition("_")[0]
    variants = {name: parts for name, (families, parts) in VARIANTS.items() if family in families}
    calls, times = {}, dict[tuple[str, int], list[float]]()
    with torch.inference_mode():
        for name, parts in variants.items():
            with replaced(parts):
                calls[name] = build(model, way, precision, device, peers=True)
                for batch in options.scale.batches:
                    _time_calls(calls[name], batch, device, 2)
        for _ in range(options.scale.rounds):
            for name, parts in variants.items():
                with replaced(parts):
                    for batch in options.scale.batches:
                        times.setdefault((name, batch), []).extend(_time_calls(calls[name], batch, device, 10))
    return [
        {"model": model, "way": way, "precision": precision, "variant": name, "batch_size": batch}
        | {"p50_ms": f"{1e3 * statistics.median(seconds):.4g}", "calls": len(seconds)}
        for (name, batch), seconds in times.items()
    ]


@contextlib.contextmanager
def replaced(parts: tuple[tuple[Any, str, Any], ...]) -> Iterator[None]:
    """Replace attributes of modules inside the `with` block."""
    with contextlib.ExitStack() as stack:
        for module, name, value in parts:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _time_calls(subject: Subject, batch: int, device: str, count: int) -> list[float]:
    images, times = torch.randn(batch, *subject.size, device=device), list[float]()
    for _ in range(count + 3):
        begun = time.perf_counter()
        subject.call(images)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[3:]  # the first ones warm up


def steps(cell: str, options: Options) -> list[Row]:
    """Time training steps of weft's network and of its peer with benchmarks/training/step.py."""
    return _steps(cell, options, options.scale.step_rounds)


def _steps(cell: str, options: Options, rounds: int) -> list[Row]:
    pair, mode, precision = cell.split(" ")
    name = cell.replace(" ", "-")
    scale, file = options.scale, options.scratch / f"step-{name}.csv"
    file.unlink(missing_ok=True)
    arguments = ["benchmarks/training/step.py", "--pairs", pair, "--modes", mode, "--precisions", precision]
    arguments += ["--batch-size", str(scale.step_batch), "--rounds", str(rounds), "--csv", str(file)]
    log = options.scratch / f"step-{name}.log"
    code = run([*arguments, "--device", options.device, "--warmup", "3", "--allocators", "default"], log)
    if code != 0:
        raise RuntimeError(_last_line(log, code))
    return [{name: row[key] for name, key in STEP_COLUMNS.items()} for row in read_csv(file)]


def loop(cell: str, options: Options) -> list[Row]:
    """Measure `weft train` on JPEGs of 500x375 pixels: throughput, and share of the time spent waiting for data."""
    model, precision, cores = cell.split(" ")
    workers = max(1, (os.cpu_count() or 1) // (2 if cores == "half" else 1))
    data, out = options.scratch / "jpegs", options.scratch / "loop"
    paint_jpegs(data, options.scale.loop_images)
    arguments = [
        "-m",
        "weft",
        "train",
        str(data),
        "--model",
        model,
        "--device",
        options.device,
        "--precision",
        precision,
    ]
    arguments += ["--workers", str(workers), "--batch-size", str(options.scale.loop_batch), "--epochs", "3"]
    log = options.scratch / "loop.log"
    code = run([*arguments, "--out", str(out), "--force", "--set", "pretrained=false"], log)
    if code != 0:
        raise RuntimeError(_last_line(log, code))
    last = read_csv(out / "metrics.csv")[-1]
    row = {"model": model, "precision": precision, "workers": workers, "batch_size": options.scale.loop_batch}
    return [row | {name: last[name] for name in LOOP_COLUMNS}]


def paint_jpegs(folder: Path, count: int) -> None:
    """Write JPEGs in two classes, unless they exist: smooth noise, which compresses about as well as photos."""
    done = folder / "complete"
    if done.exists() and done.read_text() == str(count):
        return
    random = np.random.default_rng(0)
    for index in range(count):
        class_folder = folder / f"class{index % 2}"
        class_folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (47, 63, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(
            class_folder / f"{index:05}.jpg", quality=90
        )
    done.write_text(str(count))


def cifar10(cell: str, options: Options) -> list[Row] | None:
    """Train with the recipe cifar10 in several calls: each resumes the run of the previous call."""
    out, log = options.scratch / "cifar10", options.scratch / "cifar10.log"
    limit = f"{max(options.seconds - 60, 30):.0f}s"
    arguments = ["-m", "weft", "train"]
    if list(out.glob("state/step-*.safetensors")):
        arguments += ["--resume", str(out)]
    else:
        arguments += [
            str(options.cifar10),
            "--recipe",
            "cifar10",
            "--device",
            options.device,
            "--out",
            str(out),
            "--force",
        ]
        arguments += options.scale.cifar10
    code = run([*arguments, "--max-time", limit], log, options.seconds)
    if code is None:
        return None
    if code not in (0, StoppedError.exit_code) or not list(out.glob("state/step-*.safetensors")):
        raise RuntimeError(_last_line(log, code))
    if code != 0:
        return None
    return [{name: row[name] for name in CIFAR10_COLUMNS} for row in read_csv(out / "metrics.csv")]


def _last_line(log: Path, code: int | None) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    reason = "took longer than allowed" if code is None else f"exit code {code}"
    return f"{reason}: {lines[-1][:300]} (full output: {log})"


MEASURES: dict[str, Callable[[str, Options], list[Row] | None]] = {
    "parity": parity,
    "tests": tests,
    "resume": resume,
    "compile": compile_networks,
    "speed": speed,
    "other_ways": other_ways,
    "profile": profile,
    "choices": choices,
    "steps": steps,
    "loop": loop,
    "cifar10": cifar10,
}
