"""Measured speed of the machine, and the precision that it decides."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import without_home
from weft import capabilities as module
from weft.capabilities import Capabilities, Speed, bf16_note, capabilities, fastest_precision
from weft.cli import main
from weft.errors import UsageError
from weft.processor import LIMITS, has_bf16
from weft.recipes import Recipe, load_recipe
from weft.runtime import Runtime
from weft.train import train

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    fastest_precision.cache_clear()
    return tmp_path / "cache"


def speeds(matmul: float, conv: float) -> Capabilities:
    rows = [Speed("matmul", "fp32", 1, 100.0), Speed("matmul", "bf16", 1, 100 * matmul), Speed("conv", "fp32", 1, 50.0)]
    return Capabilities("a processor", "avx2", {}, "2.15", (*rows, Speed("conv", "bf16", 1, 50 * conv)))


def stored(found: Capabilities, monkeypatch: pytest.MonkeyPatch, *, bf16: bool = True) -> None:
    monkeypatch.setattr(module, "_read", lambda file: found)
    monkeypatch.setattr(module, "has_bf16", lambda: bf16)
    fastest_precision.cache_clear()


def test_the_machine_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    first = capabilities()
    assert torch.get_num_threads() == threads
    assert {(row.operation, row.precision) for row in first.speeds} >= {
        (operation, precision) for operation in ("matmul", "conv") for precision in ("fp32", "bf16")
    }
    assert all(row.gflops > 0 for row in first.speeds)
    (file,) = (cache / "machines").iterdir()
    measured: list[int] = []
    monkeypatch.setattr(module, "_measured", lambda: measured.append(1))
    assert capabilities() == first
    assert not measured
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # another machine, as far as speed is concerned
    capabilities()
    file.write_text("{}")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    capabilities()
    capabilities(measure=True)
    assert measured == [1, 1, 1]


@pytest.mark.parametrize("gflops", ["-5", "0", "NaN", "Infinity", '"fast"', '"100"', "null", "1e-300", "1e308"])
def test_an_impossible_speed_is_measured_again(cache: Path, gflops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = module._file()
    file.parent.mkdir(parents=True)
    rows = ", ".join(
        f'{{"operation": "{operation}", "precision": "{precision}", "threads": 1, "gflops": {value}}}'
        for operation in ("matmul", "conv")
        for precision, value in (("fp32", "100"), ("bf16", gflops))
    )
    file.write_text(f'{{"processor": "a", "processor_class": "amx", "limits": {{}}, "torch": "2", "speeds": [{rows}]}}')
    measured = speeds(2.0, 2.0)
    monkeypatch.setattr(module, "_measured", lambda: measured)
    assert capabilities() is measured
    file.write_text(file.read_text().replace(f": {gflops}}}", ": 150}"))
    assert capabilities().gain("bf16") == 1.5


@pytest.mark.parametrize("change", [{"speeds": []}, {"processor": "\ud800"}, {"torch": "2" * (1 << 20)}])
def test_a_damaged_measurement_is_repeated(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    file = module._file()
    assert file is not None
    file.parent.mkdir(parents=True)
    record = json.loads(module._ADAPTER.dump_json(speeds(2.0, 2.0)))
    monkeypatch.setattr(module, "_measured", lambda: None)
    file.write_text(json.dumps(record))
    assert capabilities() == speeds(2.0, 2.0)
    file.write_text(json.dumps(record | change))
    assert capabilities() is None


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    without_home(monkeypatch)
    monkeypatch.setattr(module, "has_bf16", lambda: True)
    monkeypatch.setattr(module, "_seconds", lambda operations: {"fp32": 0.02, "bf16": 0.01})
    assert main(["doctor", "--measure", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["measured"]["auto"] == "bf16"


def test_a_gain_needs_both_precisions() -> None:
    assert Capabilities("a", "amx", {}, "2", (Speed("matmul", "bf16", 1, 10.0),)).gain("bf16") is None


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process measures once."""
    cache.write_text("a file in place of the directory")
    monkeypatch.setattr(module, "_not_stored", {})
    measured = capabilities()
    assert measured.speeds
    assert capabilities() is measured


