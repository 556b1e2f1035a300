"""What the pages say of speed is what was measured: their tables are made from the CSV, and every file is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SPEED = ROOT / "benchmarks" / "speed"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("README.md")])


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", SPEED / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "made"), [(SPEED / "README.md", "table"), (ROOT / "README.md", "summary")])
def test_the_tables_are_the_measurements(page: Path, made: str, figures: ModuleType) -> None:
    _, _, rest = page.read_text().partition(figures.BEGIN)
    table = getattr(figures, made)(figures.read(SPEED / "figures.csv"))
    assert rest.partition(figures.END)[0].strip() == table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    scripts = re.findall(r"(?<![\w/.])(?:benchmarks|docs)/[\w/.-]+\.(?:csv|py|md|png)", page.read_text())
    for place in [*(page.parent / link for link in links if link), *(ROOT / script for script in scripts)]:
        assert place.exists(), place
