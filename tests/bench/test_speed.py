"""`weft bench`: every way of running a model, in turns, with numbers that fit together."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import weft
import weft.bench.speed as measuring
from tests.helpers import lively
from weft.bench import worker as worker_module
from weft.bench.choices import WAYS
from weft.bench.cost import cost
from weft.bench.peers import build_peer, peers_of
from weft.bench.plot import _panels, plot_speed
from weft.bench.speed import IN_TORCH, SpeedRow, _tasks, matrix_peak, speed
from weft.bench.worker import REFERENCE, Subject, Task, _failure, _reply, cause
from weft.bench.worker_process import CALLS, SECONDS, OutOfMemoryError, WorkerProcess
from weft.cli import main
from weft.deploy import export
from weft.errors import UsageError
from weft.processor import has_bf16

pytestmark = pytest.mark.figures


def test_the_memory_is_stated_and_too_little_of_it_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_gib", lambda: 6.2)
    text = "4 processes take turns; they need about 4 GiB of memory; 6 GiB are available."
    assert measuring._memory_text(4) == text
    assert measuring._memory_text(9).endswith("6 GiB are available. Fewer --ways or --precision need less.")
    monkeypatch.setattr(measuring, "available_gib", lambda: None)
    assert measuring._memory_text(2) == "2 processes take turns; they need about 2 GiB of memory."


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    with WorkerProcess(Task("levit_nano_32", None, False, "eager", "fp32", "cpu", 1), tmp_path / "0.npy") as worker:
        worker.build()
    assert worker.info["model"] == "levit_nano_32"


@pytest.mark.slow
def test_every_way() -> None:
    ways = [way for way in WAYS if way not in ("compiled", "graphed", "aotinductor")]  # minutes of a compiler, a GPU
    precisions = ("fp32", "bf16", "int8") if has_bf16() else ("fp32", "int8")
    lines: list[str] = []
    rows = speed(
        ["levit_nano_32"], ways=ways, precisions=precisions, batch_sizes=[1, 3], rounds=2, threads=1, log=lines.append
    )
    pairs = [(way, precision) for precision in precisions for way in ways if precision in WAYS[way]]
    count = len(pairs) + 1
    assert count == (10 if has_bf16() else 7)
    assert lines[0].startswith(f"{count} processes take turns; they need about {count} GiB of memory")
    ready = [line.partition(":")[0] for line in lines[1 : count + 1]]
    assert ready == [f"{number} of {count} ready" for number in range(1, count + 1)]
    assert sum(" ms in the first turn." in line for line in lines[count + 1 :]) == 2 * len(pairs)
    assert [line for line in lines if "turns measured" in line][-1] == "batch 3: 2 of 2 turns measured."
    assert [(row.way, row.precision) for row in rows] == pairs * 2
    assert [row.batch_size for row in rows] == [1] * len(pairs) + [3] * len(pairs)
    for row in rows:
        assert 0 < row.p50_ms <= row.p95_ms
        assert row.calls >= 2 * CALLS
        assert row.calls * row.p95_ms >= 1000 * SECONDS  # about two turns
        assert row.images_per_second == pytest.approx(1000 * row.batch_size / row.p50_ms)
        assert row.macs is not None
        if row.precision == "int8":
            assert row.peak_percent is None
        else:
            assert row.peak_percent is not None
            assert row.peak_percent > 0  # over 100 where something else runs while the peak is measured
        assert row.difference is not None
        least, most = {"fp32": (0, 1e-5), "bf16": (1e-4, 0.1), "int8": (1e-4, 0.3)}[row.precision]
        assert least <= row.difference < most  # no less: it did compute in that precision
    for first in (rows[0], rows[len(pairs)]):
        assert first.ratio == 1
        same = [row for row in rows if row.batch_size == first.batch_size]
        ratios = [row.images_per_second / first.images_per_second for row in same]
        assert [row.ratio for row in same] == pytest.approx(ratios)


def test_weft_and_its_peers_run_under_equal_settings() -> None:
    """In every way that both have: the same precisions, threads, device and allocators."""
    ways, precisions, allocators = ("eager", "folded", "compiled", "openvino"), ("fp32", "bf16"), ("default", "keep")
    for model in ("levit_256", "cvt_13", "ceit_tiny_patch16_224"):
        tasks = [t for t in _tasks(model, ways, precisions, allocators, True, "cpu", 2) if t.way != REFERENCE]
        sides = {
            peer: {
                (t.way, t.precision, t.allocator, t.threads, t.device)
                for t in tasks
                if t.peer == peer and t.way != "folded"
            }
            for peer in {t.peer for t in tasks}
        }
        assert len(sides) >= 2
        assert all(settings == sides[None] for settings in sides.values()), model
        assert {t.allocator for t in tasks if t.way == "openvino"} == {"default"}
        assert {t.allocator for t in tasks if t.way in IN_TORCH} == set(allocators)
        kept = {(t.way, t.precision) for t in tasks if t.allocator == "keep"}
        assert kept == {(way, precision) for way in IN_TORCH for precision in precisions}


@pytest.mark.slow
def test_a_row_for_each_allocator() -> None:
    rows = speed(["levit_nano_32"], allocators=("default", "keep"), batch_sizes=[1], rounds=1, threads=1)
    found = [(row.way, row.allocator) for row in rows]
    assert found == [(way, allocator) for way in ("eager", "folded") for allocator in ("default", "keep")]
    with pytest.raises(UsageError, match=r"allocators must be one or more of default, keep; got jemalloc\."):
        speed(["levit_nano_32"], allocators=("jemalloc",))


@pytest.mark.slow
def test_an_allocator_that_cannot_be_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with pytest.raises(UsageError, match=r"allocator keep needs glibc and an environment without MALLOC_\* settings"):
        speed(["levit_nano_32"], ways=("eager",), allocators=("keep",), batch_sizes=[1], rounds=1, threads=1)


@pytest.mark.slow
def test_an_export_at_its_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(lively("levit_nano_32", num_classes=3), tmp_path / "out", format="openvino")
    arguments = ["bench", str(tmp_path / "out"), "--batch-size", "best", "--rounds", "1", "--threads", "1", "--json"]
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["way"], row["precision"], row["macs"], row["peak_percent"]) == ("openvino", "fp32", None, None)
    assert row["batch_size"] in [2**power for power in range(10)]


@pytest.mark.slow
def test_a_measurement_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when wandb is installed, which timm imports unless it is hidden."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    speed(["levit_nano_32"], ways=["openvino"], batch_sizes=[1], rounds=1, threads=1)
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "imported").exists()


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        environments.append(env)
        raise UsageError("not started")

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for way in ("eager", "compiled"):
        with pytest.raises(UsageError):
            WorkerProcess(Task("levit_nano_32", None, False, way, "fp32", "cpu", 1), tmp_path / "0.npy").build()
    assert [env["TMPDIR"] for env in environments] == [str(tmp_path)] * 2
    assert "TORCHINDUCTOR_CACHE_DIR" not in environments[0]
    assert Path(environments[1]["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(("seconds", "best"), [((1, 1.1, 1.3, 2.6), 4), ((1, 2.2), 1)])
def test_the_batch_grows_until_that_brings_nothing(
    seconds: tuple[float, ...], best: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seconds of a call with 1, 2, 4, 8 images."""
    monkeypatch.setattr(WorkerProcess, "turn", lambda self, size: [seconds[size.bit_length() - 1]] * CALLS)
    worker = WorkerProcess(Task("levit_nano_32", None, False, "eager", "fp32", "cpu", 1), tmp_path / "answer.npy")
    assert worker.best_batch() == best


