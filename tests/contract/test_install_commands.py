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
from weft.errors import DISTRIBUTION, RUNTIME_DISTRIBUTION, RUNTIME_EXTRAS, UsageError, install_command, need

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile", "Dockerfile.runtime", "Makefile")
    ),
    ROOT / "packaging" / "runtime" / "README.md",
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
        assert is_path or found["name"] in (DISTRIBUTION, RUNTIME_DISTRIBUTION), f"{where}: {word} is another project"
        extras = RUNTIME_EXTRAS if found["name"] == RUNTIME_DISTRIBUTION else PROJECT["optional-dependencies"]
        for extra in filter(None, (found["extras"] or "").split(",")):
            assert extra in extras, f"{where}: {word} has no extra {extra}"


def test_names_in_prose() -> None:
    """An extra that is named without a command has the distribution's name as well."""
    for page in PAGES:
        wrong = re.findall(r"(?<![\w/-])weft\[[a-z,]+\]", page.read_text())
        assert not wrong, f"{page.name}: {wrong}"


def test_the_distribution_is_what_is_installed() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert importlib.metadata.version(DISTRIBUTION)
    assert importlib.metadata.requires(DISTRIBUTION)


def test_what_is_missing_is_installed_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    need("deploy", "json")
    with pytest.raises(UsageError, match=r"no_such_thing is needed for this, .* pip install 'weft-vision\[deploy\]'"):
        need("deploy", "json", "no_such_thing")
    assert install_command("serve,ray") == "pip install 'weft-vision[serve,ray]'"
    assert install_command("torch") == "pip install weft-vision"
    assert errors.DISTRIBUTION == "weft-vision"
    monkeypatch.setattr(errors, "distribution", lambda: RUNTIME_DISTRIBUTION)
    assert install_command("openvino") == "pip install 'weft-vision-runtime[openvino]'"
    assert install_command("torch") == "pip install 'weft-vision-runtime[torch]'"
    assert install_command("deploy").endswith("; pip install 'weft-vision[deploy]'")


def test_extras_that_the_code_names_are_there() -> None:
    """`need("EXTRA", ...)` and `install_command("EXTRA")`, wherever they are called."""
    named = set()
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("need", "install_command"):
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    named |= set(first.value.split(","))
    assert {"deploy", "serve", "ray", "data", "track"} <= named
    assert named <= set(PROJECT["optional-dependencies"])
