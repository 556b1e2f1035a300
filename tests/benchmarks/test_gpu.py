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
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmarks.common.records import read_csv, write_csv

from weft.errors import CheckpointError
from weft.machine.memory import is_out_of_memory
from weft.machine.system import is_alive
from weft.recipes.fields import seconds_of
from weft.runs.directory import EpochRow, write_metrics

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
NAMES = ("settings", "cells", "report", "run", "parts")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts, imported as `python benchmarks/gpu/run.py` does."""
    monkeypatch.syspath_prepend(str(GPU))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in NAMES}


def speed_row(side: str, way: str, value: str, **more: str) -> dict[str, str]:
    row = {"run": "m", "side": side, "model": "m" if side == "weft" else "timm m", "way": way, "precision": "bf16"}
    row |= {"batch_size": "16", "images_per_second": value, "error": "" if value else "no"}
    return row | {"device": "a GPU", "torch": "2.11.0", "commit": "abc"} | more


def test_without_a_gpu_it_says_how_to_rehearse(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    assert modules["run"].main() == 2
    assert "no CUDA device" in (output := capsys.readouterr().out)
    assert output.rstrip().endswith("make gpu DEVICE=cpu SCALE=small")
    assert not (tmp_path / "out").exists()


def test_the_parts_are_those_of_the_command(modules: dict[str, ModuleType]) -> None:
    assert set(modules["cells"].CELLS) == set(modules["parts"].MEASURES)
    for scale, device in product(modules["settings"].SCALES, ("cuda", "cpu")):
        options = modules["settings"].Options(device, scale, GPU, None, 100)
        for name, cells in modules["cells"].CELLS.items():
            assert cells(options), name


def test_a_rehearsal_reaches_the_code_of_a_gpu(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells, settings, done = modules["cells"], modules["settings"], set[tuple[str, ...]]()
    monkeypatch.setattr(modules["parts"], "_speed", lambda cell, ways, *_, **__: done.update((cell, w) for w in ways))
    rehearsal = settings.Options("cpu", "small", tmp_path, None, 100)
    for part in ("compile", "speed", "other_ways"):
        for cell in cells.CELLS[part](rehearsal):
            if not cell.startswith("steps"):
                modules["parts"].MEASURES[part](cell, rehearsal)
    full = settings.SCALES["full"]
    assert {way for _, way in done} == {*full.ways, *full.other_ways}
    assert ("ceit_tiny_patch16_224 bf16", "folded") in done
    assert len({cell.partition("_")[0] for cell, _ in done}) == 3  # the families
    assert len({cell for cell, way in done if way in cells.COMPILED}) == 1  # minutes of a compiler
    assert any(" compiled " in cell for cell in cells.steps_cells(rehearsal))


def test_variants_replace_what_folded_networks_use(modules: dict[str, ModuleType]) -> None:
    parts = modules["parts"]
    for _, replacements in parts.VARIANTS.values():
        before = [getattr(module, name) for module, name, _ in replacements]  # of another name: an AttributeError
        with parts.replaced(replacements):
            assert all(getattr(module, name) is value for module, name, value in replacements)
        assert [getattr(module, name) for module, name, _ in replacements] == before


def test_a_call_continues_and_a_failure_does_not_stop_it(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = modules["run"]
    measured: list[str] = []

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        measured.append(cell)
        return {"good": ([{"cell": "good"}], None), "bad": (None, "exit code 1: no"), "long": (None, None)}[cell]

    monkeypatch.setattr(run.Session, "_child", child)
    monkeypatch.setitem(run.CELLS, "loop", lambda options: ["good", "bad", "long"])
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    assert run.Session(options, ["loop"], False).work() == 3
    assert run.Session(options, ["loop"], False).work() == 3
    assert measured == ["good", "bad", "long", "long"]
    run.Session(options, ["loop"], True).work()
    assert measured[4:] == ["bad", "long"]
    assert [row["cell"] for row in read_csv(tmp_path / "loop.csv")] == ["good"]
    assert {"device", "torch", "cuda", "commit"} <= read_csv(tmp_path / "loop.csv")[0].keys()
    assert [row["error"] for row in read_csv(tmp_path / "failures.csv")] == ["failed: exit code 1: no"]
    assert json.loads((tmp_path / "state.json").read_text())[options.setup]["loop"]["good"] == "done"
    page = (tmp_path / "README.md").read_text()
    assert "exit code 1: no" in page
    assert "\n\n## Open\n\n" in page
    assert f"\n\n{options.setup}:\n\n| part | not measured | failed or partial |" in page
    assert "\n| loop | long | bad |\n" in page


def use(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    """Measure as if with another version of PyTorch."""
    where = {**modules["settings"].machine("cpu"), "torch": torch}
    for name in ("settings", "run"):
        monkeypatch.setattr(modules[name], "machine", lambda device: where)


def test_another_version_of_torch_is_measured_anew(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, results = modules["run"], {"one": ([{"value": 1}], None)}
    monkeypatch.setattr(run.Session, "_child", lambda self, part, cell: results[cell])
    monkeypatch.setitem(run.CELLS, "loop", lambda options: ["one"])
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    for version, result, code in (("2.10", ([{"value": 1}], None), 0), ("2.11", (None, "no"), 1)):
        use(modules, monkeypatch, version)
        results["one"] = result
        assert run.Session(options, ["loop"]).work() == code
    assert [(row["torch"], row["value"]) for row in read_csv(tmp_path / "loop.csv")] == [("2.10", "1")]
    use(modules, monkeypatch, "2.10")
    assert run.Session(options, ["loop"]).work() == 0  # of this version, nothing failed
    assert [row["torch"] for row in read_csv(tmp_path / "failures.csv")] == ["2.11"]
    (tmp_path / "state.json").unlink()
    assert run.Session(options, ["loop"]).work() == 1
    assert not (tmp_path / "loop.csv").exists()  # the rows of a cell that fails are removed
    results["one"] = ([{"value": 1}], None)
    use(modules, monkeypatch, "2.11")
    assert run.Session(options, ["loop"], retry=True).work() == 0
    assert [row["torch"] for row in read_csv(tmp_path / "failures.csv")] == ["2.10"]


def test_a_cell_with_an_error_in_a_row_is_partial(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, error = modules["run"], ["no compiler"]
    monkeypatch.setitem(run.CELLS, "speed", lambda options: ["one"])
    monkeypatch.setattr(
        run.Session, "_child", lambda *_: ([speed_row("weft", "eager", "9"), {"error": error[0]}], None)
    )
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    assert run.Session(options, ["speed"]).work() == 1
    assert run.Session(options, ["speed"]).state["speed"] == {"one": "partial: no compiler"}
    assert len(read_csv(tmp_path / "speed.csv")) == 2
    error[0] = ""
    assert run.Session(options, ["speed"]).work() == 1
    assert run.Session(options, ["speed"], retry=True).work() == 0


def test_networks_are_compiled_for_open_cells_on_each_machine(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, measured = modules["run"], []

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        measured.append(part)
        run._result_file(options, part, cell).touch()
        return ([], None) if part == "compile" else ([{"value": 1}], None)

    monkeypatch.setattr(run.Session, "_child", child)
    monkeypatch.setitem(run.CELLS, "compile", lambda options: ["speed one"])
    monkeypatch.setitem(run.CELLS, "speed", lambda options: ["one"])
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    for _ in range(2):
        assert run.Session(options, ["compile"]).work() == 0
    assert measured == ["compile"]
    shutil.rmtree(options.scratch)  # another machine
    assert run.Session(options, ["compile", "speed"]).work() == 0
    shutil.rmtree(options.scratch)
    assert run.Session(options, ["compile", "speed"]).work() == 0
    assert measured == ["compile", "compile", "speed"]


def test_a_run_is_resumed_only_if_it_is_in_progress(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, seen = modules["run"], []
    options = modules["settings"].Options("cpu", "small", tmp_path, tmp_path, 130)
    file = options.scratch / "cifar10" / "state" / "step-0000000001.safetensors"

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        seen.append(file.exists())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return None, None

    monkeypatch.setattr(run.Session, "_child", child)
    for _ in range(2):
        assert run.Session(options, ["cifar10"]).work() == 3
    (tmp_path / "state.json").unlink()
    assert run.Session(replace(options, seconds=110), ["cifar10"]).work() == 3  # too short to save a state
    assert run.Session(options, ["cifar10"]).work() == 3
    assert seen == [False, True, False]
    assert run.Session(replace(options, cifar10=None), ["cifar10"]).work() == 0
    assert "cifar10 is left out: set CIFAR10=FOLDER" in capsys.readouterr().out
    assert not (tmp_path / "failures.csv").exists()


def test_a_cell_that_is_measured_twice_has_its_rows_once(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """As after a kill between the rows and the note that the cell is done."""
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    other = {**modules["settings"].machine("cpu"), "device": "GPU"}
    write_csv(tmp_path / "loop.csv", [{"cell": "one", "value": 0, **other}])
    for value in (1, 2):
        modules["run"].Session(options, ["loop"])._replace_rows("loop", "one", [{"value": value}])
    modules["run"].Session(options, ["loop"])._replace_rows("loop", "two", [{"value": 3}])
    rows = read_csv(tmp_path / "loop.csv")
    assert [(row["cell"], row["device"], row["value"]) for row in rows] == [
        ("one", "GPU", "0"),
        ("one", "cpu", "2"),
        ("two", "cpu", "3"),
    ]


def test_a_damaged_state_is_a_sentence(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text('{"loop": {"one": "do')
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--scale", "small", "--out", str(tmp_path)])
    assert modules["run"].main() == CheckpointError.exit_code
    assert "state.json must be JSON;" in (output := capsys.readouterr().out)
    assert output.endswith("Restore it, or delete it to measure all cells again.\n")


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise ValueError("no text")

    write_csv(tmp_path / "a.csv", [{"a": 1}])
    with pytest.raises(ValueError, match="no text"):
        write_csv(tmp_path / "a.csv", [{"a": 2}, {"a": Unwritable()}])
    assert read_csv(tmp_path / "a.csv") == [{"a": "1"}]


def test_a_new_column_is_empty_in_old_rows(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"a": 1}, {"b": 2}])
    assert read_csv(tmp_path / "a.csv") == [{"a": "1", "b": ""}, {"a": "", "b": "2"}]


def test_a_stop_while_models_build_kills_their_processes(modules: dict[str, ModuleType]) -> None:
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
        modules["parts"]._at_once(build, [first, second])
    assert killed.is_set()


def stub_run(parts: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int | None, out: Path, file: str = "") -> None:
    """Replace processes by one that writes the metrics of a run, and another file, and ends with a code."""

    def run(arguments: list[str], log: Path, seconds: float | None = None) -> int | None:
        (out / "state").mkdir(parents=True, exist_ok=True)
        (out / "state" / "step-0000000001.safetensors").touch()
        write_metrics(out / "metrics.csv", [EpochRow(1, 4, 0.1, 2.0, 20.0, 2.0, 20.0, 50.0, 123.0, 7.5, 9.0)])
        if file:
            (out.parent / file).write_text('<testsuite><testcase name="one"/></testsuite>')
        log.write_text("weft: the last line")
        return code

    monkeypatch.setattr(parts, "run", run)


def test_cells_without_timings_run_at_the_same_time_and_stop_together(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, both = modules["run"], threading.Barrier(2, timeout=60)
    monkeypatch.setitem(run.AT_ONCE, "resume", 2)

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        both.wait()  # ends when two cells are here
        return [{"value": cell}], None

    monkeypatch.setattr(run.Session, "_child", child)
    monkeypatch.setitem(run.CELLS, "resume", lambda options: ["one fp32", "two fp32", "three bf16"])
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    assert run.Session(options, ["resume"], only=["fp32"]).work() == 0
    assert {row["cell"] for row in read_csv(tmp_path / "resume.csv")} == {"one fp32", "two fp32"}


def test_the_time_limit_of_a_run_is_a_duration(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, commands = modules["parts"], []
    monkeypatch.setattr(parts, "run", lambda arguments, *_: commands.append(arguments))
    for seconds in (45, 133.4):
        options = modules["settings"].Options("cpu", "small", tmp_path / "out", tmp_path, seconds)
        (options.scratch / "cifar10" / "state").mkdir(parents=True, exist_ok=True)
        (options.scratch / "cifar10" / "state" / "step-0000000001.safetensors").touch()
        assert parts.cifar10("cifar10", options) is None
    assert [seconds_of(command[command.index("--max-time") + 1], "--max-time") for command in commands] == [30, 73]


def test_the_columns_of_a_run_are_read_under_their_names(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, options = modules["parts"], modules["settings"].Options("cpu", "small", tmp_path, tmp_path, 100)
    assert {*parts.LOOP_COLUMNS, *parts.CIFAR10_COLUMNS} <= set(EpochRow._fields)
    stub_run(parts, monkeypatch, 0, options.scratch / "loop")
    (row,) = parts.loop("levit_nano_32 fp32 half", options)
    assert (row["images_per_second"], row["data_wait"]) == ("123", "7.5")
    stub_run(parts, monkeypatch, 0, options.scratch / "cifar10")
    assert parts.cifar10("cifar10", options)[0]["data_wait"] == "7.5"


def test_a_resumed_run_that_fails_is_a_failure(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, options = modules["parts"], modules["settings"].Options("cpu", "small", tmp_path, tmp_path, 100)
    for code in (None, 143):  # killed, or stopped by --max-time
        stub_run(parts, monkeypatch, code, options.scratch / "cifar10")
        assert parts.cifar10("cifar10", options) is None
    stub_run(parts, monkeypatch, 4, options.scratch / "cifar10")
    with pytest.raises(RuntimeError, match="exit code 4: weft: the last line"):
        parts.cifar10("cifar10", options)


def test_a_run_without_a_saved_state_is_not_finished(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, options = modules["parts"], modules["settings"].Options("cpu", "small", tmp_path, tmp_path, 100)
    monkeypatch.setattr(parts, "run", lambda *_: None)
    assert parts.cifar10("cifar10", options) is None


def test_tests_that_did_not_end_have_no_results(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, options = modules["parts"], modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    monkeypatch.setenv("WEFT_TEST_DEVICE", "cpu")
    stub_run(parts, monkeypatch, 1, options.scratch / "out", "tests.xml")
    assert [row["result"] for row in parts.tests("tests/gpu", options)] == ["passed"]
    stub_run(parts, monkeypatch, 0, options.scratch / "out")  # writes no report: that of the call before is there
    with pytest.raises(RuntimeError, match="the last line"):
        parts.tests("tests/gpu", options)
    stub_run(parts, monkeypatch, 5, options.scratch / "out", "tests.xml")  # pytest found no tests
    with pytest.raises(RuntimeError, match="exit code 5"):
        parts.tests("tests/gpu", options)


def test_a_cell_without_time_is_left(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = modules["run"]
    options = modules["settings"].Options("cpu", "small", tmp_path, None, run.LEAST - 1)
    assert run.Session(options, ["loop", "speed"]).work() == 3
    assert not list(tmp_path.glob("*.*"))


def test_no_cell_is_started_in_less_time_than_another_took(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, measured, now = modules["run"], [], [0.0]

    def child(self: object, part: str, cell: str) -> tuple[object, str | None]:
        measured.append(cell)
        now[0] += 40
        return [{"value": cell}], None

    monkeypatch.setattr(run.Session, "_child", child)
    monkeypatch.setitem(run.CELLS, "loop", lambda options: ["one", "two", "three"])
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 110)
    assert run.Session(options, ["loop"]).work() == 3  # the third would have 30 seconds
    assert measured == ["one", "two"]


def test_a_rehearsal_leaves_the_measurements_alone(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options = modules["run"], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(run.Session, "__init__", lambda self, given, *_: options.append(given))
    monkeypatch.setattr(run.Session, "work", lambda self: 0)
    for arguments in ([], ["--scale", "small"], ["--device", "cpu"]):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        assert run.main() == 0
    assert [given.out == GPU for given in options] == [True, False, False]
    assert len({given.scratch for given in options}) == 3


def test_a_cell_ends_with_what_it_started(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """A process of a cell has a group of its own, which a signal to the group of the cell does not reach."""
    file, log = tmp_path / "pid", tmp_path / "log"
    inner = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    cell = f"""
