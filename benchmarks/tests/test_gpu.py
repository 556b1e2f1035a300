"""`make gpu` without a GPU: what it says, what a resumed call measures, and the tables that it writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.common.records import read_csv, write_csv

from weft.errors import CheckpointError
from weft.machine.system import is_alive
from weft.recipes.fields import seconds_of
from weft.runs.directory import EpochRow, write_metrics

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
NAMES = ("settings", "cells", "report", "run", "parts")
Patch = pytest.MonkeyPatch


@pytest.fixture
def gpu(monkeypatch: Patch, tmp_path: Path) -> SimpleNamespace:
    """The scripts, imported as `python benchmarks/gpu/run.py` does, and the options of a rehearsal in `tmp_path`."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    modules.options = modules.settings.Options("cpu", "small", tmp_path, tmp_path, 100)
    modules.work = lambda *parts, **more: modules.run.Session(modules.options, list(parts), **more).work()
    return modules


def use_cells(gpu: SimpleNamespace, patch: Patch, part: str, *cells: str) -> None:
    patch.setitem(gpu.run.CELLS, part, lambda options: list(cells))


def use_child(gpu: SimpleNamespace, patch: Patch, child: Callable[[str, str], tuple[Any, str | None]]) -> None:
    """Replace the process of a cell by a function of part and cell that returns its rows or an error."""
    patch.setattr(gpu.run.Session, "_child", lambda self, part, cell: child(part, cell))


def speed_row(side: str, way: str, value: str, **more: str) -> dict[str, str]:
    row = {"run": "m", "side": side, "model": "m" if side == "weft" else "timm m", "way": way, "precision": "bf16"}
    row |= {"batch_size": "16", "images_per_second": value, "error": "" if value else "no"}
    return row | {"device": "a GPU", "torch": "2.11.0", "commit": "abc"} | more


