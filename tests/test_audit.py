"""The verdict on known vulnerabilities, from answers that pip-audit gave."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "audit.py"
SOUND = {"name": "rich", "version": "15.0.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.15.0+cpu)"}
BAD = {
    "name": "pillow",
    "version": "12.1.0",
    "vulns": [
        {"id": "GHSA-8g5g-8vmr-9782", "fix_versions": ["13.0.0"], "aliases": [], "description": "..."},
        {"id": "PYSEC-2026-1", "fix_versions": [], "aliases": [], "description": "..."},
    ],
}


def recorded(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("answer", "errors", "code", "text"),
    [
        (recorded(SOUND, UNKNOWN), "", 0, "1 of 2 packages audited, none with known vulnerabilities"),
        (recorded(SOUND, BAD), "", 1, "pillow 12.1.0 has GHSA-8g5g-8vmr-9782, PYSEC-2026-1."),
        (recorded(SOUND, BAD), "", 1, "2 of 2 packages audited, 1 with known vulnerabilities"),
        (recorded(UNKNOWN, UNKNOWN), "", 2, "0 of 2 packages audited: the advisory service knows none of them"),
        (recorded(), "", 2, "0 of 0 packages audited"),
        ("", "ERROR: connection failed\nConnectionError: no route", 2, "cannot be reached (ConnectionError: no route)"),
        ("<html>", "", 2, "0 packages audited"),
        ("[]", "", 2, "0 packages audited"),
        ("{}", "", 2, "0 packages audited"),
    ],
)
def test_only_what_was_audited_and_is_sound_passes(answer: str, errors: str, code: int, text: str) -> None:
    spec = importlib.util.spec_from_file_location("audit", FILE)
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    lines, found = audit.verdict(answer, errors)
    assert found == code
    assert text in "\n".join(lines)
