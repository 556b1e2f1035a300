"""The fastest model is chosen by measurement, on the machine at hand, and again on another.

Times are given: a clock moves only while a model runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.deploy.test_export import CLASSES, model
from tests.helpers import lively, without_home
from weft import files
from weft.checkpoints import save_model_dir
from weft.checkpoints.model_dir import load_model_dir
from weft.cli.app import main
from weft.data import SplitPlan, open_data
from weft.deploy import choosing, export, exporting, formats, opening
from weft.deploy.choosing import BatchError, Candidate, expected_order, exports_of, quickest, run_blank, time_in_turns
from weft.deploy.model import ModelInfo, Outputs
from weft.deploy.runtimes import FILES, OpenVinoModel
from weft.deploy.verification import ExportReport, Reference, verify
from weft.errors import CheckpointError, UsageError, VerificationError, WeftError
from weft.inference import export_run
from weft.inference import opening as inference_opening
from weft.inference.inputs import SourcePart
from weft.inference.opening import open_fastest, open_model
from weft.inference.predictor import Predictor
from weft.inference.torch_model import TorchModel
from weft.machine import processor
from weft.report.intervals import Estimate

PRECISIONS = ("fp32", "bf16", "int8")
OTHER = "another processor; avx2; openvino 2026.4; 2 threads"


class OnnxRuntimeError(Exception):
    """As those of ONNX Runtime, which have no other base class."""


class Clock:
    """Time that passes only in the models that are timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A model that takes a given time for an image, and fails for larger batches than `limit`."""

    def __init__(self, world: World, candidate: Candidate, limit: int = 10**6) -> None:
        self.world, self.name, self.limit = world, candidate.name, limit
        cfg = {"input_size": (3, 32, 32)}
        given = dict(num_classes=3, pretrained_cfg=cfg, path=candidate.path)
        self.info = ModelInfo(runtime=candidate.runtime, precision=candidate.precision, **given)

    def run(self, images: np.ndarray, *, features: bool = False, attention: bool = False) -> Outputs:
        self.world.calls.append((self.name, len(images)))
        if len(images) > self.limit:
            raise OnnxRuntimeError("Failed to allocate memory")
        self.world.clock.now += self.world.seconds.get(self.name, 0.1) * len(images)
        return Outputs(np.zeros((len(images), 3), np.float32))

    def compile_for(self, batch_sizes: Any) -> None:
        pass


class World:
    """All models that are opened, with their times.

    Attributes:
        seconds: time of an image, by name of the candidate.
        limits: largest batch that a candidate can run.
        errors: why a candidate cannot be opened.
        calls: (candidate, batch size) of all passes.
    """

    def __init__(self) -> None:
        self.clock, self.seconds, self.limits = Clock(), dict[str, float](), dict[str, int]()
        self.errors, self.calls = dict[str, WeftError](), list[tuple[str, int]]()

    def open(self, candidate: Candidate) -> Timed:
        if candidate.name in self.errors:
            raise self.errors[candidate.name]
        return Timed(self, candidate, self.limits.get(candidate.name, 10**6))

    def open_one(self, folder: Path, threads: int | None = None) -> Timed:
        artefact = json.loads((folder / "config.json").read_text())["artefact"]
        return self.open(Candidate(folder, artefact["format"], artefact["precision"]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Exports and networks are opened as models whose times are given."""
    world = World()
    monkeypatch.setattr(choosing, "time", world.clock)
    for module in (opening, inference_opening, exporting):
        monkeypatch.setattr(module, "open_one", world.open_one)
    monkeypatch.setattr(
        inference_opening, "_open_network", lambda run, source, *_: world.open(Candidate(source, "torch", "fp32"))
    )
    return world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_dir(model("levit_nano_32"), tmp_path_factory.mktemp("saved") / "best", label_names=CLASSES)