def test_without_a_gpu_it_says_how_to_rehearse(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    assert gpu.run.main() == 2
    assert "no CUDA device" in (output := capsys.readouterr().out)
    assert output.rstrip().endswith("make gpu DEVICE=cpu SCALE=small")
    assert not (tmp_path / "out").exists()


def test_the_parts_are_those_of_the_command(gpu: SimpleNamespace) -> None:
    assert set(gpu.cells.CELLS) == set(gpu.parts.MEASURES)
    for scale, device in product(gpu.settings.SCALES, ("cuda", "cpu")):
        options = gpu.settings.Options(device, scale, GPU, None, 100)
        for name, cells in gpu.cells.CELLS.items():
            assert cells(options), name


def test_a_rehearsal_reaches_the_code_of_a_gpu(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    done = set[tuple[str, ...]]()
    monkeypatch.setattr(gpu.parts, "_speed", lambda cell, ways, *_, **__: done.update((cell, w) for w in ways))
    for part in ("compile", "speed", "other_ways"):
        for cell in gpu.cells.CELLS[part](gpu.options):
            if not cell.startswith("steps"):
                gpu.parts.MEASURES[part](cell, gpu.options)
    full = gpu.settings.SCALES["full"]
    assert {way for _, way in done} == {*full.ways, *full.other_ways}
    assert ("ceit_tiny_patch16_224 bf16", "folded") in done
    assert len({cell.partition("_")[0] for cell, _ in done}) == 3  # the families
    assert len({cell for cell, way in done if way in gpu.cells.COMPILED}) == 1  # minutes of a compiler
    assert any(" compiled " in cell for cell in gpu.cells.steps_cells(gpu.options))


def test_a_rehearsal_leaves_the_measurements_alone(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    options: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu.run.Session, "__init__", lambda self, given, *_: options.append(given))
    monkeypatch.setattr(gpu.run.Session, "work", lambda self: 0)
    for arguments in ([], ["--scale", "small"], ["--device", "cpu"]):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        assert gpu.run.main() == 0
    assert [given.out == GPU for given in options] == [True, False, False]
    assert len({given.scratch for given in options}) == 3


def test_variants_replace_what_folded_networks_use(gpu: SimpleNamespace) -> None:
    for _, replacements in gpu.parts.VARIANTS.values():
        before = [getattr(module, name) for module, name, _ in replacements]  # of another name: an AttributeError
        with gpu.parts.replaced(replacements):
            assert all(getattr(module, name) is value for module, name, value in replacements)
        assert [getattr(module, name) for module, name, _ in replacements] == before


def test_a_call_continues_and_a_failure_does_not_stop_it(gpu, monkeypatch, tmp_path):
    measured: list[str] = []

    def child(part: str, cell: str) -> tuple[Any, str | None]:
        measured.append(cell)
        return {"good": ([{"cell": "good"}], None), "bad": (None, "exit code 1: no"), "long": (None, None)}[cell]

    use_child(gpu, monkeypatch, child)
    use_cells(gpu, monkeypatch, "loop", "good", "bad", "long")
    assert gpu.work("loop") == gpu.work("loop") == 3
    assert measured == ["good", "bad", "long", "long"]
    gpu.work("loop", retry=True)
    assert measured[4:] == ["bad", "long"]
    (row,) = read_csv(tmp_path / "loop.csv")
    assert row["cell"] == "good"
    assert {"device", "torch", "cuda", "commit"} <= row.keys()
    assert [row["error"] for row in read_csv(tmp_path / "failures.csv")] == ["failed: exit code 1: no"]
    assert json.loads((tmp_path / "state.json").read_text())[gpu.options.setup]["loop"]["good"] == "done"
    page = (tmp_path / "README.md").read_text()
    assert "exit code 1: no" in page
    assert f"\n\n{gpu.options.setup}:\n\n| part | not measured | failed or partial |" in page
    assert "\n| loop | long | bad |\n" in page


def test_another_version_of_torch_is_measured_anew(gpu: SimpleNamespace, monkeypatch: Patch, tmp_path: Path) -> None:
    good, bad = ([{"value": 1}], None), (None, "no")
    use_cells(gpu, monkeypatch, "loop", "one")

    def work(version: str, result: tuple[Any, str | None] = good, **more: bool) -> int:
        where = {**gpu.settings.machine("cpu"), "torch": version}
        for module in (gpu.settings, gpu.run):
            monkeypatch.setattr(module, "machine", lambda device: where)
        use_child(gpu, monkeypatch, lambda *_: result)
        return gpu.work("loop", **more)

    assert (work("2.10"), work("2.11", bad)) == (0, 1)
    assert [(row["torch"], row["value"]) for row in read_csv(tmp_path / "loop.csv")] == [("2.10", "1")]
    assert work("2.10", bad) == 0  # of this version, nothing failed, and all is measured
    assert [row["torch"] for row in read_csv(tmp_path / "failures.csv")] == ["2.11"]
    (tmp_path / "state.json").unlink()
    assert work("2.10", bad) == 1
    assert not (tmp_path / "loop.csv").exists()  # the rows of a cell that fails are removed
    assert work("2.11", retry=True) == 0
    assert [row["torch"] for row in read_csv(tmp_path / "failures.csv")] == ["2.10"]


def test_a_cell_with_an_error_in_a_row_is_partial(gpu: SimpleNamespace, monkeypatch: Patch, tmp_path: Path) -> None:
    use_cells(gpu, monkeypatch, "speed", "one")
    use_child(gpu, monkeypatch, lambda *_: ([speed_row("weft", "eager", "9"), {"error": "no compiler"}], None))
    assert gpu.work("speed") == 1
    assert gpu.run.Session(gpu.options, ["speed"]).state["speed"] == {"one": "partial: no compiler"}
    assert len(read_csv(tmp_path / "speed.csv")) == 2
    use_child(gpu, monkeypatch, lambda *_: ([speed_row("weft", "eager", "9")], None))
    assert (gpu.work("speed"), gpu.work("speed", retry=True)) == (1, 0)


def test_networks_are_compiled_for_open_cells_on_each_machine(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    measured: list[str] = []

    def child(part: str, cell: str) -> tuple[Any, str | None]:
        measured.append(part)
        gpu.run._result_file(gpu.options, part, cell).touch()
        return ([], None) if part == "compile" else ([{"value": 1}], None)

    use_child(gpu, monkeypatch, child)
    use_cells(gpu, monkeypatch, "compile", "speed one")
    use_cells(gpu, monkeypatch, "speed", "one")
    assert (gpu.work("compile"), gpu.work("compile")) == (0, 0)
    assert measured == ["compile"]
    for _ in range(2):
        shutil.rmtree(gpu.options.scratch)  # another machine
        assert gpu.work("compile", "speed") == 0
    assert measured == ["compile", "compile", "speed"]


def test_a_run_is_resumed_only_if_it_is_in_progress(gpu, monkeypatch, capsys, tmp_path):
    seen: list[bool] = []
    file = gpu.options.scratch / "cifar10" / "state" / "step-0000000001.safetensors"

    def child(part: str, cell: str) -> tuple[None, None]:
        seen.append(file.exists())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return None, None

    use_child(gpu, monkeypatch, child)
    gpu.options = options = replace(gpu.options, seconds=130)
    assert (gpu.work("cifar10"), gpu.work("cifar10")) == (3, 3)
    (tmp_path / "state.json").unlink()
    for gpu.options in (replace(options, seconds=110), options):  # the first is too short to save a state
        assert gpu.work("cifar10") == 3
    assert seen == [False, True, False]
    gpu.options = replace(options, cifar10=None)
    assert gpu.work("cifar10") == 0
    assert "cifar10 is left out: set CIFAR10=FOLDER" in capsys.readouterr().out
    assert not (tmp_path / "failures.csv").exists()


def test_a_cell_that_is_measured_twice_has_its_rows_once(gpu: SimpleNamespace, tmp_path: Path) -> None:
    """As after a kill between the rows and the note that the cell is done."""
    other = {**gpu.settings.machine("cpu"), "device": "GPU"}
    write_csv(tmp_path / "loop.csv", [{"cell": "one", "value": 0, **other}])
    for cell, value in (("one", 1), ("one", 2), ("two", 3)):
        gpu.run.Session(gpu.options, ["loop"])._replace_rows("loop", cell, [{"value": value}])
    rows = [(row["cell"], row["device"], row["value"]) for row in read_csv(tmp_path / "loop.csv")]
    assert rows == [("one", "GPU", "0"), ("one", "cpu", "2"), ("two", "cpu", "3")]


def test_a_damaged_state_is_told(gpu, monkeypatch, capsys, tmp_path):
    (tmp_path / "state.json").write_text('{"loop": {"one": "do')
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--scale", "small", "--out", str(tmp_path)])
    assert gpu.run.main() == CheckpointError.exit_code
    assert "state.json must be JSON;" in (output := capsys.readouterr().out)
    assert output.endswith("Restore it, or delete it to measure all cells again.\n")


def test_a_stop_while_models_build_kills_their_processes(gpu: SimpleNamespace) -> None:
    started, killed = threading.Event(), threading.Event()

    def build(worker: SimpleNamespace) -> None:
        if worker is first:
            assert started.wait(60)
            raise SystemExit(143)  # as the signal handler in the main thread
        worker.process = SimpleNamespace(kill=killed.set)
        started.set()
        assert killed.wait(60)

    first, second = SimpleNamespace(process=None), SimpleNamespace(process=None)
    with pytest.raises(SystemExit):
        gpu.parts._at_once(build, [first, second])
    assert killed.is_set()


def test_cells_without_timings_run_at_the_same_time_and_stop_together(gpu, monkeypatch, tmp_path):
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setitem(gpu.run.AT_ONCE, "resume", 2)

    def child(part: str, cell: str) -> tuple[Any, str | None]:
        both.wait()  # ends when two cells are here
        return [{"value": cell}], None

    use_child(gpu, monkeypatch, child)
    use_cells(gpu, monkeypatch, "resume", "one fp32", "two fp32", "three bf16")
    assert gpu.work("resume", only=["fp32"]) == 0
    assert {row["cell"] for row in read_csv(tmp_path / "resume.csv")} == {"one fp32", "two fp32"}


def test_no_cell_is_started_in_less_time_than_another_took(gpu, monkeypatch, tmp_path):
    options, measured, now = gpu.options, [], 0.0

    def child(part: str, cell: str) -> tuple[Any, str | None]:
        nonlocal now
        measured.append(cell)
        now += 40
        return [{"value": cell}], None

    use_child(gpu, monkeypatch, child)
    use_cells(gpu, monkeypatch, "loop", "one", "two", "three")
    gpu.options = replace(options, seconds=gpu.run.LEAST - 1)
    assert gpu.work("loop") == 3
    assert not list(tmp_path.glob("*.*"))
    monkeypatch.setattr(gpu.run.time, "monotonic", lambda: now)
    gpu.options = replace(options, seconds=110)
    assert gpu.work("loop") == 3  # the third would have 30 seconds
    assert measured == ["one", "two"]


def stub_run(parts: ModuleType, patch: Patch, code: int | None, out: Path, file: str = "") -> None:
    """Replace processes by one that writes the metrics of a run, and another file, and ends with a code."""

    def run(arguments: list[str], log: Path, seconds: float | None = None) -> int | None:
        (out / "state").mkdir(parents=True, exist_ok=True)
        (out / "state" / "step-0000000001.safetensors").touch()
        write_metrics(out / "metrics.csv", [EpochRow(1, 4, 0.1, 2.0, 20.0, 2.0, 20.0, 50.0, 123.0, 7.5, 9.0)])
        if file:
            (out.parent / file).write_text('<testsuite><testcase name="one"/></testsuite>')
        log.write_text("weft: the last line")
        return code

    patch.setattr(parts, "run", run)


def test_a_run_is_measured_by_its_columns_and_its_exit_code(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    parts, options = gpu.parts, gpu.options
    monkeypatch.setattr(parts, "run", lambda *_: None)
    assert parts.cifar10("cifar10", options) is None  # no state was saved
    assert {*parts.LOOP_COLUMNS, *parts.CIFAR10_COLUMNS} <= set(EpochRow._fields)
    stub_run(parts, monkeypatch, 0, options.scratch / "loop")
    (row,) = parts.loop("levit_nano_32 fp32 half", options)
    assert (row["images_per_second"], row["data_wait"]) == ("123", "7.5")
    stub_run(parts, monkeypatch, 0, options.scratch / "cifar10")
    assert parts.cifar10("cifar10", options)[0]["data_wait"] == "7.5"
    for code in (None, 143):  # killed, or stopped by --max-time
        stub_run(parts, monkeypatch, code, options.scratch / "cifar10")
        assert parts.cifar10("cifar10", options) is None
    stub_run(parts, monkeypatch, 4, options.scratch / "cifar10")
    with pytest.raises(RuntimeError, match="exit code 4: weft: the last line"):
        parts.cifar10("cifar10", options)


def test_the_time_limit_of_a_run_is_a_duration(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu.parts, "run", lambda arguments, *_: commands.append(arguments))
    state = gpu.options.scratch / "cifar10" / "state"
    state.mkdir(parents=True)
    (state / "step-0000000001.safetensors").touch()
    for seconds in (45, 133.4):
        assert gpu.parts.cifar10("cifar10", replace(gpu.options, seconds=seconds)) is None
    assert [seconds_of(command[command.index("--max-time") + 1], "--max-time") for command in commands] == [30, 73]


def test_tests_that_did_not_end_have_no_results(gpu: SimpleNamespace, monkeypatch: Patch) -> None:
    out = gpu.options.scratch / "out"
    monkeypatch.setenv("WEFT_TEST_DEVICE", "cpu")
    stub_run(gpu.parts, monkeypatch, 1, out, "tests.xml")
    assert [row["result"] for row in gpu.parts.tests("tests/gpu", gpu.options)] == ["passed"]
    stub_run(gpu.parts, monkeypatch, 0, out)  # writes no report: that of the call before is there
    with pytest.raises(RuntimeError, match="the last line"):
        gpu.parts.tests("tests/gpu", gpu.options)
    stub_run(gpu.parts, monkeypatch, 5, out, "tests.xml")  # pytest found no tests
    with pytest.raises(RuntimeError, match="exit code 5"):
        gpu.parts.tests("tests/gpu", gpu.options)


def test_a_cell_ends_with_what_it_started(gpu: SimpleNamespace, tmp_path: Path) -> None:
    """A process of a cell has a group of its own, which a signal to the group of the cell does not reach."""
    file, log = tmp_path / "pid", tmp_path / "log"
    inner = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    cell = f"""
import pathlib, signal, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # saves seconds
sys.path.insert(0, {str(GPU)!r})
from settings import run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run(["-c", {inner!r}], pathlib.Path({str(log)!r}))
"""
    assert gpu.settings.run(["-c", cell], tmp_path / "cell.log", 15, grace=15) is None
    pid, end = int(file.read_text()), time.monotonic() + 120
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_rows_of_a_gpu_are_ratios_within_one_call(gpu: SimpleNamespace, tmp_path: Path) -> None:
    assert gpu.report.gpu_rows(tmp_path) == ""
    rows = [("weft", "eager", "90"), ("weft", "graphed", "400"), ("peer", "eager", "100"), ("peer", "graphed", "320")]
    write_csv(tmp_path / "speed.csv", [*(speed_row(*row) for row in rows), speed_row("peer", "folded", "")])
    *_, absent, row, _, failed, rest = gpu.report.gpu_rows(tmp_path).splitlines()
    assert row == "| a GPU | m | 16 | bf16 | 320 (timm, graphed) | 0.90 | 1.25 | 400, graphed |"
    assert absent == "| a GPU | cvt_13 | 256 | bf16 | - | - | - | - |"
    assert failed == "Failed: folded bf16 of the peer of m."
    assert rest == "Not measured on a GPU: fp32, tf32, compiled, aotinductor."
    write_csv(tmp_path / "speed.csv", [speed_row("weft", "eager", "200"), speed_row("peer", "eager", "100")])
    others = [speed_row(side, "compiled", value, commit="def") for side, value in (("weft", "330"), ("peer", "300"))]
    write_csv(tmp_path / "other_ways.csv", others)
    assert [line for line in gpu.report.gpu_rows(tmp_path).splitlines() if "| m |" in line] == [
        "| a GPU | abc | m | 16 | bf16 | 100 (timm, eager) | 2.00 | 2.00 | 200, eager |",
        "| a GPU | def | m | 16 | bf16 | 300 (timm, compiled) | - | 1.10 | 330, compiled |",
    ]


def test_a_table_of_several_machines_has_their_columns(gpu: SimpleNamespace, tmp_path: Path) -> None:
    where = dict.fromkeys(gpu.settings.MACHINE, "") | {"device": "a GPU"}
    rows = [{"cell": "c", "test": "t", "result": "passed", "message": "", **where, "torch": v} for v in ("1", "2")]
    write_csv(tmp_path / "tests.csv", rows)
    text = gpu.report.page(gpu.options)
    assert "\n\ndevice a GPU.\n\n| test | result | message | torch |\n" in text
    assert "| 1 passed |  |  | 1 |\n| 1 passed |  |  | 2 |\n" in text


def test_the_committed_state_has_rows(gpu: SimpleNamespace) -> None:
    for setup, parts in gpu.settings.read_state(GPU).items():
        for part, cells in parts.items():
            rows = read_csv(GPU / f"{part}.csv")
            setups = {(row["cell"], f"{row['device']}, torch {row['torch']}") for row in rows}
            assert {(cell, setup) for cell, result in cells.items() if result == "done" and part != "compile"} <= setups


def test_the_tables_are_written_without_matplotlib(gpu: SimpleNamespace, monkeypatch: Patch, tmp_path: Path) -> None:
    written: list[Path] = []
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "benchmarks.speed.plot", raising=False)
    monkeypatch.setattr(gpu.report, "write_file", lambda file, text: written.append(file))
    (tmp_path / "loop.csv").write_text("cell\n")
    gpu.report.write_pages(gpu.options, publish=True)
    assert written == [tmp_path / "README.md", GPU.parents[1] / "README.md"]


@pytest.mark.parametrize(("changed", "commit"), [("", "abc"), (" M src/weft/grid.py", "abc-dirty")])
def test_a_commit_is_changed_by_sources_alone(gpu, monkeypatch, changed, commit):
    asked: list[tuple[str, ...]] = []

    def git(*arguments: str) -> str:
        asked.append(arguments)
        return "abc" if arguments[0] == "describe" else changed

    def no_git(*arguments: str) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(gpu.settings, "_git", git)
    assert gpu.settings._commit() == commit
    own = ("benchmarks/common", "benchmarks/gpu/*.py", "benchmarks/training/*.py")
    assert asked[1][2:] == ("--", "src", "tests", *own)
    monkeypatch.setattr(gpu.settings, "_git", no_git)
    monkeypatch.setenv("WEFT_COMMIT", "def")
    assert gpu.settings._commit() == "def"


def test_a_training_step_that_fails_has_a_cause(monkeypatch: Patch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("step", GPU.parent / "training" / "step.py")
    assert spec is not None
    assert spec.loader is not None
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)
    script = tmp_path / "side.py"
    script.write_text("import sys; print('a warning', file=sys.stderr); sys.exit('ValueError: no compiler')")
    monkeypatch.setattr(step, "__file__", str(script))
    child = step.Child("levit", 1, "compiled", "bf16", False, Namespace(device="cpu", batch_size=2, threads=1))
    message = "compiled bf16 of levit's peer ended with exit code 1: ValueError: no compiler"
    with pytest.raises(RuntimeError, match=message):
        child.warm_up(1)
