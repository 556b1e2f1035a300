"""The fastest model is chosen by measurement, on the machine at hand, and again on another.

Times are given: a clock moves only while a model runs.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.deploy.dots import CLASSES, dots, fake_graphs
from tests.helpers import without_home
from weft import files
from weft.checkpoints import save_model_dir
from weft.checkpoints.model_dir import load_model_dir
from weft.cli.app import main
from weft.deploy import choosing, export, exporting, formats, opening
from weft.deploy.choosing import (
    BatchError,
    Candidate,
    expected_order,
    exports_in,
    exports_of,
    quickest,
    time_in_turns,
)
from weft.deploy.model import ModelInfo, Outputs
from weft.errors import CheckpointError, UsageError, VerificationError, WeftError
from weft.inference import export_run
from weft.inference import opening as inference_opening
from weft.inference.opening import open_fastest, open_model
from weft.inference.predictor import Predictor
from weft.inference.torch_model import TorchModel
from weft.machine import processor

OTHER = "another processor; avx2; openvino 2026.4; 2 threads"
BOTH = ("openvino-fp32", "onnx-fp32")


class OnnxRuntimeError(Exception):
    """As those of ONNX Runtime, which have no other base class."""


class World:
    """All models that are opened, and the clock.

    Attributes:
        now: the time in seconds.
        seconds: time of an image, by name of the candidate; 0.1 unless given.
        limits: largest batch that a candidate can run.
        errors: why a candidate cannot be opened.
        calls: (candidate, batch size) of all passes.
    """

    def __init__(self) -> None:
        self.now, self.seconds, self.limits = 0.0, dict[str, float](), dict[str, int]()
        self.errors, self.calls = dict[str, WeftError](), list[tuple[str, int]]()

    def perf_counter(self) -> float:
        return self.now

    def open(self, candidate: Candidate) -> Timed:
        if candidate.name in self.errors:
            raise self.errors[candidate.name]
        return Timed(self, candidate)

    def open_one(self, folder: Path, threads: int | None = None) -> Timed:
        artefact = json.loads((folder / "config.json").read_text())["artefact"]
        return self.open(Candidate(folder, artefact["format"], artefact["precision"]))


class Timed:
    """A model of the world."""

    def __init__(self, world: World, candidate: Candidate) -> None:
        self.world, self.name = world, candidate.name
        given = dict(num_classes=3, pretrained_cfg={"input_size": (3, 32, 32)}, path=candidate.path)
        self.info = ModelInfo(runtime=candidate.runtime, precision=candidate.precision, **given)

    def run(self, images: np.ndarray, *, features: bool = False, attention: bool = False) -> Outputs:
        self.world.calls.append((self.name, len(images)))
        if len(images) > self.world.limits.get(self.name, 10**6):
            raise OnnxRuntimeError("Failed to allocate memory")
        self.world.now += self.world.seconds.get(self.name, 0.1) * len(images)
        return Outputs(np.zeros((len(images), 3), np.float32))

    def compile_for(self, batch_sizes: Any) -> None: ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Exports and networks are opened as models whose times are given."""
    world = World()
    monkeypatch.setattr(choosing, "time", world)
    for module in (opening, inference_opening, exporting):
        monkeypatch.setattr(module, "open_one", world.open_one)
    monkeypatch.setattr(
        inference_opening, "_open_network", lambda run, source, *_: world.open(Candidate(source, "torch", "fp32"))
    )
    return world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_dir(dots(), tmp_path_factory.mktemp("saved") / "best", label_names=CLASSES)


