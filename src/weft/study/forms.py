"""Deployable forms of a trained model, with their accuracy, speed and size on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from weft.bench.speed import SpeedRow, speed
from weft.deploy import ExportReport
from weft.errors import WeftError
from weft.files import write_file
from weft.inference.exports import export_run
from weft.machine.processor import has_bf16
from weft.progress import Work, quietly, say
from weft.reading import read_json
from weft.study.jobs import Job, Result, read_result
from weft.study.result import Form

DEPLOY = ("openvino", "nncf", "onnx", "onnxscript")
BATCH_SIZES = (1, 32)
ROUNDS = 3  # alternating turns of each runtime


class MeasuredForms(TypedDict):
    """Entry of forms.json: the modification time of the result that was measured, the forms, and whether all were
    measured that this machine can run; not so when the time was used up."""

    stamp: str
    forms: list[Form]
    is_full: bool


def measure_forms(folder: Path, jobs: Mapping[str, Job], left: Callable[[], float]) -> dict[str, list[Form]]:
    """Return the forms of each candidate; results of an earlier call are read from forms.json.

    Args:
        folder: directory of the comparison; int8 exports are written to exports/.
        jobs: finished jobs, by candidate, the most important first.
        left: seconds that are left. When the time is used up, a candidate is measured in torch only.
    """
    cache = folder / "forms.json"
    known = read_json(cache, dict[str, MeasuredForms]) if cache.exists() else {}
    for name, job in jobs.items():
        stamp, result, is_full = str(job.result_file.stat().st_mtime_ns), read_result(job), left() > 0
        assert result is not None, "the job is finished"
        before = known.get(name)
        if before is None or before["stamp"] != stamp or (is_full and not before["is_full"]):
            say(f"{name}: measuring latency and throughput.")
            if not is_full:
                say(f"{name} is measured in torch only: no time is left to convert it to OpenVINO and int8.")
            with Work(f"measuring {name}", unit=""):
                forms = _forms_of(folder / "exports" / job.folder.name, job, result, is_full=is_full)
            known[name] = MeasuredForms(stamp=stamp, forms=forms, is_full=is_full)
            write_file(cache, TypeAdapter(dict[str, MeasuredForms]).dump_json(known, indent=2))
    return {name: known[name]["forms"] for name in jobs}


def _forms_of(exported: Path, job: Job, result: Result, *, is_full: bool) -> list[Form]:
    """Measure `float`, and `int8` if the packages for it are installed; without `is_full` `float` in torch only."""
    is_full = is_full and all(importlib.util.find_spec(package) for package in DEPLOY)
    report = _int8(exported, job) if is_full else None
    # without bf16 instructions, OpenVINO would compute "bf16" in fp32
    precisions = ("fp32", "bf16") if has_bf16() else ("fp32",)
    ways = ("folded", "openvino") if is_full else ("folded",)
    with quietly():
        models = [job.model] if report is None else [job.model, exported]
        rows = speed(models, backends=ways, precisions=precisions, batch_sizes=BATCH_SIZES, rounds=ROUNDS)
    floats = [row for row in rows if row.model == str(job.model)]
    forms = [_form("float", floats, result.top1(), result.megabytes)]
    if report is not None:
        assert report.top1 is not None, "the export was verified on the dataset"
        forms.append(_form("int8", [row for row in rows if row not in floats], report.top1, report.bytes / 1e6))
    return forms


def _int8(exported: Path, job: Job) -> ExportReport | None:
    """Export to OpenVINO in int8, on the validation set of the run, with any loss of accuracy, which is reported."""
    limit = job.settings.get("data.limit")
    try:
        with quietly():
            return export_run(
                job.folder / "run",
                exported,
                format="openvino",
                precision="int8",
                data=job.data,
                limit=limit,
                max_drop=100,
                force=exported.exists(),
            )
    except WeftError as error:
        say(f"{exported.name}: no int8 export: {error}")
        return None


def _form(name: str, rows: Sequence[SpeedRow], top1: float, megabytes: float) -> Form:
    """Return the form with the lowest latency and the highest throughput of its runtimes, named by the latter."""
    best = max(rows, key=lambda row: row.images_per_second)
    way = {"folded": "torch", "export": "openvino"}.get(best.way, best.way)
    latency = min(row.p50_ms for row in rows if row.batch_size == 1)
    precision = "int8" if name == "int8" else best.precision
    return Form(name, f"{way} {precision}", top1, latency, best.images_per_second, megabytes)
