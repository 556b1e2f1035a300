"""The fastest export is chosen by measurement, on the machine at hand, and again on another."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from tests.deploy.test_export import CLASSES, model
from tests.helpers import lively, without_home
from weft import files, processor
from weft.checkpoints import save_model_dir
from weft.cli.app import main
from weft.data import SplitPlan, open_data
from weft.deploy import choosing, export, exporting, open_model, select
from weft.deploy.choosing import Choice, ConsideredExport, Machine, expected_order, fastest, time_calls, time_sizes
from weft.deploy.runtimes import OpenVinoGraph
from weft.deploy.verification import ExportReport, Reference, verify, verify_choosable
from weft.errors import CheckpointError, DataError, UsageError, VerificationError
from weft.inference.inputs import SourcePart
from weft.inference.predictor import Predictor
from weft.intervals import Estimate

OTHER = Machine("another processor", "avx2", ("avx2", "fma"), {}, {"openvino": "2026.4"})

PRECISIONS = ("fp32", "bf16", "int8")

RECORD = TypeAdapter(Choice).dump_json(Choice(1, OTHER, (), "onnx-fp32")).decode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "_for_children", set())
    yield tmp_path / "cache"
    for name in [name for name in os.environ if name.startswith(choosing.VARIABLE)]:
        del os.environ[name]


def timings(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[list[str]]:
    """Let candidates take given times; of a path, its last part counts. Returns the candidates of each measurement."""
    measured: list[list[str]] = []

    def measure(calls: dict[str, Callable[[int], object]], sizes: Any = (1, 16)) -> dict[str, dict[int, float]]:
        if 4096 in sizes:
            raise MemoryError("std::bad_alloc")
        if 1 in sizes:
            measured.append(list(calls))
        for call in calls.values():
            call(2)
        return {name: {size: size * seconds[Path(name).name] for size in sizes} for name in calls}

    monkeypatch.setattr(choosing, "time_calls", measure)
    return measured


@pytest.fixture(scope="module")
def chosen_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chosen") / "out"
    with pytest.MonkeyPatch.context() as patch:
        timings(patch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
        export(model("levit_nano_32"), folder, format="auto", precision="fp32", label_names=CLASSES)
    return folder


@pytest.fixture
def out(chosen_once: Path, tmp_path: Path) -> Path:
    """A directory of format auto, in which OpenVINO was faster."""
    return shutil.copytree(chosen_once, tmp_path / "out")


def test_the_least_geometric_mean_is_the_fastest() -> None:
    assert fastest({"a": {1: 0.1, 16: 4.0}, "b": {1: 0.2, 16: 1.0}}) == "b"
    assert fastest({"a": {1: 0.1}, "b": {1: 0.1}}) == "a"


def test_candidates_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    seconds = time_calls({name: lambda n, name=name: calls.append((name, n)) for name in "ab"}, (1, 4))
    assert {name: list(row) for name, row in seconds.items()} == {"a": [1, 4], "b": [1, 4]}
    assert calls[:2] == [("a", 1), ("b", 1)]  # compiles the graph for this size
    assert calls[2:10] == [("a", 1), ("a", 1), ("b", 1), ("b", 1)] * 2  # the first of a turn is not timed
    assert all(value > 0 for row in seconds.values() for value in row.values())


class Clock:
    """Time that passes only in the functions that are timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