def add_export(folder: Path, saved: Path, format: str = "onnx", precision: str = "fp32") -> Path:
    """A directory of an export without its graph."""
    config = json.loads((saved / "config.json").read_text())
    artefact = {"version": 1, "format": format, "precision": precision, "input": [3, 32, 32], "sha256": {}}
    artefact["weights_sha256"] = config["weights_sha256"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"artefact": artefact}))
    return folder


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    """A directory of format auto, in which OpenVINO was faster."""
    for name in BOTH:
        add_export(tmp_path / "out" / name, saved, name.partition("-")[0])
    seconds = {name: {1: 0.1, 16: 1.6} for name in BOTH}
    choosing.write_choice(tmp_path / "out", {"chosen": BOTH[0], "machine": choosing.machine(), "seconds": seconds})
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


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of exports that are skipped and of the times."""
    said: list[str] = []
    monkeypatch.setattr(choosing, "say", said.append)
    return said


def name_of(opened: Any) -> str:
    return f"{opened.info.runtime}-{opened.info.precision}"


def named(world: World, *names: str) -> dict[str, Timed]:
    return {name: world.open(Candidate(Path(), *name.split("-"))) for name in names}


def test_the_least_geometric_mean_is_the_fastest() -> None:
    assert quickest({"a": {1: 0.1, 16: 4.0}, "b": {1: 0.2, 16: 1.0}}) == "b"
    assert quickest({"a": {1: 0.1}, "b": {1: 0.1}}) == "a"


def test_models_take_turns(world: World) -> None:
    models = named(world, "onnx-fp32", "onnx-int8")
    world.seconds = {"onnx-fp32": 0.1, "onnx-int8": 0.3}
    seconds, reasons = time_in_turns(models, (4, 1))
    assert seconds == {name: {size: pytest.approx(size * world.seconds[name]) for size in (1, 4)} for name in models}
    assert not reasons
    order = [name.removeprefix("onnx-") for name, size in world.calls if size == 1]
    assert order[:2] == ["fp32", "int8"]  # compiles the graph for this size
    assert order[2:10] == ["fp32", "fp32", "int8", "int8"] * 2  # the first of a turn is not timed


def test_a_measurement_that_nobody_asked_for_has_a_limit(world: World) -> None:
    """A batch size is left out if it would exceed the limit, before a batch of it runs."""
    models = named(world, "onnx-fp32", "onnx-int8")
    seconds, reasons = time_in_turns(models, (4096, 1, 16), 30)
    assert [list(row) for row in seconds.values()] == [[1, 16]] * 2
    assert reasons == {4096: "its measurement would take too long"}
    assert world.now < 40
    assert not any(time_in_turns(models, (4096,), 30)[0].values())
    assert max(size for _, size in world.calls) == 16
    assert list(time_in_turns(models, (64, 4))[0]["onnx-fp32"]) == [4, 64]  # no limit


def test_a_batch_size_that_fails_leaves_the_others(world: World) -> None:
    world.limits = {"onnx-fp32": 4}
    seconds, reasons = time_in_turns(named(world, "onnx-fp32"), (1, 4, 8), 30)
    assert (list(seconds["onnx-fp32"]), reasons) == ([1, 4], {8: "Failed to allocate memory"})


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports whose graph is a text; the network itself returns their logits."""
    fake_graphs(monkeypatch)
    monkeypatch.setattr(formats, "has_bf16", lambda: True)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("winner", BOTH)
def test_an_export_of_format_auto_follows_the_times(winner: str, world: World, tmp_path: Path) -> None:
    world.seconds = {"openvino-bf16": 0.3, winner: 0.05}
    out = tmp_path / "out"
    report = export(dots(), out, format="auto", label_names=CLASSES, batch_sizes=(1, 3))
    assert (report.out, f"{report.format}-{report.precision}") == (str(out), winner)
    record = choosing.read_choice(out)
    assert (record["chosen"], record["machine"]) == (winner, choosing.machine())
    seconds = world.seconds.get("onnx-fp32", 0.1)
    assert record["seconds"]["onnx-fp32"] == pytest.approx({1: seconds, 3: 3 * seconds})
    rows = {f"{row.format}-{row.precision}": row for row in report.candidates}
    assert rows["onnx-fp32"].seconds["1"] == pytest.approx(seconds)
    assert 0 <= rows["onnx-fp32"].difference < 1e-4
    assert rows["openvino-int8"].refused == "int8 is calibrated on images; none were given"
    kept = {path.name for path in out.iterdir()}
    assert kept == {name for name, row in rows.items() if row.refused is None} | {"chosen.json"}
    for file in out.rglob("report.json"):
        assert json.loads(file.read_text())["out"] == str(file.parent)
    assert name_of(open_model(out)) == winner
    export(dots(), out, format="onnx", force=True)  # replaces all of it
    assert not (out / "chosen.json").exists()