TASK = Task("levit_nano_32", None, False, "eager", "fp32", "cpu", 1)


@pytest.mark.parametrize("largest", [0, 1, 8])
def test_the_batch_grows_until_the_memory_ends(largest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def turn(worker: WorkerProcess, size: int) -> list[float]:
        if size > largest:
            raise OutOfMemoryError("needs more memory")
        return [1.0] * CALLS

    monkeypatch.setattr(WorkerProcess, "turn", turn)
    worker = WorkerProcess(TASK, tmp_path / "logits.npy")
    if largest:
        assert worker.best_batch() == largest
    else:
        with pytest.raises(OutOfMemoryError):
            worker.best_batch()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        Exception("Failed to allocate memory for requested buffer of size 9"),
        RuntimeError("shapes cannot be multiplied"),
    ],
    ids=["numpy", "torch", "cuda", "onnx", "another"],
)
def test_a_worker_survives_a_batch_that_is_too_large(error: Exception) -> None:
    def call(images: torch.Tensor) -> torch.Tensor:
        if len(images) > 2:
            raise error
        return images.flatten(1)

    subject = Subject("levit_nano_32", "eager", "fp32", (3, 4, 4), None, call)
    turn = dict(calls=1, seconds=0, warm_up=0)
    reply = _reply(subject, TASK, turn | dict(batch_size=4))
    if "shapes" in str(error):
        message = "levit_nano_32 eager fp32 cannot be measured: RuntimeError: shapes cannot be multiplied."
        assert reply == {"error": f"{message} Leave it out."}
    else:
        message = "levit_nano_32 needs more memory for a batch of 4; use a smaller one."
        assert reply == {"error": message, "out_of_memory": True}
    assert len(_reply(subject, TASK, turn | dict(batch_size=2))["seconds"]) == 1


