"""Measure the deployable forms of a trained model on this machine: accuracy, latency, throughput, size."""

from __future__ import annotations

import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn
from typing_extensions import TypedDict

from weft.checkpoints import load_model_dir
from weft.deploy import ExportReport, fold, open_model
from weft.deploy.exporting import CALIBRATION
from weft.deploy.graphs import write_graph
from weft.deploy.runtimes import run_file
from weft.errors import WeftError
from weft.files import write_whole
from weft.inference.exports import export_run
from weft.memory import keep_memory
from weft.models.base import Backbone
from weft.processor import has_bf16
from weft.progress import Work, working
from weft.reading import read_json
from weft.study.runner import Job, Result, read_result

DEPLOY = ("openvino", "nncf", "onnx", "onnxscript")
BATCH_SIZES = (1, 32)
ROUNDS, SECONDS = 3, 0.3  # alternating turns of each runtime, and minimum length of a turn
INFERENCE = 1 / 3  # time of an image in inference, relative to a training step
CONVERSION = 40.0  # seconds to convert to OpenVINO and to int8, on two cores
Call = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Form:
    """A deployable form of a trained model, with its fastest runtime.

    Attributes:
        name: `float` (the fastest of torch and OpenVINO, fp32 and bf16) or `int8`.
        way: runtime and precision, such as `openvino bf16`.
        top1: accuracy of this form on the validation images, in percent.
        latency_ms: median latency of one image.
        images_per_second: highest throughput, of batches of 1 and 32.
        megabytes: size of its file.
    """

    name: str
    way: str
    top1: float
    latency_ms: float
    images_per_second: float
    megabytes: float


class CachedForms(TypedDict):
    """Entry of forms.json: the modification time of the result that was measured, and the forms."""

    stamp: str
    forms: list[Form]
    is_full: NotRequired[bool]


def form_seconds(pace: float, num_val: int, *, is_full: bool) -> float:
    """Estimate the time to measure one candidate.

    Args:
        pace: seconds of a training step per image.
        num_val: number of validation images.
        is_full: convert to OpenVINO and int8; otherwise only torch is measured.
    """
    ways = (2 if has_bf16() else 1) * (2 if is_full else 1) + is_full
    timed = ways * ROUNDS * sum(SECONDS + 2 * size * INFERENCE * pace for size in BATCH_SIZES)
    return timed + is_full * (CONVERSION + (2 * num_val + 3 * CALIBRATION) * INFERENCE * pace)


def measure_forms(
    folder: Path,
    jobs: Mapping[str, Job],
    tell: Callable[[str], None],
    *,
    num_val: int = 0,
    left: Callable[[], float] = lambda: math.inf,
    quiet: bool = False,
) -> dict[str, list[Form]]:
    """Return the forms of each candidate; results of an earlier call are read from forms.json.

    Args:
        folder: directory of the comparison; int8 exports are written to exports/.
        jobs: finished jobs, by candidate, the most important first.
        tell: called with notes.
        num_val: number of validation images.
        left: seconds that are left for it. Where they do not suffice, a candidate is measured in torch only.
        quiet: print no progress.
    """
    keep_memory()  # for all candidates, as in `weft predict` and `weft serve`
    cache = folder / "forms.json"
    known = read_json(cache, dict[str, CachedForms]) if cache.exists() else {}
    results = {name: read_result(job) for name, job in jobs.items()}
    paces = {name: 1 / max(result.images_per_second, 1e-9) for name, result in results.items() if result is not None}
    waiting = {name: form_seconds(pace, num_val, is_full=False) for name, pace in paces.items()}
    measured: dict[str, list[Form]] = {}
    for name, job in jobs.items():
        stamp, result = str(job.result_file.stat().st_mtime_ns), results[name]
        assert result is not None, "the job is finished"
        waiting.pop(name)
        is_full = left() - sum(waiting.values()) >= form_seconds(paces[name], num_val, is_full=True)
        cached = known.get(name)
        if cached is None or cached["stamp"] != stamp or (is_full and not cached.get("is_full", True)):
            tell(f"{name}: measuring latency and throughput.")
            if not is_full:
                tell(
                    f"{name} is measured in torch only: the budget does not suffice to convert it to OpenVINO and int8."
                )
            with working(f"measuring {name}", quiet=quiet, unit="turns") as progress:
                forms = _forms_of(folder / "exports" / job.folder.name, job, result, tell, progress, is_full)
            known[name] = CachedForms(stamp=stamp, forms=forms, is_full=is_full)
            write_whole(cache, TypeAdapter(dict[str, CachedForms]).dump_json(known, indent=2))
        measured[name] = known[name]["forms"]
    return measured