def test_a_directory_of_exports_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anything given: two real exports and their measured times."""
    monkeypatch.undo()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    network = dots()
    report = export(network, tmp_path / "out", format="auto", precision="fp32", label_names=CLASSES)
    opened = open_model(tmp_path / "out")
    assert name_of(opened) == f"{report.format}-{report.precision}"
    assert opened.info.classes == list(CLASSES)
    assert Predictor(opened).predict([]) == []
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    np.testing.assert_allclose(opened.run(images).logits, TorchModel(network).run(images).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), "memory does not suffice to make it"),
        (VerificationError("It fails. Nothing was written."), "It fails."),
        (RuntimeError("no such kernel"), "openvino must be able to run the network in fp32; it fails: no such kernel."),
    ],
)
def test_a_candidate_that_cannot_be_made_leaves_the_others(error, refused, tmp_path, monkeypatch):
    def write(network: Any, file: Path, format: str, *rest: Any) -> Any:
        if format == "openvino":
            raise error
        return fake(network, file, format, *rest)

    fake_graphs(monkeypatch)
    fake = exporting.write_graph
    monkeypatch.setattr(exporting, "write_graph", write)
    report = export(dots(), tmp_path / "out", format="auto", precision="fp32")
    assert {row.format: row.refused for row in report.candidates} == {"openvino": refused, "onnx": None}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"onnx-fp32", "chosen.json"}


def no_tool(*_: object) -> None:
    raise UsageError("onnxscript is needed for this. Run: pip install 'weft-vision[deploy]'")


def not_finite(*_: object) -> None:
    raise VerificationError("The logits of the export must be finite; they are not. Nothing was written.")


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("place", "value", "precision", "words"),
    [
        ((formats, "check_tools"), no_tool, None, r"an export that is possible .*: onnxscript .*\[deploy\]'"),
        ((exporting, "verify"), not_finite, "fp32", r"none does\. openvino-fp32: The logits .*; onnx-fp32: .*not\."),
        ((formats, "has_bf16"), bool, "bf16", "precision bf16 must be possible .*; it is not. openvino-bf16: this"),
    ],
)
def test_auto_without_a_candidate_is_refused_and_writes_nothing(place, value, precision, words, tmp_path, monkeypatch):
    monkeypatch.setattr(*place, value)
    with pytest.raises(WeftError, match=words):
        export(dots(), tmp_path / "out", format="auto", precision=precision)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.usefixtures("written")
def test_exports_that_cannot_be_timed_at_any_size(world: World, tmp_path: Path) -> None:
    world.limits = dict.fromkeys(BOTH, 0)
    with pytest.raises(UsageError, match="memory suffices for none of --batch-size 1 2"):
        export(dots(), tmp_path / "out", format="auto", precision="fp32", batch_sizes=(1, 2))


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


def test_the_versions_of_all_builds_of_a_runtime_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.27"
        raise choosing.importlib.metadata.PackageNotFoundError(name)

    before = choosing.machine(2)
    monkeypatch.setattr(choosing.importlib.metadata, "version", version)
    assert "; onnxruntime-gpu 1.27; 2 threads" in choosing.machine(2)
    assert "torch" not in before  # its version does not matter to exports


AVX2, VNNI, ARM = ("avx2", "fma"), ("avx512f", "avx512_vnni"), ("asimd",)
EMULATED, UNKNOWN = "this processor emulates bf16", "whether this processor has bf16 is not known"  # as on macOS
BF16_NOTE, INT8_NOTE = "OpenVINO computes this export in fp32 here", "int8 can be slower than fp32"


@pytest.mark.parametrize(
    ("flags", "has_bf16", "first", "last", "bf16_refused", "bf16_note", "int8_note"),
    [
        (AVX2, False, "fp32", "int8", EMULATED, BF16_NOTE, INT8_NOTE),
        (VNNI, False, "int8", "fp16", EMULATED, BF16_NOTE, None),
        ((*VNNI, "avx512_bf16"), True, "int8", "fp16", None, None, None),
        (ARM, False, "int8", "fp16", EMULATED, BF16_NOTE, None),
        ((), False, "fp32", "int8", UNKNOWN, None, None),
    ],
)
def test_the_instructions_of_the_processor_decide_what_is_expected_of_a_precision(
    flags, has_bf16, first, last, bf16_refused, bf16_note, int8_note, monkeypatch
):
    for module, name in itertools.product((formats, processor), ("cpu_flags", "onednn_flags")):
        monkeypatch.setattr(module, name, lambda: flags)
    for module in (formats, choosing):
        monkeypatch.setattr(module, "has_bf16", lambda: has_bf16)
    order = [name.partition("-")[2] for name in expected_order()]
    assert (order[0], order[-1]) == (first, last)
    reasons = [formats.unsuitable("openvino", precision, has_data=True) for precision in ("fp32", "bf16", "int8")]
    assert reasons == [None, bf16_refused, None]
    for format, precision, words in (
        ("torch", "fp32", None),
        ("openvino", "fp32", None),
        ("openvino", "bf16", bf16_note),
        ("openvino", "int8", int8_note),
        ("onnx", "int8", int8_note),
    ):
        note = formats.precision_note(format, precision)
        assert note is None if words is None else words in str(note)


@pytest.mark.usefixtures("elsewhere")
def test_another_machine_measures_again_once(out, cache, world, capsys):
    world.seconds = {"openvino-fp32": 0.02, "onnx-fp32": 0.01}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert Predictor.load(out).metadata["runtime"] == "onnx"
    text = "measured on this machine: openvino-fp32 50 and 50, onnx-fp32 100 and 100 images/s at batch size 1 and 16."
    assert text in capsys.readouterr().err
    world.calls.clear()
    assert name_of(open_model(out)) == "onnx-fp32"
    assert (world.calls, capsys.readouterr().err) == ([], "")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (file,) = (cache / "choices").iterdir()
    file.write_text("{")  # damaged
    record = json.loads((out / "chosen.json").read_text()) | {"seconds": {"onnx-fp32": {"4": 0.1, "2": 0.1}}}
    (out / "chosen.json").write_text(json.dumps(record))
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    assert {size for _, size in world.calls} == {1, 2, 4}  # those of the record; the first to estimate the time
    assert capsys.readouterr().err == ""


def test_the_recorded_choice_is_of_this_machine_and_number_of_threads(out: Path, world: World) -> None:
    world.seconds = {"openvino-fp32": 0.2, "onnx-fp32": 0.1}
    assert name_of(open_model(out)) == "openvino-fp32"
    assert name_of(open_model(out, threads=processor.num_threads())) == "openvino-fp32"
    assert world.calls == []
    assert name_of(open_model(out, threads=processor.num_threads() + 1, quiet=True)) == "onnx-fp32"
    assert world.calls


@pytest.mark.usefixtures("elsewhere")
def test_a_candidate_that_is_damaged_by_now_is_left_out(out, world, capsys):
    world.seconds = {"openvino-fp32": 0.2, "onnx-fp32": 0.1}
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    world.errors = {"onnx-fp32": CheckpointError("It is damaged.")}
    world.calls.clear()
    assert name_of(open_model(out)) == "openvino-fp32"
    assert "onnx-fp32 is skipped: It is damaged." in capsys.readouterr().err
    assert world.calls == []  # nothing to compare it with
    world.errors = {}
    assert name_of(open_model(out)) == "onnx-fp32"  # a damage is not remembered
    world.errors = dict.fromkeys(BOTH, CheckpointError("It is damaged."))
    with pytest.raises(CheckpointError, match=r"It is damaged\."):
        open_model(out, quiet=True)


@pytest.mark.usefixtures("elsewhere")
def test_a_choice_without_one_of_the_runtimes_is_remembered(out, world, capsys):
    world.errors = {"onnx-fp32": UsageError("onnx is needed for this.")}
    assert name_of(open_model(out)) == "openvino-fp32"
    assert "onnx-fp32 is skipped: onnx is needed for this." in capsys.readouterr().err
    assert name_of(open_model(out)) == "openvino-fp32"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("elsewhere")
def test_exports_that_cannot_be_timed_here(out, cache, world, capsys):
    world.limits = {"onnx-fp32": 0}
    assert name_of(open_model(out)) == "openvino-fp32"
    text = "the models cannot be timed here (Failed to allocate memory); openvino-fp32 is used."
    assert text in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{"), lambda file: shutil.rmtree(file.parent)])
def test_the_others_run_without_the_chosen_export(damage: Callable[[Path], object], out: Path) -> None:
    damage(out / "openvino-fp32" / "config.json")
    assert name_of(open_model(out, quiet=True)) == "onnx-fp32"
    assert name_of(open_fastest(out, runtime="onnx")) == "onnx-fp32"
    shutil.rmtree(out / "onnx-fp32")
    with pytest.raises(CheckpointError, match=f"{out} must have an export that can be read; it has none"):
        open_model(out, quiet=True)


@pytest.mark.parametrize("winner", ["onnx-fp32", "torch-fp32"])
def test_a_service_runs_what_is_fastest_here(winner, run, tmp_path, world, notes, monkeypatch):
    world.seconds = {winner: 0.05}
    chosen = open_fastest(run, batch_size=4)
    assert name_of(chosen) == winner
    assert "measured on this machine: " in notes[-1]
    world.calls.clear()
    assert name_of(open_fastest(run, batch_size=4)) == winner
    assert world.calls == [(winner, 4)]
    # a worker process gets the path, and what it opens is the same
    assert name_of(open_fastest(chosen.info.path, runtime=chosen.info.runtime)) == winner
    moved = run.rename(tmp_path / "moved")  # the contents count, not the path
    assert name_of(open_fastest(moved, batch_size=4)) == winner
    assert len(notes) == 1
    monkeypatch.setattr(choosing, "machine", lambda *threads: OTHER)
    open_fastest(moved, batch_size=4)
    assert len(notes) == 2


def test_a_choice_is_found_though_torch_has_other_threads(run: Path, notes: list[str], monkeypatch: Any) -> None:
    """The number of threads is read once per call: torch, which a service imports in between, can have another one."""
    monkeypatch.setattr(choosing, "num_threads", iter(range(2, 100)).__next__)
    for _ in range(2):
        open_fastest(run)
    assert len(notes) == 1


def test_a_batch_that_does_not_fit_is_refused_and_not_remembered(run: Path, world: World, notes: list[str]) -> None:
    world.seconds, world.limits = {"openvino-fp32": 0.05}, {"openvino-fp32": 2}
    assert name_of(open_fastest(run, batch_size=4)) == "onnx-fp32"
    assert "must run with batches of 4 images; it fails (OnnxRuntimeError: Failed to" in notes[0]
    world.limits = {}
    assert name_of(open_fastest(run, batch_size=4)) == "openvino-fp32"
    world.limits = dict.fromkeys((*BOTH, "torch-fp32"), 2)
    with pytest.raises(BatchError, match=r"batches of 4 images; it fails .*\. Lower --max-batch\."):
        open_fastest(run, batch_size=4)
    assert name_of(open_fastest(run, batch_size=2)) == "openvino-fp32"


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_a_runtime_that_is_asked_for_is_used(runtime: str, out: Path, run: Path) -> None:
    """Of a directory of exports, and of a run that has one."""
    for path in (out, run):
        assert open_fastest(path, runtime=runtime).info.runtime == runtime


def test_exports_of_another_size_are_skipped(run: Path, notes: list[str]) -> None:
    assert open_fastest(run, img_size=64).info.runtime == "torch"
    assert sum("img_size must be that of the export, 32x32; got 64x64" in note for note in notes) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda out, run: open_model(out, device="cuda"), "device of an export must be auto or cpu; got 'cuda'"),
        (lambda out, run: open_model(out, device="tpu"), "must be auto or cpu; got 'tpu'"),
        (lambda out, run: open_fastest(run, runtime="openvino", device="mps"), "must be auto or cpu; got 'mps'"),
        (lambda out, run: open_model(out, precision="bf16"), "precision must be that of the export, fp32; got bf16"),
        (lambda out, run: open_fastest(out, precision="bf16"), "that of the export, fp32; got bf16"),
        (lambda out, run: open_fastest(run, runtime="onnx", precision="bf16"), "the export, fp32; got bf16"),
        (lambda out, run: open_fastest(out, img_size=(32, 64)), "that of the export, 32x32; got 32x64"),
        (lambda out, run: open_fastest(out / "onnx-fp32", runtime="torch"), "that of the export, onnx; got torch"),
        (lambda out, run: open_fastest(run / "best" / "..", runtime="tensorrt"), "got 'tensorrt'"),
        (lambda out, run: Predictor.open(out, batch_size=0), "batch_size must be at least 1; got 0"),
        (lambda out, run: load_model_dir(out), "must have one model; it has several exports of one"),
        (lambda out, run: export_run(out, out / "new"), "must have one model; it has several exports of one"),
        (lambda out, run: open_fastest(run, runtime="onnx", img_size=64), "the export, 32x32; got 64x64"),
    ],
)
def test_what_an_export_cannot_do_is_refused(call: Callable[[Path, Path], object], words: str, out: Path, run: Path):
    with pytest.raises(WeftError, match=words):
        call(out, run)


def in_config(key: str, value: Any) -> Callable[[Path], object]:
    """A change of an entry of config.json of an export; None removes it."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        part = config["artefact"] if key in config["artefact"] else config
        part[key] = value
        if value is None:
            del part[key]
        (folder / "config.json").write_text(json.dumps(config))

    return change