def add_export(folder: Path, saved: Path, format: str = "onnx", precision: str = "fp32", **changes: Any) -> Path:
    """A directory of an export without its graph."""
    config = json.loads((saved / "config.json").read_text())
    artefact = {"version": 1, "format": format, "precision": precision, "input": [3, 32, 32], "sha256": {}}
    artefact["weights_sha256"] = config["weights_sha256"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"artefact": artefact} | changes))
    return folder


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    """A directory of format auto, in which OpenVINO was faster."""
    for format in ("openvino", "onnx"):
        add_export(tmp_path / "out" / f"{format}-fp32", saved, format)
    seconds = {f"{format}-fp32": {1: 0.1, 16: 1.6} for format in ("openvino", "onnx")}
    record: Any = {"chosen": "openvino-fp32", "machine": choosing.machine(), "seconds": seconds}
    choosing.write_choice(tmp_path / "out", record)
    return tmp_path / "out"


@pytest.fixture
def run(saved: Path, out: Path, tmp_path: Path) -> Path:
    """A run that has a directory of format auto."""
    shutil.copytree(saved, tmp_path / "run" / "best")
    shutil.copytree(out, tmp_path / "run" / "auto")
    return tmp_path / "run"


@pytest.fixture
def elsewhere(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine than the one that wrote chosen.json in `out`."""
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    monkeypatch.setattr(opening, "machine", lambda *threads: OTHER)


def name_of(opened: Any) -> str:
    return f"{opened.info.runtime}-{opened.info.precision}"


def candidates(*names: str) -> dict[str, Candidate]:
    split = (name.split("-") for name in names)
    return {f"{runtime}-{precision}": Candidate(Path(), runtime, precision) for runtime, precision in split}


def test_the_least_geometric_mean_is_the_fastest() -> None:
    assert quickest({"a": {1: 0.1, 16: 4.0}, "b": {1: 0.2, 16: 1.0}}) == "b"
    assert quickest({"a": {1: 0.1}, "b": {1: 0.1}}) == "a"


def test_models_take_turns(world: World) -> None:
    models = {name: world.open(one) for name, one in candidates("onnx-fp32", "onnx-int8").items()}
    world.seconds = {"onnx-fp32": 0.1, "onnx-int8": 0.3}
    seconds, reasons = time_in_turns(models, (4, 1))
    assert seconds == {name: {size: pytest.approx(size * world.seconds[name]) for size in (1, 4)} for name in models}
    assert not reasons
    order = [name.removeprefix("onnx-") for name, size in world.calls if size == 1]
    assert order[:2] == ["fp32", "int8"]  # compiles the graph for this size
    assert order[2:10] == ["fp32", "fp32", "int8", "int8"] * 2  # the first of a turn is not timed


def test_a_measurement_that_nobody_asked_for_has_a_limit(world: World) -> None:
    """A batch size is left out if it would exceed the limit, before a batch of it runs."""
    models = {name: world.open(one) for name, one in candidates("onnx-fp32", "onnx-int8").items()}
    seconds, reasons = time_in_turns(models, (4096, 1, 16), 30)
    assert [list(row) for row in seconds.values()] == [[1, 16]] * 2
    assert reasons == {4096: "its measurement would take too long"}
    assert max(size for _, size in world.calls) == 16
    assert world.clock.now < 40
    assert not any(time_in_turns(models, (4096,), 30)[0].values())
    assert max(size for _, size in world.calls) == 16
    assert list(time_in_turns(models, (64, 4))[0]["onnx-fp32"]) == [4, 64]  # no limit


def test_a_batch_size_that_fails_leaves_the_others(world: World) -> None:
    models = {"a": Timed(world, Candidate(Path(), "onnx", "fp32"), limit=4)}
    seconds, reasons = time_in_turns(models, (1, 4, 8), 30)
    assert (list(seconds["a"]), reasons) == ([1, 4], {8: "Failed to allocate memory"})


@pytest.mark.parametrize(
    ("images", "lost", "is_refused"),
    [(41, 1, False), (41, 3, True), (2, 2, True), (1000, 5, False), (1000, 6, True)],
)
def test_an_export_loses_at_most_max_drop_or_one_image(images: int, lost: int, is_refused: bool) -> None:
    drop = Estimate(100 * lost / images, -5, 20)
    top1 = dict(agreement=90, top1=100 - drop.value, top1_model=100, bytes=1, drop=drop)
    differences = dict(max_difference=0.1, mean_difference=0.01, max_logit=1)
    report = ExportReport("out", "onnx", "int8", "held-out images", images, **differences, **top1)
    if not is_refused:
        return verify(report, 0.5)
    with pytest.raises(VerificationError, match=r"at most 0\.5 points of top-1, or one image; .* raise --max-drop"):
        verify(report, 0.5)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports whose graph is a text; the network itself returns their logits."""
    import torch

    def write_graph(network: Any, file: Path, format: str, *_: Any) -> Callable[[np.ndarray], np.ndarray]:
        for name in FILES[format]:
            (file.parent / name).write_text("graph")
        return lambda images: network(torch.from_numpy(images)).detach().numpy()

    monkeypatch.setattr(exporting, "write_graph", write_graph)
    monkeypatch.setattr(formats, "has_bf16", lambda: True)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("winner", ["openvino-fp32", "onnx-fp32"])
def test_the_choice_follows_the_times(winner: str, world: World, tmp_path: Path) -> None:
    world.seconds = {"openvino-fp32": 0.1, "onnx-fp32": 0.1, "openvino-bf16": 0.3, winner: 0.05}
    network, out = model("levit_nano_32"), tmp_path / "out"
    report = export(network, out, format="auto", label_names=CLASSES, batch_sizes=(1, 3))
    assert (report.out, f"{report.format}-{report.precision}") == (str(out), winner)
    record = choosing.read_choice(out)
    assert record["chosen"] == winner
    assert record["machine"] == choosing.machine()
    seconds = world.seconds["onnx-fp32"]
    assert record["seconds"]["onnx-fp32"] == pytest.approx({1: seconds, 3: 3 * seconds})
    rows = {f"{row.format}-{row.precision}": row for row in report.candidates}
    assert rows["onnx-fp32"].seconds["1"] == pytest.approx(seconds)
    difference = rows["onnx-fp32"].difference
    assert difference is not None
    assert 0 <= difference < 1e-4
    assert rows["openvino-int8"].refused == "int8 is calibrated on images; none were given"
    kept = {path.name for path in out.iterdir()}
    assert kept == {name for name, row in rows.items() if row.refused is None} | {"chosen.json"}
    for file in out.rglob("report.json"):
        assert json.loads(file.read_text())["out"] == str(file.parent)
    assert name_of(open_model(out)) == winner
    export(network, out, format="onnx", force=True)  # replaces all of it
    assert not (out / "chosen.json").exists()


@pytest.mark.slow
def test_a_directory_of_exports_runs(tmp_path: Path) -> None:
    """Without anything given: two real exports and their measured times."""
    network = model("levit_nano_32")
    report = export(network, tmp_path / "out", format="auto", precision="fp32", label_names=CLASSES)
    opened = open_model(tmp_path / "out")
    assert name_of(opened) == f"{report.format}-{report.precision}"
    assert opened.info.classes == list(CLASSES)
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    np.testing.assert_allclose(opened.run(images).logits, TorchModel(network).run(images).logits, rtol=1e-3, atol=1e-3)
    assert main(["bench", str(tmp_path / "out"), "--batch-size", "1", "--quiet"]) == 0


@pytest.mark.usefixtures("written", "world")
def test_a_lossy_candidate_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, number in itertools.product(("train", "val"), range(3)):
        folder = tmp_path / "photos" / place / CLASSES[number]
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(folder / "0.png")

    def refuse(report: ExportReport, max_drop: float) -> None:
        if report.precision == "int8":
            raise VerificationError("too lossy")

    monkeypatch.setattr(exporting, "verify", refuse)
    monkeypatch.setattr(exporting, "KINDS", (("onnx", "fp32"), ("onnx", "int8")))
    data = open_data(tmp_path / "photos")
    report = export(model("levit_nano_32"), tmp_path / "out", format="auto", data=data, max_drop=100)
    assert [(row.precision, row.refused) for row in report.candidates] == [("fp32", None), ("int8", "too lossy")]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"onnx-fp32", "chosen.json"}


