"""README and docs are correct: commands, links, names, arguments and code blocks exist and run; the site builds."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import weft
from weft.cli.app import VERBS, commands, option_names, parse
from weft.models.building import FACTORY, switches

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = sorted(page for folder in (".", "docs", "benchmarks", "benchmarks/*") for page in ROOT.glob(f"{folder}/*.md"))
PROGRAMS = {"git", "cd", "pip", "uv", ".venv/bin/pre-commit", ".ci/run", "curl", "docker", "torchrun", "python"}
PROGRAMS |= {"serve", "sbatch"}
BASES = {"ceit": "ceit_tiny_patch16_224", "cvt": "cvt_13", "levit": "levit_128s"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    text = "\n".join(blocks(page.read_text(encoding="utf-8"), "sh")).replace("\\\n", " ")
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_every_command_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = [command for page in PAGES for command in commands_of(page)]
    assert {"make demo", "make test"} <= set(found)
    assert {command.split()[1] for command in found if command.startswith("weft ")} >= set(VERBS)
    for command in found:
        program, *arguments = shlex.split(command)
        if program == "weft":
            end = arguments.index(">") if ">" in arguments else len(arguments)
            parse(arguments[:end])  # raises UsageError with what is wrong
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), command
        else:
            assert program in PROGRAMS, f"what is {command}?"


def test_the_first_python_ends_in_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    first = blocks(README, "python")[0]
    expression, _, promised = first.strip().splitlines()[-1].partition("  # ")
    exec(first, {})
    assert capsys.readouterr().out.strip() == promised == "(1, 1000)"
    assert expression.startswith("print(")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_name_what_exists(page: Path) -> None:
    """Modules, names and keyword arguments of weft."""
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        tree = ast.parse(block)
        known: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "weft"]
                known |= {"weft": weft} if [importlib.import_module(name) for name in names] else {}
            elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "weft":
                module = importlib.import_module(str(node.module))
                known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (called := resolved(node.func, known)) is not None:
                parameters = inspect.signature(called).parameters.values()
                if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                    given = {keyword.arg for keyword in node.keywords} - {None}
                    assert given <= {parameter.name for parameter in parameters}, ast.unparse(node)


def resolved(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The object that an expression names, if it begins with a name of weft; else None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolved(node.value, known)) is not None:
        return getattr(owner, node.attr)
    return None


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-") for heading in headings)
    return {*slugs, *re.findall(r'<a (?:name|id)="([^"]+)"', text)}


def test_relative_links_lead_somewhere() -> None:
    texts = {page: re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in LINKED}
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = unquote(target).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            place = (page.parent / path).resolve() if path else page
            assert place.exists(), (page, target)
            assert not anchor or place not in texts or anchor in anchors(texts[place]), (page, target)


def test_the_container_runs_a_command_that_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    entry, command = (
        json.loads(re.search(rf"^{word} (\[.*\])$", text, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD")
    )
    program, *arguments = entry + command
    assert program == "weft"
    assert f"EXPOSE {parse(arguments)[1].arguments['settings'].port or 8000}" in text
    assert "USER 10001" in text  # no root
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(re.search(r"/weft\[(.*?)\]", text)[1].split(",")) <= set(project["optional-dependencies"])


# A component of CeiT is tested alone: the other two are off.
OFF = {
    "I2T": dict(leff_kernel=0, lca=False),
    "LeFF": dict(stem_convs=(), lca=False),
    "LCA": dict(stem_convs=(), leff_kernel=0),
}
ALL_OFF = dict(stem_convs=(), leff_kernel=0, lca=False)


@pytest.mark.parametrize(("page", "count"), [("ceit", 11), ("cvt", 9), ("levit", 7)])
def test_ablations_and_code_of_a_papers_page_are_built(page: str, count: int) -> None:
    def looks(**switches: object) -> tuple[str, dict[str, tuple[int, ...]]]:
        model = weft.create_model(BASES[page], **switches, device="meta").eval()
        assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)
        return str(model), {key: tuple(value.shape) for key, value in model.state_dict().items()}

    text, rows, component = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), 0, ""
    plain = {is_off: looks(**(ALL_OFF if is_off else {})) for is_off in (False, page == "ceit")}
    for line in text.partition("## The ablations")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        component = cells[0] or component
        if values := next((cell.strip("`") for cell in cells if cell.startswith("`") and "=" in cell), None):
            rows += 1
            given = OFF.get(component, {}) | eval(f"dict({values})")
            is_plain = given == (ALL_OFF if component in OFF else {})
            assert (looks(**given) == plain[component in OFF]) == is_plain, values
    assert rows == count
    found = blocks(text, "python")
    assert found
    for block in found:
        with torch.device("meta"):
            exec(block, {"weft": weft})


ARGUMENTS = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
PORTS = {
    "CeiT: CeiT-pytorch": "port_ceit_pytorch",
    "CvT: vit-pytorch": "port_vit_pytorch_cvt",
    "LeViT: vit-pytorch": "port_vit_pytorch_levit",
}


def rows_of(title: str) -> dict[str, str]:
    """Rows of a table of docs/arguments.md: what is named in the first column, and the last column."""
    rows: dict[str, str] = {}
    for line in ARGUMENTS.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            rows |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[2])
    return rows


@pytest.mark.parametrize("title", re.findall(r"^## (.+)$", ARGUMENTS, re.MULTILINE))
def test_every_argument_of_another_implementation_has_a_row(title: str) -> None:
    """Of the installed ones; what stands for it is an argument of weft."""
    rows, (family, _, library) = rows_of(title), title.partition(": ")
    names: set[str] = set()
    if library in ("timm", "vit-pytorch"):
        home = "timm.models.levit" if library == "timm" else f"vit_pytorch.{family.lower()}"
        network = "Levit" if library == "timm" else family
        names = set(inspect.signature(getattr(pytest.importorskip(home), network).__init__).parameters) - {"self"}
    elif library == "transformers":
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{family.capitalize()}Config")().to_dict()
        names = set(config) - set(transformers.PretrainedConfig().to_dict()) - {"model_type"}
    assert names <= set(rows), names - set(rows)
    known = {*switches(PORTS.get(title) or BASES[family.lower()]), *FACTORY, "drop_path_rate", "features_only", *rows}
    assert len(rows) >= 11
    for name, text in rows.items():
        assert text, name
        assert "**left out**" not in text.lower() or len(text) > 40, f"{name} is left out without a reason"
        named = {word for word in re.findall(r"`(\w+)(?:=[^`]*)?`", text) if "'" not in word}
        assert named <= known, (name, named - known)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """It has an entry for every public name and every option."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    ignored = shutil.ignore_patterns("_build", "_generated", "__pycache__")
    for name in ("docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    page = (site / "_generated" / "commands.html").read_text(encoding="utf-8")
    for command in commands():
        for option in option_names(command):
            assert f'id="cmdoption-weft-{command.replace(" ", "-")}-{option.strip("-")}"' in page, (command, option)
    index = (site / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{page.stem}.html"' in index for page in (ROOT / "docs").glob("*.md") if page.stem != "index")
    foreign = re.compile(r'(src|href)="(https?:)?//[^"]*\.(js|css)')
    assert not [page for page in site.rglob("*.html") if foreign.search(page.read_text(encoding="utf-8"))]

    pages = {page.stem: page.read_text(encoding="utf-8") for page in (site / "_generated" / "api").glob("*.html")}
    entries = set(re.findall(r'id="(weft\.[\w.]+)"', "".join(pages.values())))
    packages = {"weft", *(f"weft.{item.name}" for item in pkgutil.iter_modules(weft.__path__) if item.ispkg)}
    for package in packages - {"weft.cli"}:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            links = re.findall(rf'href="([^"]*)"[^>]*>\s*<code[^>]*><span class="pre">{name}<', pages[package])
            assert links, (package, name)
            assert links[0].partition("#")[2] in entries, (package, name)