def test_a_model_that_cannot_be_built_has_a_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "import weft.bench.worker as w\ndef build(*_): raise ValueError('one\\ntwo')\nw.build = build\nw.main()"
    monkeypatch.setattr("weft.bench.worker_process.WORKER", script)
    with WorkerProcess(TASK, tmp_path / "0.npy") as process, pytest.raises(UsageError) as raised:
        process.build()
    assert str(raised.value) == "levit_nano_32 eager fp32 cannot be measured: ValueError: one. Leave it out."
    message = "levit_nano_32 eager fp32 needs more memory to be built; measure fewer ways at the same time."
    assert _failure(TASK, MemoryError()) == {"error": message, "out_of_memory": True}


def test_the_cause_of_a_compiler_is_in_its_second_line() -> None:
    error = RuntimeError("backend='inductor' raised:\nCppCompileError: no g++\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert cause(error) == "RuntimeError: backend='inductor' raised: CppCompileError: no g++"
    assert cause(MemoryError()) == "MemoryError: no message"


def test_the_memory_of_a_gpu_is_measured_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: steps.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**21)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)

    def call(images: torch.Tensor) -> torch.Tensor:
        steps.append("call")
        return images

    subject = Subject("levit_nano_32", "eager", "fp32", (3, 4, 4), None, call)
    turn = dict(batch_size=1, calls=1, seconds=0, warm_up=0)
    assert _reply(subject, replace(TASK, device="cuda"), turn, is_new=True)["peak_mib"] == 2
    assert steps == ["call", "reset", "call"]
    assert _reply(subject, replace(TASK, device="cuda", way="onnx"), turn)["peak_mib"] is None
    assert steps[3:] == ["call", "call"]


class Session:
    """A session of ONNX Runtime, whose logits are the number of its images; writes to memory by address."""

    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")

    def __init__(self, file: str, options: SimpleNamespace, providers: list[tuple[str, dict[str, int]]]) -> None:
        self.given = providers
        self.bound: dict[str, tuple[tuple[int, ...], int]] = {}

    def get_providers(self) -> tuple[str, ...]:
        return self.providers

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(shape=["batch", 5])]

    def io_binding(self) -> Session:
        return self

    def bind(self, name: str, device: str, index: int, dtype: type, shape: tuple[int, ...], address: int) -> None:
        assert (device, index, dtype) == ("cuda", 0, np.float32)
        self.bound[name] = shape, address

    bind_input = bind_output = bind

    def run_with_iobinding(self, binding: Session) -> None:
        (count, *_), _ = self.bound["images"]
        shape, address = self.bound["logits"]
        values = np.full(shape, count, np.float32)
        ctypes.memmove(address, values.ctypes.data, values.nbytes)