@pytest.mark.usefixtures("written", "world")
def test_the_model_runs_once_for_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("written", "world")
@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), "memory does not suffice to make it"),
        (VerificationError("It fails. Nothing was written."), "It fails."),
        (RuntimeError("no such kernel"), "openvino must be able to run the network in fp32; it fails: no such kernel."),
    ],
)
def test_a_candidate_that_cannot_be_made_leaves_the_others(
    error: Exception, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exporting.write_graph

    def fail(network: Any, file: Path, format: str, *rest: Any) -> Any:
        if format == "openvino":
            raise error
        return write(network, file, format, *rest)

    monkeypatch.setattr(exporting, "write_graph", fail)
    report = export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32")
    assert {row.format: row.refused for row in report.candidates} == {"openvino": refused, "onnx": None}
    with pytest.raises(type(error) if not isinstance(error, RuntimeError) else VerificationError):
        export(model("levit_nano_32"), tmp_path / "one", format="openvino")
    assert not (tmp_path / "one").exists()


def test_auto_without_the_packages_that_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(format: str, precision: str) -> None:
        raise UsageError("onnxscript is needed for this. Run: pip install 'weft-vision[deploy]'")

    monkeypatch.setattr(exporting, "check_tools", missing)
    message = r"format auto needs an export that is possible .* onnx-fp32: onnxscript is needed .*\[deploy\]'"
    with pytest.raises(UsageError, match=message):
        export(model("levit_nano_32"), tmp_path / "out", format="auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("written", "world")
def test_no_candidate_holds_the_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise VerificationError("The logits of the export must be finite; they are not. Nothing was written.")

    monkeypatch.setattr(exporting, "verify", refuse)
    with pytest.raises(VerificationError, match=r"none does\. openvino-fp32: The logits .*; onnx-fp32: .*not\."):
        export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.usefixtures("written")
def test_exports_that_cannot_be_timed_at_any_size(world: World, tmp_path: Path) -> None:
    world.limits = {"openvino-fp32": 0, "onnx-fp32": 0}
    with pytest.raises(UsageError, match="memory suffices for none of --batch-size 1 2"):
        export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="fp32", batch_sizes=(1, 2))


def test_the_versions_of_all_builds_of_a_runtime_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.27"
        raise choosing.importlib.metadata.PackageNotFoundError(name)

    before = choosing.machine(2)
    monkeypatch.setattr(choosing.importlib.metadata, "version", version)
    assert "; onnxruntime-gpu 1.27; 2 threads" in choosing.machine(2)
    assert "torch" not in before  # its version does not matter to exports


@pytest.mark.parametrize("value", ["x" * 300, "caf\udce9", "\x1b[31m"])
def test_nonsense_in_a_variable_that_limits_instructions(value: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", value)
    choosing.write_choice(tmp_path, {"chosen": "onnx-fp32", "machine": choosing.machine(), "seconds": {}})
    assert choosing.read_choice(tmp_path)["machine"] == choosing.machine()


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [(("avx2", "fma"), "fp32", "int8"), (("avx512f", "avx512_vnni"), "int8", "fp16"), (("asimd",), "int8", "fp16")],
)
def test_the_expected_order_fits_the_processor(
    flags: tuple[str, ...], first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu_flags", "onednn_flags"):
        monkeypatch.setattr(formats, name, lambda: flags)
    monkeypatch.setattr(choosing, "has_bf16", lambda: False)
    order = [precision for _, precision in expected_order()]
    assert (order[0], order[-1]) == (first, last)


def test_bf16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_bf16", lambda: False)
    monkeypatch.setattr(formats, "cpu_flags", lambda: ("avx2",))
    assert formats.unsuitable("openvino", "bf16", has_data=True) == "this processor emulates bf16"
    monkeypatch.setattr(formats, "cpu_flags", tuple)  # as on macOS and Windows
    assert formats.unsuitable("openvino", "bf16", has_data=True) == "whether this processor has bf16 is not known"


@pytest.mark.parametrize("is_fast", [True, False])
def test_only_bf16_needs_instructions(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_bf16", lambda: is_fast)
    suits = {precision: formats.unsuitable("openvino", precision, has_data=True) is None for precision in PRECISIONS}
    assert suits == {"fp32": True, "bf16": is_fast, "int8": True}


def test_a_precision_that_is_not_possible_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_bf16", lambda: False)
    monkeypatch.setattr(formats, "cpu_flags", lambda: ("avx2",))
    message = r"precision bf16 must be possible on this machine; it is not. openvino-bf16: this processor emulates bf16"
    with pytest.raises(UsageError, match=message):
        export(model("levit_nano_32"), tmp_path / "out", format="auto", precision="bf16")
    assert not (tmp_path / "out").exists()


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
    for module, name in itertools.product((formats, processor), ("cpu_flags", "onednn_flags")):
        monkeypatch.setattr(module, name, lambda: flags)
    note = formats.precision_note(format, precision)
    assert note is None if message is None else message in str(note)


@pytest.mark.usefixtures("elsewhere")
def test_another_machine_measures_again_once(
    out: Path, cache: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.seconds = {"openvino-fp32": 0.02, "onnx-fp32": 0.01}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert Predictor.load(out).metadata["runtime"] == "onnx"
    assert (
        "measured on this machine: openvino-fp32 50 and 50, onnx-fp32 100 and 100 images/s at batch size 1 and 16."
        in (capsys.readouterr().err)
    )
    world.calls.clear()
    assert name_of(open_model(out)) == "onnx-fp32"
    assert world.calls == []
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (file,) = (cache / "choices").iterdir()
    file.write_text("{")  # damaged
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    assert world.calls
    assert capsys.readouterr().err == ""


def test_the_recorded_choice_is_of_this_machine_and_number_of_threads(out: Path, world: World) -> None:
    world.seconds = {"openvino-fp32": 0.2, "onnx-fp32": 0.1}
    assert name_of(open_model(out)) == "openvino-fp32"
    assert name_of(open_model(out, threads=processor.num_threads())) == "openvino-fp32"
    assert world.calls == []
    assert name_of(open_model(out, threads=processor.num_threads() + 1, quiet=True)) == "onnx-fp32"
    assert world.calls


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("text", ["{", '{"artefact": 3}', ""])
def test_a_candidate_without_a_readable_config_is_left_out(text: str, out: Path, world: World) -> None:
    (out / "onnx-fp32" / "config.json").write_text(text)
    assert name_of(open_model(out, quiet=True)) == "openvino-fp32"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), lambda file: shutil.rmtree(file.parent)])
def test_the_others_run_without_the_chosen_export(damage: Callable[[Path], object], out: Path) -> None:
    damage(out / "openvino-fp32" / "config.json")
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    assert name_of(open_fastest(out, runtime="onnx")) == "onnx-fp32"
    shutil.rmtree(out / "onnx-fp32")
    with pytest.raises(CheckpointError, match=f"{out} must have an export that can be read; it has none"):
        open_model(out, quiet=True)


@pytest.mark.parametrize("call", [load_model_dir, lambda out: export_run(out, out / "new")])
def test_what_needs_one_model_names_a_directory_of_exports(call: Callable[[Path], object], out: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{out} must have one model; it has several exports of one"):
        call(out)


@pytest.mark.usefixtures("world")
def test_a_runtime_that_is_asked_for_runs_on_the_cpu_in_its_precision(run: Path) -> None:
    with pytest.raises(UsageError, match="device of an export must be auto or cpu; got 'cuda'"):
        open_fastest(run, runtime="openvino", device="cuda")
    with pytest.raises(UsageError, match="precision must be that of the export, fp32; got bf16"):
        open_fastest(run, runtime="onnx", precision="bf16")


def test_exports_of_another_size_are_skipped(out: Path, run: Path, world: World) -> None:
    notes: list[str] = []
    assert open_fastest(run, img_size=64, log=notes.append).info.runtime == "torch"
    assert sum("img_size must be that of the export, 32x32; got 64x64" in note for note in notes) == 2
    with pytest.raises(UsageError, match="img_size must be that of the export, 32x32; got 32x64"):
        open_fastest(out, img_size=(32, 64))


@pytest.mark.usefixtures("elsewhere")
def test_another_machine_measures_at_the_recorded_batch_sizes(out: Path, world: World) -> None:
    record = json.loads((out / "chosen.json").read_text())
    record["seconds"] = {"onnx-fp32": {"4": 0.1, "2": 0.1}}
    (out / "chosen.json").write_text(json.dumps(record))
    open_model(out, quiet=True)
    assert {size for _, size in world.calls} == {1, 2, 4}  # the first to estimate the time


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_a_runtime_that_is_asked_for_is_used(runtime: str, out: Path, run: Path) -> None:
    """Of a directory of exports, and of a run that has one."""
    for path in (out, run):
        assert open_fastest(path, runtime=runtime).info.runtime == runtime


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("device", ["cuda", "mps", "tpu"])
def test_an_export_runs_on_the_cpu_alone(device: str, out: Path) -> None:
    with pytest.raises(UsageError, match=f"device of an export must be auto or cpu; got '{device}'"):
        open_model(out, device=device)


@pytest.mark.usefixtures("world")
def test_a_precision_that_the_export_does_not_have_is_refused(out: Path) -> None:
    for opened in (open_model, open_fastest):
        with pytest.raises(UsageError, match="precision must be that of the export, fp32; got bf16"):
            opened(out, precision="bf16")


def test_an_unknown_precision_is_refused(saved: Path, tmp_path: Path) -> None:
    out = add_export(tmp_path / "out", saved, precision="zz")
    with pytest.raises(CheckpointError, match="must name a precision of fp32, fp16, bf16, int8; got 'zz'"):
        open_model(out)


@pytest.mark.usefixtures("elsewhere")
def test_a_choice_without_one_of_the_runtimes_is_remembered(
    out: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.errors = {"onnx-fp32": UsageError("onnx is needed for this.")}
    assert name_of(open_model(out)) == "openvino-fp32"
    assert "onnx-fp32 is skipped: onnx is needed for this." in capsys.readouterr().err
    assert name_of(open_model(out)) == "openvino-fp32"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("elsewhere")
def test_exports_that_cannot_be_timed_here(
    out: Path, cache: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.limits = {"onnx-fp32": 0}
    assert name_of(open_model(out)) == "openvino-fp32"
    text = "the models cannot be timed here (Failed to allocate memory); openvino-fp32 is used."
    assert text in capsys.readouterr().err
    assert not cache.exists()


def test_a_lack_of_memory_at_one_start_is_not_remembered(run: Path, world: World) -> None:
    world.seconds, world.limits = {"openvino-fp32": 0.05}, {"openvino-fp32": 2}
    messages: list[str] = []
    assert name_of(open_fastest(run, batch_size=4, log=messages.append)) == "onnx-fp32"
    assert "must run with batches of 4 images; it fails (OnnxRuntimeError: Failed to" in messages[0]
    world.limits = {}
    assert name_of(open_fastest(run, batch_size=4)) == "openvino-fp32"


def test_a_batch_that_does_not_fit_is_refused(run: Path, world: World) -> None:
    world.limits = dict.fromkeys(("openvino-fp32", "onnx-fp32", "torch-fp32"), 2)
    message = r"must run with batches of 4 images; it fails \(OnnxRuntimeError: Failed to .*\)\. Lower --max-batch\."
    with pytest.raises(BatchError, match=message):
        open_fastest(run, batch_size=4)
    assert name_of(open_fastest(run, batch_size=2)) == "openvino-fp32"


@pytest.mark.usefixtures("elsewhere")
def test_a_choice_that_is_damaged_by_now_is_left_out(
    out: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.seconds = {"openvino-fp32": 0.2, "onnx-fp32": 0.1}
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    world.errors = {"onnx-fp32": CheckpointError("It is damaged.")}
    world.calls.clear()
    assert name_of(open_model(out)) == "openvino-fp32"
    assert "onnx-fp32 is skipped: It is damaged." in capsys.readouterr().err
    assert world.calls == []  # nothing to compare it with
    world.errors = {}
    assert name_of(open_model(out)) == "onnx-fp32"  # a damage is not remembered


def test_exports_that_all_fail(out: Path, world: World) -> None:
    world.errors = dict.fromkeys(("openvino-fp32", "onnx-fp32"), CheckpointError("It is damaged."))
    with pytest.raises(CheckpointError, match=r"It is damaged\."):
        open_model(out, quiet=True)


def test_a_candidate_of_other_weights_is_left_out(out: Path) -> None:
    file = out / "onnx-fp32" / "config.json"
    config = json.loads(file.read_text())
    config["artefact"]["weights_sha256"] = "0" * 64
    file.write_text(json.dumps(config))
    assert [one.name for one in choosing.exports_in(out)] == ["openvino-fp32"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("{}", "must have the format that weft writes; chosen"),
        (" " * (choosing.MAX_BYTES + 1), "must have at most 1 MiB"),
        ('"../.."', "must have the format that weft writes"),
    ],
)
def test_a_malformed_record_is_refused(text: str, message: str, out: Path) -> None:
    (out / "chosen.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_model(out)


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": "../.."},
        {"chosen": "onnx-fp32\n"},
        {"machine": "x" * 10_000},
        {"seconds": {"../..": {"1": 1.0}}},
        {"seconds": {"onnx-fp32": {"1": "fast"}}},
        {"seconds": {"onnx-fp32": {"4097": 1.0}}},
        {"seconds": {"onnx-fp32": {"0": 1.0}}},
        {"seconds": {"onnx-fp32": {str(size): 1.0 for size in range(1, 70)}}},
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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs an inference runtime, openvino or onnxruntime; none is installed"):
        export(network, tmp_path / "out", format="auto")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("sizes", [(1.5,), (True,), ("8",), (1, 0), ()])
def test_batch_sizes_are_whole_numbers(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=r"batch_sizes must be whole numbers from 1 to 4096; got "):
        formats.check_batch_sizes(sizes)


@pytest.mark.usefixtures("written")
def test_the_command(saved: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.seconds = {"openvino-fp32": 0.2, "onnx-fp32": 0.1}
    world.limits = dict.fromkeys(world.seconds, 100)
    words = ["export", str(saved), str(tmp_path / "out"), "--format", "auto", "--precision", "fp32"]
    assert main([*words, "--batch-size", "0"]) == 2
    assert main(["export", str(saved), str(tmp_path / "o"), "--format", "onnx", "--batch-size", "8", "--quiet"]) == 2
    assert "--batch-size belongs to --format auto" in capsys.readouterr().err
    assert main([*words, "--batch-size", "1", "8", "4096"]) == 0
    shown = capsys.readouterr()
    text = "--batch-size 4096 is left out: the exports cannot be timed with it (Failed to allocate memory)."
    assert text in shown.err
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: onnx fp32")
    header, *rows = [line.split() for line in lines[-3:]]
    assert header == "format precision images/s at 1 images/s at 8 images/s at 4096 refused".split()
    assert rows == [["openvino", "fp32", "5.0", "5.0", "-"], ["onnx", "fp32", "10.0", "10.0", "-"]]


@pytest.mark.parametrize("winner", ["onnx-fp32", "torch-fp32"])
def test_a_service_runs_what_is_fastest_here(winner: str, run: Path, world: World, monkeypatch: Any) -> None:
    world.seconds = {winner: 0.05}
    messages: list[str] = []
    chosen = open_fastest(run, batch_size=4, log=messages.append)
    assert name_of(chosen) == winner
    assert "measured on this machine: " in messages[-1]
    world.calls.clear()
    assert name_of(open_fastest(run, batch_size=4, log=messages.append)) == winner
    assert world.calls == [(winner, 4)]
    assert len(messages) == 1
    # a worker process gets the path, and what it opens is the same
    assert name_of(open_fastest(chosen.info.path, runtime=chosen.info.runtime)) == winner  # type: ignore[arg-type]
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    open_fastest(run, batch_size=4, log=messages.append)
    assert len(messages) == 2


def test_the_choice_of_a_service_is_of_contents_not_of_paths(run: Path, tmp_path: Path, world: World) -> None:
    world.seconds = {"onnx-fp32": 0.05}
    assert name_of(open_fastest(run)) == "onnx-fp32"
    moved, messages = run.rename(tmp_path / "moved"), list[str]()
    assert name_of(open_fastest(moved, log=messages.append)) == "onnx-fp32"
    assert messages == []


@pytest.mark.usefixtures("world")
def test_a_choice_is_found_though_torch_has_other_threads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is read once per call: torch, which a service imports in between, can have another one."""
    monkeypatch.setattr(choosing, "num_threads", iter(range(2, 100)).__next__)
    messages: list[str] = []
    for _ in range(2):
        open_fastest(run, log=messages.append)
    assert len(messages) == 1


def test_a_user_without_a_home_directory(out: Path, world: World, elsewhere: None, monkeypatch: Any) -> None:
    without_home(monkeypatch)
    with pytest.raises(UsageError, match=r"HOME is not set, and this user has no home directory\. Set WEFT_CACHE\."):
        files.cache_dir()
    for _ in range(2):  # nothing is stored
        world.calls.clear()
        open_model(out, quiet=True)
        assert world.calls


def test_an_export_that_is_not_verified_yet_is_not_served(run: Path) -> None:
    (run / "auto").rename(run / ".int8.1234.part")
    assert exports_of(run / "best") == []


def test_an_export_of_another_user_is_not_served(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write next to a model, as in a shared folder, could have it answer otherwise."""
    foreign, known = run / "auto" / "onnx-fp32" / "config.json", Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = known(path, **options)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10])) if path == foreign else found

    monkeypatch.setattr(Path, "stat", stat)
    notes: list[str] = []
    assert [one.name for one in exports_of(run / "best", notes.append)] == ["openvino-fp32"]
    assert notes == [f"the export {foreign.parent} is skipped: it belongs to another user than the model."]


def test_the_export_of_a_model_without_a_checksum_is_served(run: Path) -> None:
    """The weights count, not the bytes of the file, which another program may have written."""
    kept = exports_of(run / "best")
    assert len(kept) == 2
    weights, config = (run / "best" / name for name in ("model.safetensors", "config.json"))
    save_file(load_file(weights), weights, {"format": "pt"})
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "weights_sha256"}))
    assert exports_of(run / "best") == kept


