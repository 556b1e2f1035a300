"""What the pages say of speed is what was measured: their tables are made from the CSV, and every file is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from weft.bench.records import filled, read_csv

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


@pytest.mark.parametrize("number", range(5))
def test_the_tables_are_the_measurements(number: int, figures: ModuleType) -> None:
    page, name, source, made = figures.TABLES[number]
    assert filled(page.read_text(), name)[1] == made(read_csv(SPEED / source))


def test_the_tables_of_studies_are_their_results() -> None:
    tables = script(ROOT / "benchmarks" / "studies" / "tables.py")
    assert "ceit-convergence" in tables.studies()
    for name, made in tables.TABLES:
        assert filled(tables.PAGE.read_text(), name)[1] == made()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    scripts = re.findall(r"(?<![\w/.])(?:benchmarks|docs)/[\w/.-]+\.(?:csv|py|md|png)", page.read_text())
    for place in [*(page.parent / link for link in links if link), *(ROOT / script for script in scripts)]:
        assert place.exists(), place
