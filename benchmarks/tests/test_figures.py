"""What the pages say of speed is what was measured: their tables are made from the CSV, and every file is there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.common.records import filled, read_csv, replace_rows, write_csv
from benchmarks.speed.plot import _panels, plot_speed
from PIL import Image

from weft.bench.worker_process import WorkerProcess
from weft.errors import UsageError
from weft.machine import processor
from weft.study.plan import read_study

ROOT = Path(__file__).parents[2]
SPEED = ROOT / "benchmarks" / "speed"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("README.md")])


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script(SPEED / "figures.py")


@pytest.fixture
def studies() -> ModuleType:
    return script(ROOT / "benchmarks" / "studies" / "tables.py")


def test_the_tables_are_the_measurements(figures: ModuleType, studies: ModuleType) -> None:
    starts = script(ROOT / "benchmarks" / "deploy" / "cold_start.py")
    tables = [*figures.tables(), (starts.README, "deployments", starts.table(read_csv(starts.FILE)))]
    tables += [(studies.PAGE, name, made()) for name, made in studies.TABLES]
    assert len(tables) >= 8
    assert "ceit-convergence" in studies.studies()
    for page, name, text in tables:
        assert filled(page.read_text(), name)[1] == text, f"{page}: {name}"


def test_what_a_page_names_is_there() -> None:
    for page in PAGES:
        text = page.read_text()
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        scripts = re.findall(r"(?<![\w/.])(?:benchmarks|docs)/[\w/.-]+\.(?:csv|py|md|png)", text)
        for place in [*(page.parent / link for link in links if link), *(ROOT / name for name in scripts)]:
            assert place.exists(), (page, place)


def test_a_new_class_gets_a_section(figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After those of other classes. A class that has one gets the tables that it lacks."""
    here = tmp_path / "benchmarks" / "speed"
    shutil.copytree(SPEED, here)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "benchmarks" / "README.md", here.parent)
    shutil.copytree(ROOT / "benchmarks" / "training", here.parent / "training")
    for name in ("neon", "avx512_bf16_vnni"):
        (here / name).mkdir(exist_ok=True)
        shutil.copy(SPEED / "avx512_vnni" / "figures.csv", here / name)
    monkeypatch.setattr(figures, "HERE", here)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--tables"])
    figures.main()
    page = (here / "README.md").read_text()
    for file, name, text in figures.tables():
        assert filled(file.read_text(), name)[1] == text, name
    parts = page.split("\n## ")
    sections = {found[1]: part for part in parts if (found := re.match(r".*\(`(\w+)/machine.json`\)", part))}
    assert list(sections)[-1] == "neon"
    assert set(sections) == {folder.name for folder in figures.measured_folders()}
    for name in ("neon", "avx512_bf16_vnni"):
        assert f"<!-- end {name} allocators -->" in sections[name]
        assert f"<!-- end {name} targets -->" in sections[name]
    assert "<details><summary>All measurements</summary>\n\n<!-- begin neon -->\n| model |" in sections["neon"]
    assert "\n\n\n" not in page
    figures.main()
    assert (here / "README.md").read_text() == page


def test_rows_of_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    old = {"processor_class": "amx", "model": "a", "ms": "1"}
    replace_rows(file, [old, old | {"processor_class": "avx2"}])
    replace_rows(file, [{"processor_class": "avx2", "model": "a", "ms": 2}, {"processor_class": "avx2", "ms": 3}])
    assert [row["ms"] for row in read_csv(file)] == ["1", "2", "3"]
    for milliseconds in (4, 5):  # old rows name no runtime
        row = {"processor_class": "avx2", "runtime": "onnx", "ms": milliseconds}
        replace_rows(file, [row], ("processor_class", "runtime"))
    assert [row["ms"] for row in read_csv(file)] == ["1", "2", "3", "5"]


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise ValueError("no text")

    write_csv(tmp_path / "a.csv", [{"a": 1}, {"b": 2}])
    with pytest.raises(ValueError, match="no text"):
        write_csv(tmp_path / "a.csv", [{"a": 2}, {"a": Unwritable()}])
    assert read_csv(tmp_path / "a.csv") == [{"a": "1", "b": ""}, {"a": "", "b": "2"}]


def test_classes_are_named_and_lack_what_they_cannot_run(figures: ModuleType) -> None:
    named = {name for name in figures.CLASSES if not name.endswith("_emulated")}
    assert named == {"unknown", *(name for name, _ in processor._CLASSES)}
    row = {"model": "levit_256", "batch_size": "1", "way": "openvino"}
    rows = [
        row | {"precision": "fp32", "processor_class": "amx", "images_per_second": "104"},
        row | {"precision": "bf16", "processor_class": "amx", "images_per_second": "300"},
        row | {"precision": "fp32", "processor_class": "avx2", "images_per_second": "54"},
    ]
    lines = figures.runtimes(rows).splitlines()
    assert lines[2:] == ["| AMX | levit_256 | 1 | 104 | 300 |", "| AVX2 | levit_256 | 1 | 54 | - |"]