def test_a_run_with_its_exports_alone(run: Path) -> None:
    """As it is copied to a machine without torch."""
    (run / "best" / "model.safetensors").unlink()
    assert [one.path for one in exports_of(run / "best")] == [
        run / "auto" / "openvino-fp32",
        run / "auto" / "onnx-fp32",
    ]


def test_exports_next_to_a_model_in_the_current_directory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "best")
    assert len(exports_of(Path())) == 2


def test_an_export_that_cannot_be_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sha256_of(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    out = add_export(tmp_path / "out", saved)
    (out / "model.onnx").touch()
    monkeypatch.setattr(opening, "sha256_of", sha256_of)
    with pytest.raises(CheckpointError, match=r"must be readable; they are not \(.*Permission denied\)"):
        open_model(out)


def test_a_missing_package_is_not_a_damaged_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_file(*_: object, **__: object) -> None:
        raise UsageError("This needs onnx")

    monkeypatch.setattr(opening, "_check_files", lambda *_: None)
    monkeypatch.setattr(opening, "run_file", run_file)
    with pytest.raises(UsageError, match="This needs onnx"):
        open_model(add_export(tmp_path / "out", saved))


@pytest.mark.parametrize(
    ("more", "message"),
    [({"batch_size": 0}, "batch_size must be at least 1; got 0"), ({"runtime": "tensorrt"}, "got 'tensorrt'")],
)
def test_impossible_arguments_of_a_service(more: dict[str, Any], message: str, out: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Predictor.open(out, **more)


@pytest.mark.usefixtures("world")
def test_no_images(out: Path) -> None:
    assert Predictor.load(out).predict([]) == []


def test_a_pt2_file_is_refused_for_what_it_can_contain(saved: Path, tmp_path: Path) -> None:
    out = add_export(tmp_path / "out", saved, "torch")
    for runtime in ("auto", "torch"):
        with pytest.raises(CheckpointError, match=r"a \.pt2 file, which can contain any code"):
            open_fastest(out, runtime=runtime)


@pytest.mark.parametrize(("cores", "pinning"), [(2, None), (4, False)])
def test_threads_that_leave_cores_free_are_not_pinned(cores: int, pinning: bool | None, monkeypatch: Any) -> None:
    """Every process would begin with the first core, so that several services would share the same ones."""
    monkeypatch.setattr(processor, "available_cores", lambda: cores)
    hints = OpenVinoModel(Path("model.xml"), ModelInfo(runtime="openvino", precision="fp32"), 2, 1).hints
    assert (hints.get("ENABLE_CPU_PINNING"), hints["INFERENCE_NUM_THREADS"]) == (pinning, 2)


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


def test_blank_images_have_the_size_of_the_model(world: World) -> None:
    run_blank(Timed(world, Candidate(Path(), "onnx", "fp32")), 3)
    assert world.calls == [("onnx-fp32", 3)]


def test_an_export_needs_held_out_images(tmp_path: Path) -> None:
    data = open_data("digits", SplitPlan(limit=60))
    data = dataclasses.replace(data, val=SourcePart(data.val, places=[]))
    with pytest.raises(UsageError, match="data must have held-out images"):
        export(lively("levit_nano_32", num_classes=10), tmp_path / "out", format="onnx", data=data)