def test_a_measurement_that_nobody_asked_for_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch size is left out if it would exceed the limit, before a batch of it runs."""
    clock, largest, reasons = Clock(), [0], {}
    monkeypatch.setattr(choosing, "time", clock)

    def call(count: int) -> None:
        largest[0] = max(largest[0], count)
        clock.sleep(0.1 * count)

    calls = {"a": call, "b": call}
    seconds = time_sizes(calls, (4096, 1, 16), reasons.__setitem__, max_seconds=30)
    assert {name: list(row) for name, row in seconds.items()} == {"a": [1, 16], "b": [1, 16]}
    assert reasons == {4096: "its measurement would take too long"}
    assert (largest, clock.now < 40) == ([16], True)
    assert not any(time_sizes(calls, (4096,), reasons.__setitem__, max_seconds=30).values())
    assert largest == [16]
    assert list(time_sizes(calls, (64, 4), reasons.__setitem__)["a"]) == [4, 64]  # no limit


def test_a_batch_size_that_fails_leaves_the_others() -> None:
    reasons: dict[int, str] = {}

    def call(count: int) -> None:
        if count > 4:
            raise OnnxRuntimeError("Failed to allocate memory")

    seconds = time_sizes({"a": call}, (1, 4, 8), reasons.__setitem__, max_seconds=30)
    assert (list(seconds["a"]), reasons) == ([1, 4], {8: "Failed to allocate memory"})


@pytest.mark.parametrize(
    ("images", "lost", "is_refused"),
    [(41, 1, False), (41, 3, True), (2, 2, True), (1000, 5, False), (1000, 6, True)],
)
def test_auto_prefers_exports_whose_accuracy_is_shown(images: int, lost: int, is_refused: bool) -> None:
    drop = Estimate(100 * lost / images, -5, 20)
    top1 = dict(agreement=90, top1=100 - drop.value, top1_model=100, bytes=1, drop=drop)
    differences = dict(max_difference=0.1, mean_difference=0.01, max_logit=1)
    report = ExportReport("out", "onnx", "int8", "held-out images", images, **differences, **top1)
    verify(report, 0.5)  # chance is not excluded
    if not is_refused:
        return verify_choosable(report, 0.5)
    with pytest.raises(VerificationError, match=r"at most 0\.5 points .* it loses [0-9.]+ points\. Pass --format onnx"):
        verify_choosable(report, 0.5)


def test_a_lossy_candidate_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no directory in `candidates/` either, from which another machine would choose."""
    for place, number in itertools.product(("train", "val"), range(3)):
        folder = tmp_path / "photos" / place / CLASSES[number]
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(folder / "0.png")
    data = open_data(tmp_path / "photos")
    timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.3, "openvino-bf16": 0.3, "onnx-int8": 0.1})

    def refuse(report: ExportReport, max_drop: float) -> None:
        if report.precision == "int8":
            raise VerificationError("too lossy")

    monkeypatch.setattr(exporting, "verify_choosable", refuse)
    monkeypatch.setattr(choosing, "KINDS", (("onnx", "fp32"), ("onnx", "int8")))
    report = export(model("levit_nano_32"), tmp_path / "out", format="auto", data=data, max_drop=100)
    assert [(row.precision, row.refused) for row in report.candidates] == [("fp32", None), ("int8", "too lossy")]
    assert not list((tmp_path / "out" / "candidates").iterdir())


def test_the_model_runs_once_for_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    made: list[Reference] = []
    monkeypatch.setattr(exporting, "Reference", lambda *of: made.append(Reference(*of)) or made[-1])
    network = model("levit_nano_32")
    export(network, tmp_path / "out", format="auto", precision="fp32", label_names=CLASSES)
    (reference,) = made
    runs: list[int] = []
    network.register_forward_hook(lambda *_: runs.append(1))
    again = [logits for _, _, logits in reference.batches()]
    assert not runs
    fresh = [logits for _, _, logits in Reference(network, None, (3, 32, 32)).batches()]
    assert len(runs) == len(fresh)
    for logits, expected in zip(again, fresh, strict=True):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("error", [MemoryError(), VerificationError("It fails. Nothing was written.")])