def test_processes_measure_one_after_another(cache: Path, tmp_path: Path) -> None:
    """The second one waits, and then has the measurement of the first."""
    code = (
        "import sys, time; from weft import capabilities as module; own = module._measured;"
        "module._measured = lambda: (open(sys.argv[1], 'a').write('x'), time.sleep(1), own())[2];"
        "print(module.capabilities().speeds[0].gflops)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "measured")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=120)[0] for process in processes]
    assert results[0] == results[1] != ""
    assert (tmp_path / "measured").read_text() == "x"


@pytest.mark.parametrize(
    ("matmul", "conv", "bf16", "expected"),
    [(2.0, 1.5, True, "bf16"), (1.1, 1.5, True, "fp32"), (2.0, 0.9, True, "fp32"), (2.0, 1.5, False, "fp32")],
)
def test_auto_is_the_faster_precision(
    matmul: float, conv: float, bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(speeds(matmul, conv), monkeypatch, bf16=bf16)
    assert Runtime.of("cpu", "auto").precision == expected


def test_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capabilities", None)
    for has, expected in ((True, "bf16"), (False, "fp32")):
        fastest_precision.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **kwargs: has)
        assert fastest_precision("cuda") == expected
    assert fastest_precision("mps") == "fp32"


def test_emulated_bf16_is_named_with_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(speeds(0.01, 0.01), monkeypatch, bf16=False)
    note = bf16_note("cpu", "bf16")
    assert note is not None
    assert "takes 100 times as long as in fp32" in note
    assert "--precision fp32" in note
    assert bf16_note("cpu", "fp32") is bf16_note("cuda", "bf16") is None
    stored(speeds(2.0, 2.0), monkeypatch, bf16=False)
    assert bf16_note("cpu", "bf16") is None
    monkeypatch.setattr(module, "_read", None)  # not measured where the processor has bf16
    stored(speeds(2.0, 2.0), monkeypatch)
    assert bf16_note("cpu", "bf16") is None


@pytest.mark.parametrize(
    ("gain", "step", "expected", "reason"),
    [
        (2.0, 0.05, "bf16", ": a step takes 50 ms in bf16 and 100 ms in fp32."),
        (2.0, 0.099, "fp32", ": a step takes 99 ms in bf16 and 100 ms in fp32."),
        (2.0, math.inf, "fp32", ": a step takes inf ms in bf16 and 100 ms in fp32."),
        (0.01, None, "fp32", "."),  # no step is timed
    ],
)
def test_a_run_records_what_auto_chose(
    gain: float,
    step: float | None,
    expected: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    stored(speeds(gain, gain), monkeypatch)
    times = {"fp32": 0.1, "bf16": step}
    timed: list[int] = []

    def time_step(recipe: Recipe, size: int, num_classes: int, runtime: Runtime) -> float | None:
        timed.append(size)
        return times[runtime.precision]

    monkeypatch.setattr("weft.train.timing.time_step", time_step)
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16, "data.folds": None}
    train("digits", model="levit_nano_32", epochs=1, precision="auto", settings=settings, out=tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml").precision == expected
    assert f"Precision: {expected}, chosen for this machine{reason}" in capsys.readouterr().err
    assert timed == ([] if step is None else [16, 16])


def test_auto_times_real_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stored(speeds(2.0, 2.0), monkeypatch)
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16}
    train("digits", model="levit_nano_32", epochs=1, precision="auto", settings=settings, out=tmp_path / "run")
    times = re.search(r"a step takes (\d+) ms in bf16 and (\d+) ms in fp32", capsys.readouterr().err)
    assert times is not None
    assert all(int(milliseconds) > 0 for milliseconds in times.groups())


def test_training_warns_of_emulated_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stored(speeds(0.01, 0.01), monkeypatch, bf16=False)
    settings = {"data.limit": 60, "model_args.depth": [1, 1, 1], "batch_size": 16}
    train("digits", model="levit_nano_32", epochs=1, precision="bf16", settings=settings, out=tmp_path / "run")
    assert "This processor emulates bf16" in capsys.readouterr().err


def test_doctor_measures(capsys: Capture) -> None:
    assert main(["doctor", "--measure", "--json"]) in (0, 1)
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["auto"] in (("fp32", "bf16") if has_bf16() else ("fp32",))
    assert {row["operation"] for row in measured["speeds"]} == {"matmul", "conv"}


def test_an_unknown_precision() -> None:
    with pytest.raises(UsageError, match="precision must be auto, fp32 or bf16; got 'fp16'"):
        Runtime.of("cpu", "fp16")