def give_away(folder: Path) -> None:
    """Who may write next to a model, as in a shared folder, could have it answer otherwise."""
    known = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        found = known(path, **options)
        is_given = path == folder / "config.json"
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10])) if is_given else found

    Path.stat = stat


def hide(folder: Path) -> None:
    """As /root beside /model in a container."""
    known = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return known(path, **options)

    Path.stat = stat


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (in_config("weights_sha256", "0" * 64), "does not record that it was made from these weights"),
        (in_config("weights_sha256", None), "Export the model again, or serve the export by its own path"),
        (give_away, "belongs to another user than the model"),
        (lambda folder: (folder / "config.json").write_text("{"), "must be JSON"),
        (lambda folder: (folder / "config.json").write_text('{"artefact": 3}'), "must"),
        (in_config("label_names", ["a", "b", "c"]), None),  # of another model
        (hide, None),
        (shutil.rmtree, None),
    ],
)
def test_an_export_that_may_be_of_another_model_is_not_served(change, note, run, notes, monkeypatch):
    monkeypatch.setattr(Path, "stat", Path.stat)  # restored
    change(run / "auto" / "onnx-fp32")
    assert [one.name for one in exports_of(run / "best")] == ["openvino-fp32"]
    assert len(notes) == (note is not None)
    assert note is None or ("onnx-fp32 is skipped: " in notes[0] and note in notes[0])
    assert [one.name for one in exports_in(run / "auto")] == ["openvino-fp32"]


