"""`weft bench`: every way of running a model takes turns in a process of its own; the numbers fit together."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft.bench.speed as measuring
import weft.bench.worker as worker_module
from tests.deploy.dots import dots
from weft.bench.speed import WAYS, speed
from weft.bench.worker import OutOfMemoryError, Subject, cause, failure
from weft.bench.worker_process import CALLS, SECONDS, WorkerProcess
from weft.cli import main
from weft.deploy import export
from weft.errors import UsageError
from weft.machine.processor import has_bf16

pytestmark = pytest.mark.figures


def test_the_memory_is_stated_and_too_little_of_it_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_gib", lambda: 6.2)
    text = "4 processes take turns; they need about 4 GiB of memory; 6 GiB are available."
    assert measuring._memory_text(4) == text
    assert measuring._memory_text(9).endswith("6 GiB are available. Fewer --backends or --precision need less.")


def process(folder: Path, way: str = "eager", **more: Any) -> WorkerProcess:
    return WorkerProcess("levit_nano_32", way, "fp32", folder=folder, threads=1, **more)


def out_of_memory(subject: Subject, batch_size: int) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def one_two(subject: Subject) -> None:
    raise ValueError("one\ntwo")


def end(subject: Subject) -> None:
    os._exit(3)


def test_a_worker_survives_what_fails_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also imports no modules from the current folder."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    with process(tmp_path) as worker:
        worker.build()
        assert worker.subject == Subject(None, "eager", "fp32", "cpu", (3, 32, 32))
        with pytest.raises(OutOfMemoryError, match="needs more memory for a batch of 4; use a smaller one"):
            worker.run(out_of_memory, batch_size=4)
        with pytest.raises(UsageError, match=r"levit_nano_32 eager fp32 cannot be measured: ValueError: one\. Leave"):
            worker.run(one_two)
        assert len(worker.turn(2, calls=1, seconds=0, warm_up=0)) == 1
        assert worker.logits(2).shape == (2, 1000)
        with pytest.raises(UsageError, match="its process ended with exit code 3; see its messages above"):
            worker.run(end)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    ways = [way for way in WAYS if way != "compiled"]  # minutes of a compiler
    precisions = ("fp32", "bf16", "int8") if has_bf16() else ("fp32", "int8")
    rows = speed(["levit_nano_32"], backends=ways, precisions=precisions, batch_sizes=[1, 3], rounds=2, threads=1)
    lines = capsys.readouterr().err.splitlines()
    pairs = [(way, precision) for precision in precisions for way in ways if precision in WAYS[way]]
    count = len(pairs)
    assert count == (9 if has_bf16() else 6)
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
        assert 50 < row.memory_mb < 5000
        assert row.difference is not None
        least, most = {"fp32": (0, 1e-5), "bf16": (1e-4, 0.1), "int8": (1e-4, 0.3)}[row.precision]
        assert least <= row.difference < most  # no less: it did compute in that precision
    for first in (rows[0], rows[len(pairs)]):
        assert first.ratio == 1
        same = [row for row in rows if row.batch_size == first.batch_size]
        ratios = [row.images_per_second / first.images_per_second for row in same]
        assert [row.ratio for row in same] == pytest.approx(ratios)


@pytest.mark.slow
def test_an_export_at_its_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a directory of several, the fastest one."""
    export(dots(), tmp_path / "out", format="auto", precision="fp32")
    arguments = ["bench", str(tmp_path / "out"), "--batch-size", "best", "--rounds", "1", "--threads", "1", "--json"]
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["way"] in ("openvino", "onnx"), row["precision"], row["difference"]) == (True, "fp32", None)
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
    speed(["levit_nano_32"], backends=["openvino"], batch_sizes=[1], rounds=1, threads=1)
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
            process(tmp_path, way, is_compiled=way == "compiled").build()
    assert [env["TMPDIR"] for env in environments] == [str(tmp_path)] * 2
    assert "TORCHINDUCTOR_CACHE_DIR" not in environments[0]
    assert Path(environments[1]["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("seconds", "largest", "best"),
    [((1, 1.1, 1.3, 2.6), 8, 4), ((1, 2.2), 8, 1), ((1,) * 5, 8, 8), ((1,) * 5, 1, 1), ((1,) * 5, 0, None)],
)
def test_the_batch_grows_until_that_brings_nothing_or_the_memory_ends(seconds, largest, best, monkeypatch, tmp_path):
    """Seconds of a call with 1, 2, 4, 8, 16 images."""

    def turn(worker: WorkerProcess, size: int) -> list[float]:
        if size > largest:
            raise OutOfMemoryError("needs more memory")
        return [seconds[size.bit_length() - 1]] * CALLS

    monkeypatch.setattr(WorkerProcess, "turn", turn)
    if best is not None:
        assert process(tmp_path).best_batch() == best
    else:
        with pytest.raises(OutOfMemoryError):
            process(tmp_path).best_batch()


SMALLER = "needs more memory for a batch of 4; use a smaller one."


@pytest.mark.parametrize(
    ("error", "batch_size", "text"),
    [
        (MemoryError(), 4, SMALLER),
        (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), 4, SMALLER),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 4, SMALLER),
        (Exception("Failed to allocate memory for requested buffer of size 9"), 4, SMALLER),  # of ONNX Runtime
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 4, SMALLER),
        (MemoryError(), None, "needs more memory to be built; measure fewer ways at the same time."),
        (RuntimeError("illegal access"), 4, "cannot be measured: RuntimeError: illegal access. Leave it out."),
    ],
)
def test_an_error_of_a_worker_is_named(error: Exception, batch_size: int | None, text: str) -> None:
    named = failure("levit_nano_32 eager fp32", error, batch_size)
    assert str(named) == f"levit_nano_32 eager fp32 {text}"
    assert isinstance(named, OutOfMemoryError) == text.startswith("needs more memory")


