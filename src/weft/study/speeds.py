"""What a trained model costs where it is used: every form that this machine can deploy, its accuracy and its speed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.speed import SpeedRow, speed
from weft.checkpoints import load_model_dir
from weft.data import open_data
from weft.deploy import export
from weft.durable import write_whole
from weft.errors import WeftError
from weft.models.base import Backbone

DEPLOY = ("openvino", "nncf", "onnx", "onnxscript")
BATCHES, ROUNDS = (1, 32), 3


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


def measure_forms(
    folder: Path, jobs: Mapping[str, Path], data: str, tell: Callable[[str], None]
) -> dict[str, list[Form]]:
    """Forms of each candidate; what was measured before is read from forms.json.

    Args:
        folder: of the comparison; int8 exports are kept in exports/.
        jobs: folders of trainings, by candidate.
        data: what they learned from; int8 is calibrated on it.
        tell: takes notes.
    """
    kept = folder / "forms.json"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    found: dict[str, list[Form]] = {}
    for name, job in jobs.items():
        stamp = str((job / "result.json").stat().st_mtime_ns)
        if name not in known or known[name]["stamp"] != stamp:
            tell(f"{name}: measuring its speed.")
            forms = _forms_of(folder / "exports" / job.name, job, data, tell)
            known[name] = {"stamp": stamp, "forms": [dataclasses.asdict(form) for form in forms]}
            write_whole(kept, json.dumps(known, indent=2).encode())
        found[name] = [Form(**row) for row in known[name]["forms"]]
    return found


def _forms_of(exported: Path, job: Path, data: str, tell: Callable[[str], None]) -> list[Form]:
    best = job / "run" / "best"
    facts = json.loads((job / "result.json").read_text(encoding="utf-8"))
    top1 = next(row["top1"] for row in facts["measured"] if row["size"] is None)
    model, names = load_model_dir(best)
    can_export = all(importlib.util.find_spec(package) for package in DEPLOY)
    ways = ["folded" if isinstance(model, Backbone) else "eager", *(["openvino"] if can_export else [])]
    rows = speed([best], ways=ways, precisions=("fp32", "bf16"), batch_sizes=BATCHES, rounds=ROUNDS)
    forms = [_form("float", rows, top1, facts["megabytes"])]
    if can_export:
        forms += _int8(exported, model, names, data, facts["job"]["settings"].get("data.limit"), tell)
    return forms


def _int8(
    exported: Path, model: Any, names: list[str] | None, data: str, limit: int | None, tell: Callable[[str], None]
) -> list[Form]:
    """By OpenVINO, kept whatever it loses: the loss is shown."""
    try:
        report = export(
            model,
            exported,
            format="openvino",
            precision="int8",
            data=open_data(data, limit=limit),
            label_names=names,
            max_drop=100,
            force=exported.exists(),
        )
        rows = speed([exported], ways=("openvino",), precisions=("int8",), batch_sizes=BATCHES, rounds=ROUNDS)
    except WeftError as error:
        tell(f"{exported.name}: no int8, {error}")
        return []
    assert report.top1 is not None, "data was given"
    return [_form("int8", rows, report.top1, report.bytes / 1e6)]


def _form(name: str, rows: list[SpeedRow], top1: float, megabytes: float) -> Form:
    """The fastest way; latency and throughput may be of different ways, the name is that of the throughput."""
    one = min((row for row in rows if row.batch_size == 1), key=lambda row: row.p50_ms)
    many = max(rows, key=lambda row: row.images_per_second)
    return Form(name, f"{many.way} {many.precision}", top1, one.p50_ms, many.images_per_second, megabytes)