@pytest.mark.parametrize(
    ("available", "providers", "message"),
    [
        (Session.providers, Session.providers, ""),
        (("CPUExecutionProvider",), (), "onnx on cuda needs the package onnxruntime-gpu; the installed one has no"),
        (Session.providers, ("CPUExecutionProvider",), "onnx on cuda needs CUDA libraries that ONNX Runtime can load"),
    ],
)
def test_onnx_runtime_on_a_gpu(
    available: tuple[str, ...],
    providers: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With a session that stands in for the GPU's."""
    sessions: list[Session] = []

    def session(*args: object, **more: object) -> Session:
        sessions.append(Session(*args, **more))
        return sessions[-1]

    runtime = SimpleNamespace(
        get_available_providers=lambda: available, SessionOptions=SimpleNamespace, InferenceSession=session
    )
    written: list[object] = []
    monkeypatch.setattr(Session, "providers", providers)
    monkeypatch.setattr(worker_module, "import_onnx_runtime", lambda: runtime)
    monkeypatch.setattr(worker_module, "need", lambda *_: None)
    monkeypatch.setattr(worker_module, "write_graph", lambda *arguments: written.append(arguments[3]))
    if message:
        with pytest.raises(UsageError, match=message):
            worker_module._onnx_on_gpu(torch.nn.Identity(), "tf32", (3, 4, 4), tmp_path / "model.onnx")
    else:
        call = worker_module._onnx_on_gpu(torch.nn.Identity(), "tf32", (3, 4, 4), tmp_path / "model.onnx")
        assert call(torch.zeros(2, 3, 4, 4)).tolist() == [[2.0] * 5] * 2
        assert sessions[0].given == [("CUDAExecutionProvider", {"use_tf32": 1})]
        assert written == ["fp32"]


@pytest.mark.parametrize("way", ["eager", "folded", "compiled"])
def test_the_batch_norms_of_a_peer_are_merged_as_those_of_weft(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In every way except eager."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    for peer in (None, 0):
        model = worker_module.build(Task("levit_128s", peer, True, way, "fp32", "cpu", 1), tmp_path).call
        assert isinstance(model, torch.nn.Module)
        norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
        assert bool(norms) == (way == "eager")


class Outputs:
    """A worker process that has computed its logits."""

    def __init__(self, way: str, values: list[float] | None) -> None:
        self.task, self.values = replace(TASK, way=way), values

    def logits(self, batch_size: int) -> np.ndarray:
        if self.values is None:
            raise OutOfMemoryError("needs more memory")
        return np.array(self.values)


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [([1.0, 2.0], [1.0, 4.0], 0.5), ([0.0, 0.0], [0.0, 0.0], 0.0), ([1.0], None, None)],
)
def test_the_difference_of_logits(actual: list[float], expected: list[float] | None, difference: float | None) -> None:
    worker = Outputs("eager", actual)
    assert measuring._difference(worker, [worker, Outputs(REFERENCE, expected)], 1) == difference


def test_exports_run_on_the_cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "model_dir", Path)
    monkeypatch.setattr(measuring, "read_config", lambda folder: {"artefact": {}})
    (task,) = _tasks(str(tmp_path), ["eager"], ["fp32"], ["default"], False, "cpu", 1)
    assert task.device == "cpu"
    with pytest.raises(UsageError, match=r"Exports run on the CPU; got \S+ with device cuda\. Measure it with"):
        list(_tasks(str(tmp_path), ["eager"], ["fp32"], ["default"], False, "cuda", 1))


def test_a_picture_has_a_panel_per_batch_size_asked(tmp_path: Path) -> None:
    fields = dict(
        ratio=1.0,
        peak_percent=None,
        difference=None,
        calls=9,
        threads=1,
        device="cpu",
        precision="fp32",
        allocator="default",
    )
    row = SpeedRow(
        "levit_nano_32",
        "eager",
        p50_ms=9,
        p95_ms=9,
        images_per_second=111,
        params=1000,
        macs=1000,
        batch_size=1,
        **fields,
    )
    rows = [row, replace(row, way="folded"), replace(row, batch_size=8), replace(row, way="folded", batch_size=16)]
    assert [len(panel) for panel in _panels(rows)] == [2, 2]
    with pytest.raises(UsageError, match="which are not known for exports; also measure a model or a run"):
        plot_speed([replace(row, macs=None)], tmp_path / "speed.png")


