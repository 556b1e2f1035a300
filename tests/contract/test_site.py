"""The documentation site builds without warnings, and has an entry for every public name and every verb."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import weft
from weft.cli.app import commands, option_names

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for folder in (".", "docs", "benchmarks", "benchmarks/*") for page in ROOT.glob(f"{folder}/*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a Markdown page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-") for heading in headings)
    return {*slugs, *re.findall(r'<a (?:name|id)="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = unquote(target).partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), target


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "benchmarks", "examples"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_build", "_generated", "__pycache__")
        )
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert not missing_names(site)
    page = (site / "_generated" / "commands.html").read_text(encoding="utf-8")
    for command in commands():
        for option in option_names(command):
            assert f'id="cmdoption-weft-{command.replace(" ", "-")}-{option.strip("-")}"' in page, (command, option)
    index = (site / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{page.stem}.html"' in index for page in (ROOT / "docs").glob("*.md") if page.stem != "index")
    assert not [
        page for page in site.rglob("*.html") if re.search(r'(src|href)="(https?:)?//[^"]*\.(js|css)', page.read_text())
    ]


def missing_names(site: Path) -> list[str]:
    """Return the public names without an entry, and those that the page of their package does not list."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (site / "_generated" / "api").glob("*.html")}
    entries = set(re.findall(r'id="(weft\.[\w.]+)"', "".join(pages.values())))
    missing = []
    for package in ("weft", *(f"weft.{item.name}" for item in pkgutil.iter_modules(weft.__path__) if item.ispkg)):
        for name in getattr(importlib.import_module(package), "__all__", ()) if package != "weft.cli" else ():
            links = re.findall(rf'href="([^"]*)"[^>]*>\s*<code[^>]*><span class="pre">{name}<', pages[package])
            if not links or links[0].partition("#")[2] not in entries:
                missing.append(f"{package}.{name}")
    return missing
