"""Text files are read and written in UTF-8 on every system: the default of Windows is another encoding."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"


def test_open_names_an_encoding() -> None:
    """By a rule of ruff, which is not stable yet: it would change other rules if pyproject.toml selected it."""
    rule = ["--isolated", "--preview", "--select", "PLW1514", "--output-format", "concise"]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *rule, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def calls_without_encoding(code: str) -> list[int]:
    """Lines that call the methods `read_text` and `write_text`, or open a text stream, without an encoding."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, named = node.func.attr, {keyword.arg: keyword.value for keyword in node.keywords}
        modes = [*node.args[1:2], *filter(None, [named.get("mode")])]
        is_text = name in ("read_text", "write_text") or (
            name == "fdopen" and not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
        )
        is_text = is_text or (name in ("Popen", "run") and "text" in named)
        if is_text and "encoding" not in named:
            lines.append(node.lineno)
    return lines


def test_methods_name_an_encoding() -> None:
    """Ruff does not see these calls if it does not know that the object is a path."""
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_calls_that_are_found() -> None:
    code = """
(folder / "x").read_text()
path.write_text("x", newline="")
os.fdopen(3, "w", buffering=1)
subprocess.run(command, text=True)
path.read_text(encoding="utf-8")
os.fdopen(3, "wb")
subprocess.run(command, stdout=log)
"""
    assert calls_without_encoding(code) == [2, 3, 4, 5]