import pathlib, signal, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # saves seconds
sys.path.insert(0, {str(GPU)!r})
from settings import run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run(["-c", {inner!r}], pathlib.Path({str(log)!r}))
"""
    assert modules["settings"].run(["-c", cell], tmp_path / "cell.log", 5, grace=5) is None
    pid = int(file.read_text())
    while is_alive(pid):
        time.sleep(0.01)


def test_the_rows_of_a_gpu_appear_once_they_are_measured(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    assert modules["report"].gpu_rows(tmp_path) == ""
    rows = [("weft", "eager", "90"), ("weft", "graphed", "400"), ("peer", "eager", "100"), ("peer", "graphed", "320")]
    write_csv(tmp_path / "speed.csv", [*(speed_row(*row) for row in rows), speed_row("peer", "folded", "")])
    *_, absent, row, _, failed, rest = modules["report"].gpu_rows(tmp_path).splitlines()
    assert row == "| a GPU | m | 16 | bf16 | 320 (timm, graphed) | 0.90 | 1.25 | 400, graphed |"
    assert absent == "| a GPU | cvt_13 | 256 | bf16 | - | - | - | - |"
    assert failed == "Failed: folded bf16 of the peer of m."
    assert rest == "Not measured on a GPU: fp32, tf32, compiled, aotinductor."


def test_ratios_are_of_rows_of_one_call(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    sides = (("weft", "200"), ("peer", "100"))
    write_csv(tmp_path / "speed.csv", [speed_row(side, "eager", value) for side, value in sides])
    others = [speed_row(side, "compiled", value, commit="def") for side, value in (("weft", "330"), ("peer", "300"))]
    write_csv(tmp_path / "other_ways.csv", others)
    rows = [line for line in modules["report"].gpu_rows(tmp_path).splitlines() if "| m |" in line]
    assert rows == [
        "| a GPU | abc | m | 16 | bf16 | 100 (timm, eager) | 2.00 | 2.00 | 200, eager |",
        "| a GPU | def | m | 16 | bf16 | 300 (timm, compiled) | - | 1.10 | 330, compiled |",
    ]


def test_a_table_of_several_machines_has_their_columns(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options, where = modules["settings"].Options("cpu", "small", tmp_path, None, 100), dict[str, str]()
    where = dict.fromkeys(modules["settings"].MACHINE, "") | {"device": "a GPU"}
    rows = [{"cell": "c", "test": "t", "result": "passed", "message": "", **where, "torch": v} for v in ("1", "2")]
    write_csv(tmp_path / "tests.csv", rows)
    text = modules["report"].page(options)
    assert "\n\ndevice a GPU.\n\n| test | result | message | torch |\n" in text
    assert "| 1 passed |  |  | 1 |\n| 1 passed |  |  | 2 |\n" in text


def test_the_committed_state_has_rows(modules: dict[str, ModuleType]) -> None:
    for setup, parts in modules["settings"].read_state(GPU).items():
        for part, cells in parts.items():
            rows = read_csv(GPU / f"{part}.csv")
            setups = {(row["cell"], f"{row['device']}, torch {row['torch']}") for row in rows}
            assert {(cell, setup) for cell, result in cells.items() if result == "done" and part != "compile"} <= setups


def test_the_tables_are_written_without_matplotlib(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[Path] = []
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "benchmarks.speed.plot", raising=False)
    monkeypatch.setattr(modules["report"], "write_file", lambda file, text: written.append(file))
    (tmp_path / "loop.csv").write_text("cell\n")
    options = modules["settings"].Options("cpu", "small", tmp_path, None, 100)
    modules["report"].write_pages(options, publish=True)
    assert written == [tmp_path / "README.md", GPU.parents[1] / "README.md"]


@pytest.mark.parametrize(("changed", "commit"), [("", "abc"), (" M src/weft/grid.py", "abc-dirty")])
def test_a_commit_is_changed_by_sources_alone(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, changed: str, commit: str
) -> None:
    settings, asked = modules["settings"], []

    def git(*arguments: str) -> str:
        asked.append(arguments)
        return "abc" if arguments[0] == "describe" else changed

    monkeypatch.setattr(settings, "_git", git)
    assert settings._commit() == commit
    assert asked[1][2:] == (
        "--",
        "src",
        "tests",
        "benchmarks/common",
        "benchmarks/gpu/*.py",
        "benchmarks/training/*.py",
    )

    def no_git(*arguments: str) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(settings, "_git", no_git)
    monkeypatch.setenv("WEFT_COMMIT", "def")
    assert settings._commit() == "def"


def test_a_training_step_that_fails_has_a_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_a_gpu(text: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == expected
