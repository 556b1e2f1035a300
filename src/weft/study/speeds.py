"""Measure the deployable forms of a trained model on this machine: accuracy, latency, size."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn
from typing_extensions import TypedDict

from weft.checkpoints import load_model_dir
from weft.deploy import ExportReport, fold, open_model
from weft.deploy.graphs import write_graph
from weft.deploy.runtimes import run_file
from weft.durable import write_whole
from weft.errors import WeftError
from weft.memory import keep_memory
from weft.models.base import Backbone
from weft.reading import read_json
from weft.study.jobs import Job, read_result
from weft.train.apply import export_run

DEPLOY = ("openvino", "nncf", "onnx", "onnxscript")
BATCHES = (1, 32)
ROUNDS, SECONDS = 3, 0.3  # turns of each way, and the length of a turn at least
Call = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Form:
    """One way to use a trained model.

    Attributes:
        name: `float` (the fastest of torch and OpenVINO, fp32 and bf16) or `int8`.
        way: which that is, such as `openvino bf16`.
        top1: percent of the held-out images, of this form.
        latency_ms: median of one image.
        images_per_second: the most of batches of 1 and of 32.
        megabytes: of its file.
    """

    name: str
    way: str
    top1: float
    latency_ms: float
    images_per_second: float
    megabytes: float


class Kept(TypedDict):
    """What forms.json has of a candidate: the stamp of its training's result, and its forms."""

    stamp: str
    forms: list[Form]


def measure_forms(folder: Path, jobs: Mapping[str, Job], tell: Callable[[str], None]) -> dict[str, list[Form]]:
    """Forms of each candidate; what was measured before is read from forms.json.

    Args:
        folder: of the comparison; int8 exports are kept in exports/.
        jobs: trainings that are done, by candidate.
        tell: takes notes.
    """
    keep_memory()  # for every candidate alike, as where a model is used by `weft predict` and `weft serve`
    kept = folder / "forms.json"
    known = read_json(kept, dict[str, Kept]) if kept.exists() else {}
    found: dict[str, list[Form]] = {}
    for name, job in jobs.items():
        stamp = str(job.result_file.stat().st_mtime_ns)
        if name not in known or known[name]["stamp"] != stamp:
            tell(f"{name}: measuring its speed.")
            forms = _forms_of(folder / "exports" / job.folder.name, job, tell)
            known[name] = Kept(stamp=stamp, forms=forms)
            write_whole(kept, TypeAdapter(dict[str, Kept]).dump_json(known, indent=2))
        found[name] = known[name]["forms"]
    return found


def _forms_of(exported: Path, job: Job, tell: Callable[[str], None]) -> list[Form]:
    result = read_result(job)
    assert result is not None, "it is done"
    model, _ = load_model_dir(job.folder / "run" / "best")
    size = tuple(model.pretrained_cfg["input_size"])
    report = None
    with tempfile.TemporaryDirectory() as folder:
        network = fold(model) if isinstance(model, Backbone) else model.eval()
        calls = {"torch fp32": _by_torch(network, torch.float32), "torch bf16": _by_torch(network, torch.bfloat16)}
        if all(importlib.util.find_spec(package) for package in DEPLOY):
            report = _int8(exported, job, tell)
            write_graph(network, Path(folder) / "model.xml", "openvino", "fp32", size)
            for precision in ("fp32", "bf16"):
                calls[f"openvino {precision}"] = run_file(Path(folder) / "model.xml", "openvino", precision)
        if report is not None:
            calls["openvino int8"] = open_model(exported)[0].answer
        seconds = _seconds_in_turns(calls, size)
    floats = {way: times for way, times in seconds.items() if not way.endswith("int8")}
    forms = [_form("float", floats, result.top1, result.megabytes)]
    if report is not None:
        assert report.top1 is not None, "data was given"
        whole = {way: times for way, times in seconds.items() if way not in floats}
        forms.append(_form("int8", whole, report.top1, report.bytes / 1e6))
    return forms


def _by_torch(network: nn.Module, dtype: torch.dtype) -> Call:
    @torch.inference_mode()
    def call(images: np.ndarray) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            return network(torch.from_numpy(images))

    return call


def _int8(exported: Path, job: Job, tell: Callable[[str], None]) -> ExportReport | None:
    """By OpenVINO, on the split that the run made, kept whatever it loses: the loss is shown."""
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
        tell(f"{exported.name}: no int8, {error}")
        return None


def _seconds_in_turns(calls: Mapping[str, Call], size: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Median seconds of a call, by way and batch; all take turns, so that a busy machine is busy for all."""
    random = np.random.default_rng(0)
    found: dict[str, dict[int, float]] = {way: {} for way in calls}
    for batch in BATCHES:
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
        for way, taken in times.items():
            found[way][batch] = statistics.median(taken)
    return found


def _form(name: str, seconds: Mapping[str, Mapping[int, float]], top1: float, megabytes: float) -> Form:
    """The fastest way; one image may be quickest in another than many, and the name is that of many."""
    speeds = {way: max(batch / taken for batch, taken in times.items()) for way, times in seconds.items()}
    best = max(speeds, key=speeds.__getitem__)
    latency = 1000 * min(times[1] for times in seconds.values())
    return Form(name, best, top1, latency, speeds[best], megabytes)