@pytest.mark.slow
def test_peers_have_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "levit_128s", "--ways", "eager", "folded", "--peers", "--batch-size", "1", "--rounds", "1"]
    assert main([*arguments, "--plot", str(tmp_path / "new" / "speed.png"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ran = [(row["model"], row["way"]) for row in rows]
    assert ran == [("levit_128s", "eager"), ("levit_128s", "folded"), ("timm levit_128s", "eager")]
    assert all(row["difference"] < 1e-5 for row in rows)
    with Image.open(tmp_path / "new" / "speed.png") as picture:
        assert picture.width > 600


@pytest.mark.slow_except("ceit_tiny_patch16_224-1")
@pytest.mark.parametrize(("name", "count"), [("cvt_13", 2), ("levit_256", 2), ("ceit_tiny_patch16_224", 1)])
def test_peers_are_of_the_same_cost(name: str, count: int) -> None:
    """To a tenth, as vit-pytorch leaves some layers out; DeiT, which is not the same network, to an eighth."""
    own, peers = cost(weft.create_model(name), 224), peers_of(name)
    assert len(peers) == count
    for peer in peers:
        assert cost(build_peer(peer).eval(), 224).macs == pytest.approx(own.macs, rel=0.125)


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    build = WorkerProcess.build

    def build_ours(worker: WorkerProcess) -> None:
        if worker.task.peer is not None:
            raise UsageError("It does not run.")
        build(worker)

    monkeypatch.setattr(WorkerProcess, "build", build_ours)
    with pytest.warns(UserWarning, match=r"One way of a peer is left out\. It does not run\."):
        rows = speed(["levit_128s"], ways=["eager"], batch_sizes=[1], rounds=1, threads=1, peers=True)
    assert [row.model for row in rows] == ["levit_128s"]


def test_what_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(
        UsageError, match=r"levit_nano_32 reference fp32 cannot be measured: its process ended with exit code 1"
    ):
        speed(["levit_nano_32"], threads=1)


def test_the_peak_is_a_machines() -> None:
    assert 1e9 < matrix_peak() < 1e14
    assert matrix_peak("int8") != matrix_peak("int8")  # not a number


@pytest.mark.parametrize(("seconds", "count"), [(19.0, 1), (0.9, 3), (0.05, 10)])
def test_the_peak_is_measured_for_two_seconds(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(measuring, "_timed", lambda call, device: calls.append(call) or seconds)
    assert matrix_peak("bf16") == pytest.approx(2048**3 / seconds)
    assert len(calls) == count


def test_emulated_bf16_is_named_and_refused_in_openvino(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise UsageError("Stopped.")

    monkeypatch.setattr("weft.bench.choices.has_bf16", lambda: False)
    monkeypatch.setattr("weft.capabilities.bf16_note", lambda *_: "This processor emulates bf16.")
    monkeypatch.setattr(measuring, "speed", stop)
    arguments = ["bench", "levit_nano_32", "--precision", "fp32", "bf16"]
    assert main(arguments) == UsageError.exit_code
    assert "This processor emulates bf16.\n" in capsys.readouterr().err
    assert main(arguments[:-1]) == UsageError.exit_code
    assert "emulates" not in capsys.readouterr().err
    assert main([*arguments, "--ways", "eager", "openvino"]) == UsageError.exit_code
    assert "openvino in bf16 needs a processor with AVX-512 bf16 or AMX" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--ways", "tpu"],
            "ways must be one or more of eager, folded, compiled, graphed, aotinductor, onnx, openvino; got tpu.",
        ),
        (["--precision", "fp8"], "precisions must be one or more of fp32, tf32, bf16, int8; got fp8."),
        (
            ["--ways", "eager", "--precision", "int8"],
            "precisions must include one that these ways support (eager: fp32, tf32, bf16)",
        ),
        (["--precision", "tf32"], "tf32 is not supported on cpu; choose another device, way or precision."),
        (["--ways", "graphed"], "graphed is not supported on cpu; choose another device, way or precision."),
        (["--device", "cuda"], "device cuda needs a GPU that PyTorch can use; there is none."),
        (["--plot", "speed.txt"], "The name of a plot must end in .png, .svg, .pdf; got speed.txt."),
        (["--batch-size", "0"], "--batch-size must be a whole number of at least 1; got 0."),
        (["--rounds", "many"], "--rounds must be a whole number of at least 1; got many."),
        (["--peers"], "levit_nano_32 has no peer in another library"),
    ],
)
def test_what_does_not_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "levit_nano_32", *arguments]) == UsageError.exit_code
    assert message in capsys.readouterr().err
