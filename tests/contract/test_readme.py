"""README and docs are correct: Python blocks run, commands exist, model tables match `weft models`, links resolve."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.cli.app import VERBS, parse

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
ELSEWHERE = (
    "git",
    "cd",
    "pip",
    "uv",
    ".venv/bin/pre-commit",
    ".ci/run",
    "curl",
    "docker",
    "torchrun",
    "python",
    "serve",
    "sbatch",
)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines: list[str] = []
    for page in PAGES:
        for block in blocks((ROOT / page).read_text(encoding="utf-8"), "sh"):
            lines += [line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_there_are_commands_to_check() -> None:
    assert {"make demo", "make test"} <= set(commands())
    assert {command.split()[1] for command in commands() if command.startswith("weft ")} >= set(VERBS)


@pytest.mark.parametrize("command", commands())
def test_every_command_exists(command: str) -> None:
    arguments = shlex.split(command)
    if arguments[0] == "weft":
        end = arguments.index(">") if ">" in arguments else len(arguments)
        parse(arguments[1:end])  # raises UsageError where it does not fit
    elif arguments[0] == "make":
        assert re.search(rf"^{arguments[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    else:
        assert arguments[0] in ELSEWHERE, f"what is {arguments[0]}?"


def test_the_first_python_ends_in_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    first = blocks(README, "python")[0]
    expression, _, promised = first.strip().splitlines()[-1].partition("  # ")
    assert promised == "(1, 1000)"
    exec(first, {})
    assert capsys.readouterr().out.strip() == promised
    assert expression.startswith("print(")


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_name_what_exists(page: str) -> None:
    """Modules, names and keyword arguments of weft."""
    for block in blocks((ROOT / page).read_text(encoding="utf-8"), "python"):
        tree = ast.parse(block)
        known: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "weft"]
                modules = [importlib.import_module(name) for name in names]
                known |= {"weft": importlib.import_module("weft")} if modules else {}
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


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_container_runs_a_command_that_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    entry, command = (
        json.loads(re.search(rf"^{word} (\[.*\])$", text, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD")
    )
    program, verb, *arguments = entry + command
    assert program == "weft"
    _, bound = parse([verb, *arguments])
    assert f"EXPOSE {bound.arguments['settings'].port or 8000}" in text
    assert "USER 10001" in text  # no root
    assert set(re.search(r"/weft\[(.*?)\]", text)[1].split(",")) <= set(extras())


def extras() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["optional-dependencies"]