def test_a_candidate_that_cannot_be_made_leaves_the_others(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    write = exporting.write_export

    def fail(model: Any, folder: Path, format: str, *rest: Any) -> Any:
        if format == "openvino":
            raise error
        return write(model, folder, format, *rest)

    monkeypatch.setattr(exporting, "write_export", fail)
    report = export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32")
    refused = {row.format: row.refused for row in report.candidates}
    assert refused == {
        "openvino": "memory does not suffice to make it" if not str(error) else "It fails.",
        "onnx": None,
    }


def test_auto_without_the_packages_that_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(format: str, precision: str) -> None:
        raise UsageError("onnxscript is needed for this. Run: pip install 'weft-vision[deploy]'")

    monkeypatch.setattr(exporting, "check_tools", missing)
    message = r"format auto needs an export that is possible .* onnx-fp32: onnxscript is needed .*\[deploy\]'"
    with pytest.raises(UsageError, match=message):
        export(model("levit_nano_32"), tmp_path / "out", format="auto")
    assert not (tmp_path / "out").exists()


def test_a_choice_that_does_not_fit_its_export_is_measured_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    record = json.loads((out / "chosen.json").read_text())
    (out / "chosen.json").write_text(json.dumps(record | {"chosen": "onnx-fp32"}))
    assert open_model(out, quiet=True)[0].format == "openvino"
    assert len(measured) == 1


def test_the_versions_of_all_builds_of_a_runtime_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.27"
        raise choosing.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(choosing.importlib.metadata, "version", version)
    assert choosing.machine().versions == {"onnxruntime-gpu": "1.27"}


def test_a_choice_is_found_though_torch_has_another_number_of_threads(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads is read once per call: torch, which a service imports in between, can have another one."""
    choosing.remember("a name", [out], 2)
    monkeypatch.setattr(choosing, "num_threads", lambda: 64)
    assert choosing.recall([out], 2) == "a name"
    assert choosing.recall([out], 3) is None


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [(("avx2", "fma"), "fp32", "int8"), (("avx512f", "avx512_vnni"), "int8", "fp16"), (("asimd",), "int8", "fp16")],
)
def test_the_expected_order_fits_the_processor(
    flags: tuple[str, ...], first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu_flags", "onednn_flags"):
        monkeypatch.setattr(choosing, name, lambda: flags)
    monkeypatch.setattr(choosing, "has_bf16", lambda: False)
    order = [precision for _, precision in expected_order()]
    assert (order[0], order[-1]) == (first, last)


@pytest.mark.slow_except("onnx-fp32")
@pytest.mark.parametrize("winner", ["openvino-fp32", "onnx-fp32"])
def test_the_choice_follows_the_times(winner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"openvino-fp32": 0.1, "onnx-fp32": 0.1, "openvino-bf16": 0.3, winner: 0.05}
    timings(monkeypatch, seconds)
    network = model("levit_nano_32")
    report = export(network, tmp_path / "out", format="auto", label_names=CLASSES, batch_sizes=(1, 3))
    assert f"{report.format}-{report.precision}" == winner
    record = json.loads((tmp_path / "out" / "chosen.json").read_text())
    assert record["chosen"] == winner
    assert record["machine"]["processor_class"] == choosing.machine().processor_class
    rows = {f"{row['format']}-{row['precision']}": row for row in record["candidates"]}
    assert rows["onnx-fp32"]["seconds"] == {"1": seconds["onnx-fp32"], "3": pytest.approx(3 * seconds["onnx-fp32"])}
    assert 0 <= rows["onnx-fp32"]["difference"] < 1e-4
    assert rows["openvino-int8"]["refused"] == "int8 is calibrated on images; none were given"
    assert rows["openvino-int8"]["seconds"] == {}
    kept = {path.name for path in (tmp_path / "out" / "candidates").iterdir()}
    assert kept == {name for name, row in rows.items() if row["refused"] is None} - {winner}
    for file in (tmp_path / "out").rglob("report.json"):
        assert json.loads(file.read_text())["out"] == str(file.parent)
    opened, names = open_model(tmp_path / "out")
    assert (opened.format, names) == (winner.partition("-")[0], list(CLASSES))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(opened(x), network(x), rtol=1e-3, atol=1e-3)
    export(network, tmp_path / "out", format="onnx", force=True)  # replaces all of it
    assert not (tmp_path / "out" / "chosen.json").exists()


def test_bf16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "has_bf16", lambda: False)
    monkeypatch.setattr(choosing, "cpu_flags", lambda: ("avx2",))
    assert choosing.unsuitable("openvino", "bf16", has_data=True) == "this processor emulates bf16"
    monkeypatch.setattr(choosing, "cpu_flags", tuple)  # as on macOS and Windows
    assert choosing.unsuitable("openvino", "bf16", has_data=True) == "whether this processor has bf16 is not known"


@pytest.mark.parametrize("is_fast", [True, False])
def test_only_bf16_needs_instructions(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "has_bf16", lambda: is_fast)
    suits = {precision: choosing.unsuitable("openvino", precision, has_data=True) is None for precision in PRECISIONS}
    assert suits == {"fp32": True, "bf16": is_fast, "int8": True}


def test_another_machine_measures_again_once(
    out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    assert open_model(out)[0].format == "openvino"
    assert measured == []
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert Predictor.load(out).metadata["runtime"] == "onnx"
    assert [sorted(names) for names in measured] == [["onnx-fp32", "openvino-fp32"]]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "with another number of threads, so weft measured again" in line
    assert "It uses onnx-fp32." in line
    assert open_model(out)[0].format == "onnx"
    assert len(measured) == 1
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (file,) = (cache / "choices").iterdir()
    file.write_text("{")  # damaged
    assert open_model(out, quiet=True)[0].format == "onnx"
    assert len(measured) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["{", '{"artefact": 3}', ""])
def test_a_candidate_without_a_readable_config_is_left_out(
    text: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    (out / "candidates" / "onnx-fp32" / "config.json").write_text(text)
    assert open_model(out, quiet=True)[0].format == "openvino"


def test_another_machine_measures_at_the_recorded_batch_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32", batch_sizes=(4, 1))
    sizes: list[tuple[int, ...]] = []

    def measure(calls: dict[str, Callable[[int], object]], at: Any) -> dict[str, dict[int, float]]:
        sizes.append(tuple(at))
        return {name: dict.fromkeys(at, 0.1) for name in calls}

    monkeypatch.setattr(choosing, "time_calls", measure)
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    open_model(tmp_path / "out", quiet=True)
    assert sizes == [(1,), (4,)]


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_a_runtime_that_is_asked_for_is_used(runtime: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine that chose the other one, and on another; of the directory, and of a run that has it."""
    timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    assert Predictor.open(out, runtime=runtime).metadata["runtime"] == runtime
    run = run_with_exports(out)
    assert Predictor.open(run, runtime=runtime).metadata["runtime"] == runtime
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    assert Predictor.open(out, runtime=runtime).metadata["runtime"] == runtime
    assert Predictor.open(run, runtime=runtime).metadata["runtime"] == runtime


@pytest.mark.parametrize("device", ["cuda", "mps", "tpu"])
def test_an_export_runs_on_the_cpu_alone(device: str, out: Path) -> None:
    with pytest.raises(UsageError, match=f"device of an export must be auto or cpu; got '{device}'"):
        Predictor.load(out, device=device)


def test_a_precision_that_the_export_does_not_have_is_refused(out: Path) -> None:
    with pytest.raises(UsageError, match="precision must be that of the export, fp32; got bf16"):
        Predictor.load(out, precision="bf16")
    with pytest.raises(UsageError, match="precision must be that of the export, fp32; got bf16"):
        Predictor.open(out, precision="bf16")


def test_an_unknown_precision_is_refused(out: Path) -> None:
    file = out / "config.json"
    config = json.loads(file.read_text())
    config["artefact"]["precision"] = "zz"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="must name a precision of fp32, fp16, bf16, int8; got 'zz'"):
        open_model(out)


def test_the_version_of_torch_does_not_matter_to_exports() -> None:
    assert set(choosing.machine().versions) <= {"openvino", "onnxruntime"}


def test_a_choice_without_one_of_the_runtimes_is_remembered(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    assert open_model(out)[0].format == "openvino"
    assert "Not considered: " in capsys.readouterr().err
    assert open_model(out)[0].format == "openvino"
    assert capsys.readouterr().err == ""


def test_another_number_of_threads_is_measured_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    for threads in (1, 1, 2):
        monkeypatch.setattr(processor, "num_threads", lambda threads=threads: threads)
        open_model(out, quiet=True)
    assert len(measured) == 2


class OnnxRuntimeError(Exception):
    """As those of ONNX Runtime, which have no other base class."""


def fail_to_time(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(choosing, "time_calls", fail)


@pytest.mark.parametrize("error", [MemoryError, OnnxRuntimeError])
def test_exports_that_cannot_be_timed_here(
    error: type[Exception], out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_time(monkeypatch, error("std::bad_alloc"))
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    assert open_model(out)[0].format == "openvino"
    assert "cannot be timed here (std::bad_alloc). weft uses openvino-fp32." in capsys.readouterr().err


def run_with_exports(out: Path) -> Path:
    """A run that has a directory of format auto."""
    run = out.parent / "run"
    save_model_dir(model("levit_nano_32"), run / "best", label_names=CLASSES)
    shutil.copytree(out, run / "auto")
    return run


def test_a_service_whose_models_cannot_be_timed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_time(monkeypatch, OnnxRuntimeError("Failed to allocate memory"))
    messages: list[str] = []
    assert Predictor.open(run_with_exports(out), log=messages.append).metadata["runtime"] == "openvino"
    assert "the models cannot be timed here (Failed to allocate memory); " in messages[-1]


def test_a_lack_of_memory_at_one_start_is_not_remembered(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2, "auto": 0.1, "best": 0.3})
    run, predict = run_with_exports(out), Predictor.predict

    def fail(self: Predictor, images: list[Any], **arguments: Any) -> Any:
        if self.metadata["runtime"] == "openvino":
            raise MemoryError
        return predict(self, images, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "predict", fail)
        assert Predictor.open(run).metadata["runtime"] != "openvino"
    assert Predictor.open(run).metadata["runtime"] == "openvino"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MemoryError, UsageError, "memory suffices for none of --batch-size 1 2"),
        (DataError, DataError, "an image"),
    ],
)
def test_exports_that_cannot_be_timed_at_any_size(
    error: type[Exception], kind: type[Exception], message: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error("an image")

    monkeypatch.setattr(choosing, "time_calls", fail)
    reports: Any = {"onnx-fp32": None}
    with pytest.raises(kind, match=message):
        exporting._timed(out, reports, (1, 2))


def test_a_batch_that_does_not_fit_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = Predictor.predict

    def fail(self: Predictor, images: list[Any], **arguments: Any) -> Any:
        if len(images) > 2:
            raise OnnxRuntimeError("Failed to allocate memory")
        return predict(self, images, **arguments)

    monkeypatch.setattr(Predictor, "predict", fail)
    message = r"must run with batches of 4 images; it fails \(OnnxRuntimeError: Failed to .*\)\. Lower --max-batch\."
    with pytest.raises(UsageError, match=message):
        Predictor.open(out, batch_size=4)
    assert Predictor.open(out, batch_size=2).metadata["runtime"] == "openvino"


def test_an_int8_export_that_saturates_here_is_not_timed(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(config: dict[str, Any], formats: tuple[str, ...] = ("onnx",)) -> str | None:
        return "It saturates." if config.get("artefact", {}).get("format") in formats else None

    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1, "auto": 0.3, "best": 0.3})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    settings = choosing.BATCH_SIZES, processor.num_threads()
    choosing.remember("onnx-fp32", [out, out / "candidates" / "onnx-fp32"], *settings)  # by an older weft
    for module in (choosing, select):
        monkeypatch.setattr(module, "saturation_note", note)
    assert open_model(out, threads=settings[1])[0].format == "openvino"
    assert measured == []
    assert capsys.readouterr().err.splitlines() == ["Not considered: onnx-fp32. It saturates."]
    messages: list[str] = []
    assert Predictor.open(run_with_exports(out), log=messages.append).metadata["runtime"] == "openvino"
    assert "onnx-fp32 is skipped: It saturates." in messages[0]
    (out / "model.bin").write_bytes(b"damaged")
    assert open_model(out, threads=settings[1])[0].format == "onnx"
    assert capsys.readouterr().err.splitlines()[-1] == "It saturates."