def test_ratios_are_of_equal_settings(figures: ModuleType) -> None:
    """A row of weft is compared with the peer's row under the same allocator, never with another."""
    row = {"run": "m", "model": "m", "batch_size": "1", "precision": "fp32", "peak_percent": "", "difference": ""}
    row |= {"threads": "2", "way": "eager", "p95_ms": "1"}
    measured = (("m", "default", "10"), ("m", "keep", "30"), ("timm m", "default", "5"), ("timm m", "keep", "20"))
    rows = [
        {**row, "model": model, "allocator": allocator, "images_per_second": speed}
        for model, allocator, speed in measured
    ]
    rows += [{**row, "allocator": "default", "images_per_second": "99", "threads": "1"}]
    shown = [line.split(" | ")[5] for line in figures.table(rows).splitlines()[2:]]
    assert shown == ["2.00", "1.50", "1.00", "1.00"]
    cells = [line.split(" | ")[1:5] for line in figures.targets(rows).splitlines()[2:]]
    assert cells == [["1", "2", "**2.00**, **1.50**", "-, -"], ["1", "1", "-", "-"]]
    for folder in figures.measured_folders():
        for case in figures.cases(read_csv(folder / "figures.csv")):
            settings = [
                {(r["way"], r["precision"], r["allocator"]) for r in case.rows if (r["model"] == case.run) == own}
                for own in (True, False)
            ]
            ours, theirs = ({key for key in keys if key[0] == "eager"} for keys in settings)
            assert not ours or ours == theirs, (folder, case.run)


@pytest.mark.parametrize(
    ("own", "peer", "peak", "shown"),
    [("11", "10", "50", "**1.10** (50 %)"), ("10", "10", "89", "1.00 (89 %)"), ("9", "10", "90", "**0.90** (90 %)")],
)
def test_a_target_is_reached_by_the_ratio_or_near_the_peak(figures, own, peer, peak, shown):
    rows = [{"images_per_second": speed, "peak_percent": peak} for speed in (own, peer)]
    assert figures._reached(*rows, figures.BEST) == shown
    assert figures._reached(None, rows[1], figures.BEST) == "-"


def test_variants_that_share_a_run_cost_one(studies, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "HERE", tmp_path)
    study = read_study("resolution")
    variants = study.at_scale("small")  # three runs of eight epochs, four variants each
    rows = [{"study": study.name, "variant": variant.name, "seconds_per_1000": 3} for variant in variants]
    write_csv(tmp_path / "costs.csv", rows)
    hours = 3 * 3 * 8 * 50 * 3 / 3600
    assert studies._missing(study, variants, (), True) == f"`weft study resolution`: {hours:.1f} hours of one core"
    text = studies._missing(study, variants[1:], {variants[0].name}, False)
    assert text.endswith(f": {2 / 3 * hours:.1f} hours of one core")


def test_a_picture_has_a_panel_per_batch_size(tmp_path: Path) -> None:
    row = {"model": "levit_nano_32", "way": "eager", "precision": "fp32", "batch_size": "1"}
    row |= {"macs": "1000", "images_per_second": "111"}
    rows = [row, row | {"way": "folded"}, row | {"batch_size": "16"}]
    assert [len(panel) for panel in _panels(rows).values()] == [2, 1]
    plot_speed(rows, tmp_path / "speed.png")
    with Image.open(tmp_path / "speed.png") as picture:
        assert picture.width > 600


@pytest.mark.parametrize(("seconds", "count"), [(19.0, 1), (0.9, 3), (0.05, 10)])
def test_the_peak_is_measured_for_two_seconds(figures, seconds, count, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(figures, "_timed", lambda call: calls.append(call) or seconds)
    assert figures.matrix_peak("bf16") == pytest.approx(2048**3 / seconds)
    assert len(calls) == count


@pytest.mark.nightly
@pytest.mark.slow
def test_peers_have_the_same_weights_and_one_that_fails_is_left_out(figures, monkeypatch):
    options = dict(ways=["eager"], allocators=["default"], threads=1, rounds=1, batch_sizes=[1])
    rows = figures.speed("levit_128s", "fp32", **options)
    assert [row["model"] for row in rows] == ["levit_128s", "timm levit_128s"]
    assert all(row["difference"] < 1e-5 and row["peak_percent"] > 0 for row in rows)
    build = WorkerProcess.build

    def build_ours(worker: WorkerProcess) -> None:
        if worker.label != worker.model:
            raise UsageError("It does not run.")
        build(worker)

    monkeypatch.setattr(WorkerProcess, "build", build_ours)
    with pytest.warns(UserWarning, match=r"One way of a peer is left out\. It does not run\."):
        rows = figures.speed("levit_128s", "fp32", **options)
    assert [row["model"] for row in rows] == ["levit_128s"]