def test_an_export_that_is_not_verified_yet_is_not_served(run: Path) -> None:
    (run / "auto").rename(run / ".int8.1234.part")
    assert exports_of(run / "best") == []
    with pytest.raises(UsageError, match=r"onnx needs an export in or next to .*; there is none that fits. Run: weft"):
        open_fastest(run, runtime="onnx")


def test_the_export_of_a_model_without_a_checksum_is_served(run: Path) -> None:
    """The weights count, not the bytes of the file, which another program may have written."""
    kept = exports_of(run / "best")
    assert len(kept) == 2
    weights, config = (run / "best" / name for name in ("model.safetensors", "config.json"))
    save_file(load_file(weights), weights, {"format": "pt"})
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "weights_sha256"}))
    assert exports_of(run / "best") == kept


def test_exports_are_found_without_the_weights_and_from_the_current_directory(run, monkeypatch):
    """As they are copied to a machine without torch."""
    (run / "best" / "model.safetensors").unlink()
    assert [one.path for one in exports_of(run / "best")] == [run / "auto" / name for name in BOTH]
    monkeypatch.chdir(run / "best")
    assert len(exports_of(Path())) == 2


def test_a_user_without_a_home_directory(out: Path, world: World, elsewhere: None, monkeypatch: Any) -> None:
    without_home(monkeypatch)
    with pytest.raises(UsageError, match=r"HOME is not set, and this user has no home directory\. Set WEFT_CACHE\."):
        files.cache_dir()
    for _ in range(2):  # nothing is stored
        world.calls.clear()
        open_model(out, quiet=True)
        assert world.calls


RECORD = {"chosen": "onnx-fp32", "machine": "x", "seconds": {}}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        " " * (choosing.MAX_BYTES + 1),
        {},
        RECORD | {"chosen": "../.."},
        RECORD | {"machine": "x" * 10_000},
        RECORD | {"seconds": {"../..": {"1": 1.0}}},
        RECORD | {"seconds": {"onnx-fp32": {"1": "fast"}}},
        RECORD | {"seconds": {"onnx-fp32": {"4097": 1.0}}},
        RECORD | {"seconds": {"onnx-fp32": {str(size): 1.0 for size in range(1, 70)}}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_record_is_refused(content: Any, out: Path) -> None:
    (out / "chosen.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError, match=r"chosen\.json must .* Export the model again, or pass one of"):
        open_model(out)
