"""Every command that installs weft names weft: on PyPI, `weft` is another project."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft import errors
from weft.errors import DISTRIBUTION, UsageError, install_command, need

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile", "Dockerfile.runtime", "Makefile")
    ),
    ROOT / "requirements-runtime.txt",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
    *sorted(ROOT.glob("examples/*.*")),
]
COMMAND = re.compile(r"pip(?:3)? install ([^\n`]*)")
WORD = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s'\"]+")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<extras>[\w,-]+)\])?(?P<rest>.*)")


def commands() -> Iterator[tuple[str, str]]:
    """(where, arguments) of every `pip install` in a page or in a text of the source."""
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text()):
            yield str(page.relative_to(ROOT)), match[1]
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for match in COMMAND.finditer(node.value):
                    yield str(file.relative_to(ROOT)), match[1]


def test_there_are_some() -> None:
    found = list(commands())
    assert len(found) >= 8
    assert any(where == "README.md" for where, _ in found)


@pytest.mark.parametrize(("where", "arguments"), list(commands()))
def test_no_command_installs_another_project(where: str, arguments: str) -> None:
    for word in (quoted.strip("'\"") for quoted in WORD.findall(arguments.partition("#")[0])):
        is_path = word.startswith((".", "/", "-", "$")) or "{" in word or ".whl" in word
        found = REQUIREMENT.fullmatch(word)
        if found is None or not word.lower().startswith("weft"):
            assert not re.match(r"weft($|[\[=<>])", word), f"{where}: {word}"
            continue
        assert is_path or found["name"] == DISTRIBUTION, f"{where}: {word} is another project"
        for extra in filter(None, (found["extras"] or "").split(",")):
            assert extra in PROJECT["optional-dependencies"], f"{where}: {word} has no extra {extra}"


def test_names_in_prose() -> None:
    """An extra that is named without a command has the distribution's name as well."""
    for page in PAGES:
        wrong = re.findall(r"(?<![\w/-])weft\[[a-z,]+\]", page.read_text())
        assert not wrong, f"{page.name}: {wrong}"


def test_the_distribution_is_what_is_installed() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert importlib.metadata.version(DISTRIBUTION)
    assert importlib.metadata.requires(DISTRIBUTION)


def test_what_is_missing_is_installed_by_its_extra() -> None:
    need("deploy", "json")
    with pytest.raises(UsageError, match=r"no_such_thing is needed for this, .* pip install 'weft-vision\[deploy\]'"):
        need("deploy", "json", "no_such_thing")
    assert install_command("serve", "ray") == "pip install 'weft-vision[serve,ray]'"
    assert install_command() == "pip install weft-vision"


def test_without_torch_a_missing_package_is_installed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra would add torch, which such an installation was made without."""
    monkeypatch.setattr(errors, "is_installed", lambda package: package == "json")
    with pytest.raises(UsageError, match=r"Run: pip install onnxruntime$"):
        need("onnx", "json", "onnxruntime")


def test_extras_that_the_code_names_are_there() -> None:
    """`need("EXTRA", ...)` and `install_command("EXTRA")`, wherever they are called."""
    named = set()
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("need", "install_command"):
                names = node.args[:1] if getattr(node.func, "id", "") == "need" else node.args
                named |= {name.value for name in names if isinstance(name, ast.Constant)}
    assert {"deploy", "serve", "ray", "data", "track"} <= named
    assert named <= set(PROJECT["optional-dependencies"])