def _forms_of(
    exported: Path, job: Job, result: Result, tell: Callable[[str], None], progress: Work, is_full: bool
) -> list[Form]:
    name = progress.name
    model, _ = load_model_dir(job.folder / "run" / "best")
    size = tuple(model.pretrained_cfg["input_size"])
    report = None
    with tempfile.TemporaryDirectory() as folder:
        network = fold(model) if isinstance(model, Backbone) else model.eval()
        dtypes = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if has_bf16() else {})
        calls = {f"torch {precision}": _by_torch(network, dtype) for precision, dtype in dtypes.items()}
        if is_full and all(importlib.util.find_spec(package) for package in DEPLOY):
            progress.begin(f"{name}: exporting int8")
            report = _int8(exported, job, tell)
            progress.begin(f"{name}: converting to OpenVINO")
            write_graph(network, Path(folder) / "model.xml", "openvino", "fp32", size)
            for precision in dtypes:  # without bf16 instructions, OpenVINO would compute "bf16" in fp32
                calls[f"openvino {precision}"] = run_file(Path(folder) / "model.xml", "openvino", precision)
        if report is not None:
            calls["openvino int8"] = open_model(exported)[0].graph
        progress.begin(name, len(BATCH_SIZES) * ROUNDS * len(calls))
        seconds = _alternating(calls, size, progress)
        calls.clear()  # Windows deletes no file that a runtime has mapped
    floats = {way: times for way, times in seconds.items() if not way.endswith("int8")}
    forms = [_form("float", floats, result.top1, result.megabytes)]
    if report is not None:
        assert report.top1 is not None, "the export was verified on the dataset"
        integer = {way: times for way, times in seconds.items() if way not in floats}
        forms.append(_form("int8", integer, report.top1, report.bytes / 1e6))
    return forms


def _by_torch(network: nn.Module, dtype: torch.dtype) -> Call:
    @torch.inference_mode()
    def call(images: np.ndarray) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            return network(torch.from_numpy(images))

    return call


def _int8(exported: Path, job: Job, tell: Callable[[str], None]) -> ExportReport | None:
    """Export to OpenVINO in int8, on the validation set of the run, with any loss of accuracy, which is reported."""
    try:
        return export_run(
            job.folder / "run",
            exported,
            format="openvino",
            precision="int8",
            data=job.data,
            limit=job.settings.get("data.limit"),
            max_drop=100,
            force=exported.exists(),
            quiet=True,
        )
    except WeftError as error:
        tell(f"{exported.name}: no int8 export: {error}")
        return None


def _alternating(calls: Mapping[str, Call], size: tuple[int, ...], progress: Work) -> dict[str, dict[int, float]]:
    """Return the median seconds of a call by runtime and batch size, from alternating runs."""
    random = np.random.default_rng(0)
    medians: dict[str, dict[int, float]] = {way: {} for way in calls}
    for batch in BATCH_SIZES:
        images = random.standard_normal((batch, *size), dtype=np.float32)
        times: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(ROUNDS):
            for way, call in calls.items():
                call(images)
                begun = time.perf_counter()
                while time.perf_counter() - begun < SECONDS:
                    start = time.perf_counter()
                    call(images)
                    times[way].append(time.perf_counter() - start)
                progress.advance()
        for way, seconds in times.items():
            medians[way][batch] = statistics.median(seconds)
    return medians


def _form(name: str, seconds: Mapping[str, Mapping[int, float]], top1: float, megabytes: float) -> Form:
    """Return the form with the lowest latency and the highest throughput of its runtimes, named by the latter."""
    speeds = {way: max(batch / taken for batch, taken in times.items()) for way, times in seconds.items()}
    best = max(speeds, key=speeds.__getitem__)
    latency = 1000 * min(times[1] for times in seconds.values())
    return Form(name, best, top1, latency, speeds[best], megabytes)