def test_exports_that_all_saturate_are_timed_once(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    monkeypatch.setattr(choosing, "saturation_note", lambda config: "It saturates.")
    for _ in range(2):
        assert open_model(out)[0].format == "onnx"
        assert capsys.readouterr().err.splitlines()[-1] == "It saturates."
    assert len(measured) == 1


def test_a_choice_that_is_damaged_by_now_is_left_out(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    assert open_model(out, quiet=True)[0].format == "onnx"
    (out / "candidates" / "onnx-fp32" / "model.onnx").write_bytes(b"damaged")
    assert open_model(out)[0].format == "openvino"
    assert "Not considered: " in capsys.readouterr().err


def test_a_candidate_that_its_runtime_cannot_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_graph = exporting.write_graph

    def fail(network: Any, path: Path, format: str, *rest: Any) -> Any:
        if format == "openvino":
            raise RuntimeError("Check 'false' failed:\nno such kernel")
        return write_graph(network, path, format, *rest)

    monkeypatch.setattr(exporting, "write_graph", fail)
    network = model("levit_nano_32")
    report = export(network, tmp_path / "out", format="auto", precision="fp32")
    refused = [row.refused for row in report.candidates if row.format == "openvino"]
    assert refused == ["openvino must be able to run the network in fp32; it fails: Check 'false' failed."]
    with pytest.raises(VerificationError, match="openvino must be able to run the network in fp32; it fails: Check"):
        export(network, tmp_path / "one", format="openvino")
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("format", ["openvino", "onnx"])
def test_no_file_is_open_when_it_is_moved(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows moves no open file."""
    open_files: list[str] = []
    flush = files.flush_file

    def look(path: Path) -> None:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        names = [*(line.split(maxsplit=5)[-1] for line in mapped), *(os.readlink(fd) for fd in _descriptors())]
        open_files.extend(name for name in names if str(tmp_path) in name and not Path(name).is_dir())
        flush(path)

    monkeypatch.setattr(files, "flush_file", look)
    export(model("levit_nano_32"), tmp_path / "out", format=format)
    assert open_files == []


def _descriptors() -> list[Path]:
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and os.path.lexists(path)]


def test_a_candidate_that_cannot_be_opened_is_left_out(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    (out / "candidates" / "onnx-fp32" / "model.onnx").write_bytes(b"damaged")
    assert open_model(out)[0].format == "openvino"
    assert measured == []  # nothing to compare it with
    assert "Not considered: " in capsys.readouterr().err


def test_a_candidate_of_other_weights_is_left_out(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = out / "candidates" / "onnx-fp32" / "config.json"
    config = json.loads(file.read_text())
    config["artefact"]["weights_sha256"] = "0" * 64
    file.write_text(json.dumps(config))
    assert list(choosing.exports_in(out, choosing.read_choice(out))) == ["openvino-fp32"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("{}", "must have the format that weft writes; version"),
        (" " * (choosing.MAX_BYTES + 1), "must have at most 1 MiB"),
        ('"../.."', "must have the format that weft writes"),
        (RECORD.replace("another", "\\ud800"), "must be JSON"),
    ],
)
def test_a_malformed_record_is_refused(text: str, message: str, out: Path) -> None:
    (out / "chosen.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_model(out)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"candidates": [{"format": "../..", "precision": "fp32"}]},
        {"candidates": [{"format": "onnx", "precision": "fp32"}] * 99},
        {"candidates": [{"format": "onnx", "precision": "fp32", "seconds": {"1": "fast"}}]},
        {"candidates": [{"format": "onnx", "precision": "fp32", "seconds": {"4097": 1.0}}]},
        {"candidates": [{"format": "onnx", "precision": "fp32", "seconds": {"0": 1.0}}]},
        {"machine": {"processor": "x" * 10_000}},
    ],
)
def test_a_record_with_other_values_is_refused(change: dict[str, Any], out: Path) -> None:
    record = json.loads((out / "chosen.json").read_text())
    (out / "chosen.json").write_text(json.dumps(record | change))
    with pytest.raises(CheckpointError, match="must have the format that weft writes"):
        open_model(out)


def test_a_pipe_in_place_of_the_record_is_refused(out: Path) -> None:
    (out / "chosen.json").unlink()
    os.mkfifo(out / "chosen.json")
    with pytest.raises(CheckpointError, match="must be a regular file"):
        open_model(out)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = ConsideredExport("onnx", "int8", None, {"1": 0.5}, 0.01, 98.5)
    choice = Choice(1, OTHER, (row, dataclasses.replace(row, refused="too inaccurate", seconds={})), "onnx-int8")
    choosing.write_choice(tmp_path, choice)
    assert choosing.read_choice(tmp_path) == choice


def test_no_candidate_holds_the_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise VerificationError("The logits of the export must be finite; they are not. Nothing was written.")

    monkeypatch.setattr(exporting, "verify", refuse)
    with pytest.raises(VerificationError, match=r"none does\. openvino-fp32: The logits .*; onnx-fp32: .*not\."):
        export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32")
    assert not list(tmp_path.glob("*out*"))


def test_arguments_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = model("levit_nano_32")
    for name in ("model.onnx", "model.xml"):
        with pytest.raises(UsageError, match=r"format auto writes a directory; got the file name"):
            export(network, tmp_path / name, format="auto")
    with pytest.raises(UsageError, match=r"precision must be fp32, bf16 or int8 with format auto; got fp16"):
        export(network, tmp_path / "out", format="auto", precision="fp16")
    for sizes in ((), (0,), (1, 5000)):
        with pytest.raises(UsageError, match="batch_sizes must be whole numbers from 1 to 4096"):
            export(network, tmp_path / "out", format="auto", batch_sizes=sizes)
    with pytest.raises(UsageError, match="batch_sizes must be at most 64 numbers; got 65"):
        export(network, tmp_path / "out", format="auto", batch_sizes=range(1, 66))
    monkeypatch.setattr(choosing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs an inference runtime, openvino or onnxruntime; none is installed"):
        export(network, tmp_path / "out", format="auto")
    assert not list(tmp_path.glob("*out*"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    source = save_model_dir(model("levit_nano_32"), tmp_path / "model", label_names=CLASSES)
    words = ["export", str(source), str(tmp_path / "out"), "--format", "auto", "--precision", "fp32"]
    assert main([*words, "--batch-size", "0"]) == 2
    assert main(["export", str(source), str(tmp_path / "o"), "--format", "onnx", "--batch-size", "8", "--quiet"]) == 2
    assert "--batch-size belongs to --format auto" in capsys.readouterr().err
    assert main([*words, "--batch-size", "1", "8", "4096"]) == 0
    shown = capsys.readouterr()
    assert "--batch-size 4096 is left out: the exports cannot be timed with it (std::bad_alloc)." in shown.err
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: onnx fp32")
    header, *rows = [line.split() for line in lines[-3:]]
    assert header == "format precision images/s at 1 images/s at 8 images/s at 4096 refused".split()
    assert rows == [["openvino", "fp32", "5.0", "5.0", "-"], ["onnx", "fp32", "10.0", "10.0", "-"]]


@pytest.mark.parametrize(
    ("precision", "bits", "flags", "is_noted"),
    [
        ("int8", None, ("avx2",), True),
        ("int8", 8, ("avx512f",), True),
        ("int8", 7, ("avx2",), False),
        ("int8", None, ("avx512f", "avx512_vnni"), False),
        ("int8", None, ("asimd",), False),
        ("fp32", None, ("avx2",), False),
    ],
)
def test_int8_that_saturates_here_is_noted(
    precision: str, bits: int | None, flags: tuple[str, ...], is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu_flags", "onednn_flags"):
        monkeypatch.setattr(choosing, name, lambda: flags)
    config = {"artefact": {"precision": precision} | ({} if bits is None else {"weight_bits": bits})}
    note = choosing.saturation_note(config)
    assert (note is not None) == is_noted
    assert note is None or "Export the model again" in note


@pytest.mark.slow_except("onnx")
@pytest.mark.parametrize("winner", ["onnx", "best"])
def test_a_service_runs_what_is_fastest_here(winner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = model("levit_nano_32")
    save_model_dir(network, tmp_path / "best", label_names=CLASSES)
    export(network, tmp_path / "onnx", format="onnx", label_names=CLASSES)
    measured = timings(monkeypatch, {"onnx": 0.2, "best": 0.2, winner: 0.1})
    messages: list[str] = []
    runtime = {"onnx": "onnx", "best": "torch"}[winner]
    assert Predictor.open(tmp_path, batch_size=4, log=messages.append).metadata["runtime"] == runtime
    assert "measured on this machine: " in messages[-1]
    assert Predictor.open(tmp_path, batch_size=4, log=messages.append).metadata["runtime"] == runtime
    assert (len(measured), len(messages)) == (1, 1)
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    Predictor.open(tmp_path, batch_size=4)
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("format", "precision", "flags", "message"),
    [
        ("openvino", "bf16", ("avx2",), "OpenVINO computes this export in fp32 here"),
        ("openvino", "bf16", (), None),
        ("onnx", "int8", ("avx2",), "int8 can be slower than fp32"),
        ("openvino", "bf16", ("avx512f", "avx512_bf16"), None),
        ("openvino", "int8", ("avx512f", "avx512_vnni"), None),
        ("openvino", "fp32", ("avx2",), None),
        ("openvino", "int8", (), None),  # not known on this system
    ],
)
def test_a_precision_without_instructions_is_noted(
    format: str, precision: str, flags: tuple[str, ...], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in itertools.product((choosing, processor), ("cpu_flags", "onednn_flags")):
        monkeypatch.setattr(module, name, lambda: flags)
    note = choosing.precision_note(format, precision)
    assert note is None if message is None else message in str(note)


def test_a_damaged_choice_next_to_a_model_is_skipped(out: Path, tmp_path: Path) -> None:
    save_model_dir(model("levit_nano_32"), tmp_path / "run" / "best", label_names=CLASSES)
    shutil.copytree(out, tmp_path / "run" / "auto")
    (tmp_path / "run" / "auto" / "chosen.json").write_text("{")
    messages: list[str] = []
    assert Predictor.open(tmp_path / "run", log=messages.append).metadata["runtime"] == "torch"
    assert len(messages) == 1
    assert "auto is skipped: " in messages[0]


def test_a_user_without_a_home_directory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    with pytest.raises(UsageError, match=r"HOME is not set, and this user has no home directory\. Set WEFT_CACHE\."):
        files.cache_dir()
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1})
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    for _ in range(2):
        assert open_model(out, quiet=True)[0].format == "onnx"
    assert len(measured) == 2  # nothing is stored
    monkeypatch.setattr(choosing, "_for_children", set())  # as in a process that this one starts
    for number in (2, 3):  # the second time, as for a model that is loaded again, it measures
        assert open_model(out, quiet=True)[0].format == "onnx"
        assert len(measured) == number


@pytest.mark.parametrize(("cores", "pinning"), [(2, None), (4, False)])
def test_threads_that_leave_cores_free_are_not_pinned(
    cores: int, pinning: bool | None, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process would begin with the first core, so that several services would share the same ones."""
    monkeypatch.setattr(processor, "available_cores", lambda: cores)
    hints = OpenVinoGraph(out / "model.xml", "fp32", 2, 1).hints
    assert (hints.get("ENABLE_CPU_PINNING"), hints["INFERENCE_NUM_THREADS"]) == (pinning, 2)


def test_the_recorded_choice_is_of_a_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.1, "onnx-fp32": 0.2})
    export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32")
    measured.clear()
    threads = choosing.read_choice(tmp_path / "out").machine.threads
    assert threads == processor.num_threads()
    open_model(tmp_path / "out", threads, quiet=True)
    assert not measured
    open_model(tmp_path / "out", threads + 1, quiet=True)
    assert len(measured) == 1


def test_an_export_that_is_not_verified_yet_is_not_served(out: Path) -> None:
    run = run_with_exports(out)
    shutil.copytree(run / "auto", run / ".int8.1234.part")
    shutil.rmtree(run / "auto")
    assert select.candidates(run) == [run / "best"]


def test_an_export_of_another_user_is_not_served(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write next to a model, as in a shared folder, could have it answer otherwise."""
    run = run_with_exports(out)
    foreign, known = run / "auto" / "config.json", Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = known(path, **options)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10])) if path == foreign else found

    monkeypatch.setattr(Path, "stat", stat)
    notes: list[str] = []
    assert select.candidates(run, log=notes.append) == [run / "best"]
    (note,) = notes
    assert note == f"the export {foreign.parent} is skipped: it belongs to another user than the model."


def test_the_export_of_a_model_without_a_checksum_answers(out: Path) -> None:
    """The weights count, not the bytes of the file, which another program may have written."""
    run = run_with_exports(out)
    kept = select.candidates(run)
    weights, config = (run / "best" / name for name in ("model.safetensors", "config.json"))
    save_file(load_file(weights), weights, {"format": "pt"})
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "weights_sha256"}))
    assert select.candidates(run) == kept


def test_a_run_with_its_exports_alone(out: Path) -> None:
    """As it is copied to a machine without torch."""
    run = run_with_exports(out)
    (run / "best" / "model.safetensors").unlink()
    assert run / "auto" in select.candidates(run)
    assert Predictor.open(run).metadata["runtime"] in ("openvino", "onnx")


def test_exports_next_to_a_model_in_the_current_directory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_exports(out)
    monkeypatch.chdir(run / "best")
    assert len(select.candidates(".")) == 3


def test_a_candidate_that_cannot_be_read_is_left_out(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    known = files.sha256_of

    def sha256_of(path: Path) -> str:
        if path.suffix == ".onnx":
            raise PermissionError(13, "Permission denied")
        return known(path)

    monkeypatch.setattr("weft.deploy.opening.sha256_of", sha256_of)
    assert open_model(out, quiet=True)[0].format == "openvino"
    with pytest.raises(CheckpointError, match=r"must be readable; they are not \(.*Permission denied\)"):
        open_model(out / "candidates" / "onnx-fp32")


def test_the_choice_of_a_service_is_of_contents_not_of_paths(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = timings(monkeypatch, {"openvino-fp32": 0.2, "onnx-fp32": 0.1, "auto": 0.2, "best": 0.3})
    run = run_with_exports(out)
    assert Predictor.open(run).metadata["runtime"] == "onnx"
    moved = run.rename(tmp_path / "moved")
    assert Predictor.open(moved).metadata["runtime"] == "onnx"
    assert len(measured) == 1


@pytest.mark.parametrize("value", ["x" * 300, "caf\udce9", "\x1b[31m"])
def test_nonsense_in_a_variable_that_limits_instructions(
    value: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", value)
    assert TypeAdapter(Machine).dump_json(choosing.machine())
    assert open_model(out, quiet=True)[0].format in ("openvino", "onnx")


@pytest.mark.parametrize("sizes", [(1.5,), (True,), ("8",), (1, 0), ()])
def test_batch_sizes_are_whole_numbers(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=r"batch_sizes must be whole numbers from 1 to 4096; got "):
        choosing.check_batch_sizes(sizes)


def test_a_precision_that_is_not_possible_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "has_bf16", lambda: False)
    monkeypatch.setattr(choosing, "cpu_flags", lambda: ("avx2",))
    message = r"precision bf16 must be possible on this machine; it is not. openvino-bf16: this processor emulates bf16"
    with pytest.raises(UsageError, match=message):
        export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [({"batch_size": 0}, "batch_size must be at least 1; got 0"), ({"runtime": "tensorrt"}, "got 'tensorrt'")],
)
def test_impossible_arguments_of_a_service(more: dict[str, Any], message: str, out: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Predictor.open(out, **more)


def test_no_images(out: Path) -> None:
    assert Predictor.load(out).predict([]) == []


def test_a_missing_package_is_not_a_damaged_file(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_file(*_: object, **__: object) -> None:
        raise UsageError("This needs onnx")

    monkeypatch.setattr("weft.deploy.opening.run_file", run_file)
    with pytest.raises(UsageError, match="This needs onnx"):
        open_model(out)


def test_a_pt2_file_is_refused_for_what_it_can_contain(tmp_path: Path) -> None:
    export(model("levit_nano_32"), tmp_path / "out", format="torch", label_names=CLASSES)
    with pytest.raises(CheckpointError, match=r"a \.pt2 file, which can contain any code"):
        Predictor.open(tmp_path / "out", runtime="torch")


def test_an_export_needs_held_out_images(tmp_path: Path) -> None:
    data = open_data("digits", SplitPlan(limit=60))
    data = dataclasses.replace(data, val=SourcePart(data.val, places=[]))
    with pytest.raises(UsageError, match="data must have held-out images"):
        export(lively("levit_nano_32", num_classes=10), tmp_path / "out", format="onnx", data=data)