def test_the_cause_of_a_compiler_is_in_its_second_line() -> None:
    error = RuntimeError("backend='inductor' raised:\nCppCompileError: no g++\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert cause(error) == "RuntimeError: backend='inductor' raised: CppCompileError: no g++"
    assert cause(MemoryError()) == "MemoryError: no message"


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [([1.0, 2.0], [1.0, 4.0], 0.5), ([0.0, 0.0], [0.0, 0.0], 0.0), ([1.0], None, None)],
)
def test_the_difference_of_logits(actual, expected, difference, monkeypatch, tmp_path):
    worker, reference = process(tmp_path), process(tmp_path)

    def logits(self: WorkerProcess, batch_size: int) -> np.ndarray:
        if self is reference and expected is None:
            raise OutOfMemoryError("needs more memory")
        return np.array(actual if self is worker else expected)

    monkeypatch.setattr(WorkerProcess, "logits", logits)
    assert measuring._difference(worker, reference, 1) == difference
    assert measuring._difference(worker, None, 1) is None


def test_exports_run_on_the_cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "model_dir", Path)
    monkeypatch.setattr(measuring, "exports_in", lambda folder: [folder])
    with pytest.raises(UsageError, match=r"Exports run on the CPU; got \S+ with device cuda\. Measure it with"):
        speed([tmp_path], device="cuda")
    with pytest.raises(UsageError, match=r"img_size must be that of each export; got 64 for \S+\. Leave it out\."):
        speed([tmp_path], img_size=64)


@pytest.mark.parametrize(
    ("way", "img_size", "size"),
    [("eager", None, (3, 32, 32)), ("folded", 48, (3, 48, 48)), ("eager", (48, 64), (3, 48, 64))],
)
def test_a_network_is_measured_at_the_size_that_is_asked_for(way, img_size, size, monkeypatch):
    monkeypatch.setattr(worker_module, "keep_memory", lambda: None)  # it holds for all of this process
    subject = worker_module.build("levit_nano_32", way, "fp32", "cpu", img_size)
    assert subject.size == size
    with torch.inference_mode():
        assert subject.call(torch.zeros(1, *size)).shape == (1, 1000)
    assert len(worker_module.timed(subject, 2, calls=3, seconds=0, warm_up=0)) == 3


def test_a_worker_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(
        UsageError, match=r"levit_nano_32 eager fp32 cannot be measured: its process ended with exit code 1"
    ):
        speed(["levit_nano_32"], threads=1)


def test_emulated_bf16_is_named_and_refused_in_openvino(monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise UsageError("Stopped.")

    monkeypatch.setattr("weft.bench.speed.has_bf16", lambda: False)
    monkeypatch.setattr("weft.bench.speed.bf16_note", lambda *_: "This processor emulates bf16.")
    monkeypatch.setattr(WorkerProcess, "build", stop)
    arguments = ["bench", "levit_nano_32", "--precision", "fp32", "bf16"]
    assert main(arguments) == UsageError.exit_code
    assert "This processor emulates bf16.\n" in capsys.readouterr().err
    assert main(arguments[:-1]) == UsageError.exit_code
    assert "emulates" not in capsys.readouterr().err
    assert main([*arguments, "--backends", "eager", "openvino"]) == UsageError.exit_code
    assert "openvino in bf16 needs a processor with AVX-512 bf16 or AMX" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "tpu"], "one or more of eager, folded, compiled, onnx, openvino; got tpu."),
        (["--precision", "fp8"], "precisions must be one or more of fp32, bf16, int8; got fp8."),
        (["--backends", "eager", "--precision", "int8"], "that these backends support (eager: fp32, bf16)"),
        (["--device", "cuda", "--backends", "onnx"], "onnx is not supported on cuda; choose another device"),
        (["--device", "cuda"], "device cuda needs a GPU that PyTorch can use; there is none."),
        (["--batch-size", "0"], "batch_size must be a whole number at least 1; got 0."),
        (["--rounds", "many"], "--rounds must be a whole number; got 'many'."),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "levit_nano_32", *arguments]) == UsageError.exit_code
    assert message in capsys.readouterr().err
